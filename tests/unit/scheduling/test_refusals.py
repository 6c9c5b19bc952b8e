"""Every refusal applies to its feature, in Megatron's arguments and a model's configuration, and to nothing else."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

import terra
from bpipe.config.features.queries import features_of, guarded, reasons, sliced_reasons
from bpipe.config.features.table import FEATURES, SLICED, State
from megatron.scheduling.options.arguments import differ, refuse, slices_differ

COMBINED: dict[str, Any] = {"overlap_moe_expert_parallel_comm": True, "pipeline_model_parallel_size": 2}
GRAPH: dict[str, Any] = {"cuda_graph_impl": "full_iteration"}
# Other features that a feature's settings also match.
BESIDE = {
    **dict.fromkeys(
        (
            "differing sizes in a CUDA graph of an iteration",
            "checks of replays",
            "shards of the vocabulary or slices in a CUDA graph of an iteration",
            "two pipelines in a CUDA graph of an iteration",
        ),
        ("CUDA graphs of an iteration",),
    ),
    "combined 1F1B in our loop": ("combined 1F1B",),
    "combined 1F1B without a pipeline": ("combined 1F1B",),
    "fine-grained offloading in our loop": ("fine-grained activation offloading",),
}
BIASES = {"num_experts": 8, "add_bias_linear": True}
GROUPED = {"moe_grouped_gemm": True, "transformer_impl": "transformer_engine"}
# Settings that are refused, by feature; several if several names lead to one feature.
REFUSED: dict[str, list[dict[str, Any]]] = {
    "CUDA graphs of an iteration": [
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
    ],
    "differing sizes in a CUDA graph of an iteration": [
        GRAPH | {"bpipe_differing_sizes": True},
        GRAPH | {"variable_seq_lengths": True},
    ],
    "checks of replays": [
        GRAPH | {"bpipe_verify": "all"},
        GRAPH | {"bpipe_verify": 2.0, "cuda_graph_warmup_steps": 1},
        GRAPH | {"bpipe_verify": 4},
    ],
    "shards of the vocabulary or slices in a CUDA graph of an iteration": [
        GRAPH | {"bpipe_vocabulary": "1"},
        GRAPH | {"bpipe_slices": 2},
    ],
    "two pipelines in a CUDA graph of an iteration": [GRAPH | {"bpipe_schedule": "chimera"}],
    "CUDA graphs of whole layers": [
        {"cuda_graph_impl": "transformer_engine"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "full"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "mlp"]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "moe"], "num_moe_experts": 8},
        {"external_cuda_graph": True},
    ],
    "local CUDA graphs": [
        {"cuda_graph_impl": "local"},
        {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
        {"enable_cuda_graph": True},
    ],
    "CUDA graphs of parts of layers": [
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "moe_router,moe_preprocess"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [SimpleNamespace(name="attn")]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "mlp"], "num_experts": 8},
    ],
    "FP8": [{"fp8": "hybrid"}],
    "FP4": [{"fp4": "e2m1"}],
    "activation offloading": [{"cpu_offloading": True}, {"cpu_offloading_num_layers": 1}],
    "fine-grained activation offloading": [{"fine_grained_activation_offloading": True}],
    "fine-grained offloading in our loop": [{"fine_grained_activation_offloading": True}],
    "combined 1F1B": [COMBINED],
    "combined 1F1B in our loop": [COMBINED],
    "combined 1F1B without a pipeline": [COMBINED | {"pipeline_model_parallel_size": 1}],
    "paged stash": [{"moe_paged_stash": True}],
    "packed sequences on context-parallel ranks": [
        {"context_parallel_size": 2, "sft": True},
        {"context_parallel_size": 2, "dataloader_inter_document_masking": True},
    ],
    "the flex dispatcher of experts": [
        {"num_experts": 8, "moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": "flex"},
        {"num_moe_experts": 8, "moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": "flex"},
    ],
    "overlapped shared experts": [{"moe_shared_expert_overlap": True}],
    "hybrid context parallelism": [{"hybrid_context_parallel": True}],
    "distributed saved activations": [{"distribute_saved_activations": True}],
    "recomputation of the MLP with biases": [
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"], "add_bias_linear": True}
    ],
    "experts with biases and a fused activation": [
        {**BIASES, "bias_gelu_fusion": True},
        {**BIASES, "bias_gelu_fusion": True, **GROUPED, "bias_dropout_fusion": False},
        {**BIASES, "swiglu": True, "bias_swiglu_fusion": True, "bias_dropout_fusion": True},
    ],
    "grouped experts with biases and a fused dropout": [
        {**BIASES, **GROUPED, "swiglu": True, "bias_swiglu_fusion": True, "bias_dropout_fusion": True},
        {**BIASES, **GROUPED, "bias_gelu_fusion": False, "bias_dropout_fusion": True},
    ],
    "partial recomputation of micro-batches": [{"num_microbatches_with_partial_activation_checkpoints": 0}],
    "overlapped tensor-parallel communication": [{"tp_comm_overlap": True}],
    "weights sharded beyond tensor parallelism": [{"gtp_weight_remat_size": 2}, {"expert_gtp_weight_remat_size": 2}],
    "ring exchange": [{"use_ring_exchange_p2p": True}],
    "FSDP": [{"use_megatron_fsdp": True}, {"use_torch_fsdp2": True}],
    "in-process restart": [{"inprocess_restart": True}],
    "reinforcement learning": [{"perform_rl_step": True}],
    "a fake process group": [{"fake_process_group": True}],
    "a YAML configuration": [{"yaml_cfg": "run.yaml"}],
}

# Settings that resemble a refused feature but are fine.
ALLOWED: list[dict[str, Any]] = [
    {},
    {
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "microbatch_group_size_per_vp_stage": 4,
    },
    {"pipeline_model_parallel_size": 4, "microbatch_group_size_per_vp_stage": 8},
    {"cuda_graph_impl": "none", "enable_cuda_graph": False, "cpu_offloading_num_layers": 0, "gtp_weight_remat_size": 1},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"], "add_bias_linear": True},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "add_bias_linear": False},
    {"recompute_granularity": "full", "recompute_modules": ["core_attn", "mlp"], "add_bias_linear": True},
    {"num_experts": None, "num_moe_experts": None, "moe_router_topk": 2, "moe_token_dispatcher_type": "flex"},
    {"num_experts": 8, "moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": "alltoall"},
    {**BIASES, "bias_gelu_fusion": False, "bias_dropout_fusion": True},
    {**BIASES, "quick_geglu": True, "bias_gelu_fusion": True},
    {**BIASES, **GROUPED, "swiglu": True, "bias_swiglu_fusion": True, "bias_dropout_fusion": False},
    {**BIASES, "add_bias_linear": False, **GROUPED, "bias_gelu_fusion": False, "bias_dropout_fusion": True},
]


@pytest.mark.parametrize(
    ("feature", "settings"), [(feature, case) for feature, tried in REFUSED.items() for case in tried]
)
def test_what_cannot_be_balanced_is_refused_for_its_own_reason(feature: str, settings: dict[str, Any]) -> None:
    (refusal,) = (refusal for refusal in FEATURES if refusal.name == feature)
    arguments = SimpleNamespace(**settings)
    refused = [f"--bpipe: {refusal.reason}; {refusal.remedy}"] if refusal.state is State.REFUSED else []
    beside = [candidate for candidate in FEATURES if candidate.name in BESIDE.get(feature, ())]
    assert features_of(arguments, True, executor=refusal.own_loop) == [refusal, *beside]
    assert reasons(arguments, True, executor=refusal.own_loop) == refused
    strictly = [
        f"--bpipe-strict: {refusal.name} is guarded: {refusal.reason}; {refusal.remedy}, or drop --bpipe-strict"
    ]
    if not beside:
        assert reasons(arguments, True, executor=refusal.own_loop, strict=True) == (refused or strictly)
    assert [candidate.name for candidate in guarded(arguments, balance=True)] == [
        *[feature] * (not refused),
        *(candidate.name for candidate in beside),
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_experts": 8, "moe_token_dispatcher_type": "alltoall"}, True),
        ({"num_moe_experts": 8}, True),
        ({"num_moe_experts": 8, "moe_pad_expert_input_to_capacity": True}, False),
        ({"sft": True}, True),
        ({"dataloader_inter_document_masking": True}, True),
        ({"variable_seq_lengths": True}, True),
        ({"fine_grained_activation_offloading": True}, True),
        ({"num_microbatches_with_partial_activation_checkpoints": 0}, True),
        ({}, False),
    ],
)
def test_what_makes_sizes_differ_is_known_and_trains(settings: dict[str, Any], expected: bool) -> None:
    assert differ(SimpleNamespace(**settings)) is expected
    refuse(SimpleNamespace(**settings), balance=True)


@pytest.mark.parametrize("settings", ALLOWED)
def test_nothing_else_is_refused(settings: dict[str, Any]) -> None:
    refuse(SimpleNamespace(**settings), balance=True)


def test_a_session_that_is_open_is_refused_with_the_reason() -> None:
    """BPipe would search for the memory of placeholders."""
    with contextlib.closing(terra.Session()):
        refuse(SimpleNamespace(), balance=False)
        with pytest.raises(ValueError, match=r"a terra\.Session is open: .* close the session, or train without"):
            refuse(SimpleNamespace(), balance=True)
    refuse(SimpleNamespace(), balance=True)


SLICED_TOO: dict[str, list[dict[str, Any]]] = {
    "Transformer Engine's attention": [{"transformer_impl": "transformer_engine"}],
    "context parallelism": [{"context_parallel_size": 2}],
    "variable lengths in slices": [{"variable_seq_lengths": True}],
    "packed sequences": [{"sft": True}, {"dataloader_inter_document_masking": True}],
    "hybrid models in slices": [{"hybrid_layer_pattern": "M*"}, {"is_hybrid_model": True}],
    "other attention": [{"experimental_attention_variant": "dsa"}],
    "fused rotary positions of latent attention": [{"multi_latent_attention": True, "apply_rope_fusion": True}],
    "fused softmax": [
        {"transformer_impl": "local", "bf16": True, "masked_softmax_fusion": True},
        {"transformer_impl": "local", "fp16": True, "masked_softmax_fusion": True},
    ],
    "one layer for all further tokens": [{"mtp_num_layers": 2, "mtp_use_repeated_layer": True}],
    "further tokens in a layout of slices": [{"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|tmL"}],
    "capacity of experts": [{"num_experts": 4, "moe_expert_capacity_factor": 1.0}],
    "routing of a whole micro-batch": [
        {"num_experts": 4, "moe_router_load_balancing_type": "sinkhorn"},
        {"num_moe_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]},
        {"num_experts": 4, "moe_router_load_balancing_type": "quantile_balancing"},
    ],
    "losses of experts computed again": [
        {"num_experts": 4, "moe_aux_loss_coeff": 0.1, "recompute_granularity": "full"},
        {"num_experts": 4, "moe_z_loss_coeff": 0.1, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {"num_experts": 4, "moe_aux_loss_coeff": [0.0, 0.1], "recompute_granularity": "full"},
    ],
    "losses of experts by token": [{"num_moe_experts": 4, "moe_z_loss_coeff": 0.001, "calculate_per_token_loss": True}],
}
UNSLICED: list[dict[str, Any]] = [
    {"transformer_impl": "local", "context_parallel_size": 1, "masked_softmax_fusion": True},
    {"transformer_impl": "local", "bf16": True, "masked_softmax_fusion": False, "multi_latent_attention": True},
    {
        "num_experts": 4,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_enable_expert_bias": True,
    },
    {
        "num_experts": 4,
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.01, 0.1],
    },
    {
        "num_experts": 4,
        "moe_z_loss_coeff": 0.01,
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    },
    {"num_experts": 4, "moe_aux_loss_coeff": 0.0, "recompute_granularity": "full", "calculate_per_token_loss": True},
    {"moe_router_load_balancing_type": "sinkhorn", "recompute_granularity": "full", "moe_aux_loss_coeff": 0.1},
    {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "apply_rope_fusion": True},
    {"mtp_num_layers": 2, "mtp_use_repeated_layer": False},
    {"mtp_use_repeated_layer": True, "pipeline_model_parallel_layout": "Et|tL"},
]


@pytest.mark.parametrize(
    ("feature", "settings"), [(feature, case) for feature, tried in SLICED_TOO.items() for case in tried]
)
def test_what_cannot_be_cut_is_refused_for_its_own_reason(feature: str, settings: dict[str, Any]) -> None:
    (refusal,) = (refusal for refusal in SLICED if refusal.name == feature)
    arguments, sentence = SimpleNamespace(**settings), f"{refusal.reason}; {refusal.remedy}"
    assert sliced_reasons(arguments, 4) == [f"--bpipe-slices 4: {sentence}"] * (refusal.state is State.REFUSED)
    strictly = sliced_reasons(arguments, 4, strict=True)
    assert strictly == sliced_reasons(arguments, 4) or strictly == [
        f"--bpipe-strict: {refusal.name} is guarded: {sentence}, or drop --bpipe-strict"
    ]


@pytest.mark.parametrize("settings", UNSLICED)
def test_what_can_be_cut_is_not_refused(settings: dict[str, Any]) -> None:
    assert sliced_reasons(SimpleNamespace(**settings), 4, strict=True) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"seq_length": 64, "transformer_impl": "local"}, True),
        ({"seq_length": 64, "transformer_impl": "transformer_engine"}, False),
        ({"seq_length": 63, "transformer_impl": "transformer_engine"}, True),
        # 32 units of 2 tokens make 4 equal slices, 34 do not.
        ({"seq_length": 64, "tensor_model_parallel_size": 2, "sequence_parallel": True}, False),
        ({"seq_length": 68, "tensor_model_parallel_size": 2, "sequence_parallel": True}, True),
        ({"seq_length": 68, "tensor_model_parallel_size": 2, "sequence_parallel": False}, False),
        ({"seq_length": 64, "transformer_impl": "local", "recompute_granularity": "full"}, False),
        ({"seq_length": 64, "transformer_impl": "local", "recompute_granularity": "selective"}, False),
        (
            {
                "seq_length": 64,
                "transformer_impl": "local",
                "recompute_granularity": "selective",
                "recompute_modules": ["mlp"],
            },
            True,
        ),
    ],
)
def test_slices_of_unfused_attention_or_uneven_lengths_differ_in_size(settings: dict[str, Any], expected: bool) -> None:
    assert slices_differ(SimpleNamespace(**settings), 4) is expected
    assert not slices_differ(SimpleNamespace(**settings), 1)
