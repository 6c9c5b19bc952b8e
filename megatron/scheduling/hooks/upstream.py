"""The Megatron of this process, and the arguments and settings that this project reads. Importing it imports no Megatron."""

import functools
import importlib.util
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

TRIED_VERSIONS = ("0.19.2",)


class Unfit(RuntimeError):
    """The Megatron that runs is not one that bpipe can use."""


@dataclass(frozen=True)
class Running:
    """The megatron-core that was imported."""

    version: str
    """Its own version, maybe with the hash of a commit."""

    place: Path
    """Its folder."""

    @property
    def release(self) -> str:
        """The version without what a build or a checkout appended."""
        # Not at the top: it comes with megatron-core, without which the program ends in one line.
        from packaging.version import InvalidVersion, Version

        try:
            return Version(self.version).public
        except InvalidVersion:
            return self.version

    @property
    def tried(self) -> bool:
        return self.release in TRIED_VERSIONS


def running() -> Running:
    """Return the Megatron that Python finds first, which may be a checkout instead of the installed wheel."""
    # Not at the top: the CPU stand-in has to precede Megatron.
    from megatron import core

    return Running(str(core.__version__), Path(str(core.__file__)).resolve().parent)


def describe(megatron: Running) -> list[str]:
    """Return lines for the log: version, place, and anything unusual about them."""
    wheel = _installed()
    shadowed = (
        f", not the installed wheel ({wheel[0]}), because it comes first on sys.path"
        if wheel and wheel[1] != megatron.place
        else ""
    )
    lines = [f"megatron-core {megatron.version} from {megatron.place}{shadowed}"]
    if not megatron.tried:
        lines.append(
            f"megatron-core {megatron.release} is not among the tested versions ({', '.join(TRIED_VERSIONS)}); the "
            "functions that bpipe replaces have the expected parameters"
        )
    training = importlib.util.find_spec("megatron.training")
    origin = Path(training.origin).resolve().parent if training is not None and training.origin is not None else None
    if origin is not None and origin.parent != megatron.place.parent:
        lines.append(f"megatron.training comes from another copy, {origin}: two versions may be mixed")
    return lines


def _installed() -> tuple[str, Path] | None:
    """Return version and folder of the wheel that pip installed; an editable installation has no folder of its own."""
    try:
        wheel = metadata.distribution("megatron-core")
    except metadata.PackageNotFoundError:
        return None
    place = Path(str(wheel.locate_file("megatron/core")))
    return (wheel.version, place.resolve()) if place.is_dir() else None


@functools.cache
def remark(line: str) -> None:
    """Print a line once, from rank 0; there may be no process group yet."""
    if os.environ.get("RANK", "0") == "0":
        print(f"bpipe: {line}", flush=True)


# Modules that read a model's configuration; the others read Megatron's arguments.
OF_CONFIGURATION = "driver executor grad_sync links megatron_loops stand_in state transfer_waits".split()

# By module, the attributes of Megatron's arguments or of a model's configuration that it cannot work without.
REQUIRED: dict[str, tuple[str, ...]] = {
    module: tuple(names.split())
    for module, names in {
        "gpu_sharing": "local_rank",
        "rank_order": """
            context_parallel_size pipeline_model_parallel_size rank tensor_model_parallel_size use_tp_pp_dp_mapping
            world_size
        """,
        "arguments": """
            context_parallel_size distributed_timeout_minutes log_interval micro_batch_size padded_vocab_size
            pipeline_model_parallel_size seq_length tensor_model_parallel_size tensorboard_log_interval
            timing_log_level train_iters
        """,
        "driver": "timers",
        "schedule_choice": """
            micro_batch_size padded_vocab_size pipeline_model_parallel_size seq_length sequence_parallel
            tensor_model_parallel_size virtual_pipeline_model_parallel_size
        """,
        "state": """
            ffn_hidden_size gated_linear_unit hidden_size kv_channels moe_ffn_hidden_size moe_router_topk
            num_attention_heads num_moe_experts num_query_groups
        """,
        "budgets": "padded_vocab_size step_batch_size_schedule vocab_size world_size",
        "sizes": """
            data_parallel_size global_batch_size micro_batch_size pipeline_model_parallel_size
            step_batch_size_schedule virtual_pipeline_model_parallel_size
        """,
        "pipes": """
            context_parallel_size global_batch_size micro_batch_size num_virtual_stages_per_pipeline_rank
            pipeline_model_parallel_size tensor_model_parallel_size use_mp_args_from_checkpoint_args
            use_tp_pp_dp_mapping world_size
        """,
        "derived_flags": """
            account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
            decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers dist_ckpt_optim_fully_reshardable
            num_layers num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank overlap_p2p_comm
            pipeline_model_parallel_layout pipeline_model_parallel_size use_distributed_optimizer
            use_mp_args_from_checkpoint_args
        """,
        "redistribution": """
            account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
            decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers hidden_size hybrid_layer_pattern
            make_vocab_size_divisible_by mtp_num_layers num_layers num_layers_per_virtual_pipeline_stage
            num_virtual_stages_per_pipeline_rank padded_vocab_size pipeline_model_parallel_layout
            pipeline_model_parallel_size seq_length tensor_model_parallel_size vocab_size
        """,
        "executor": "barrier_with_L1_time calculate_per_token_loss finalize_model_grads_func timers",
        "transfer_waits": "batch_p2p_sync",
        "grad_sync": "grad_sync_func no_sync_func param_sync_func",
        "halves": """
            add_bias_linear delay_wgrad_compute gradient_accumulation_fusion overlap_grad_reduce transformer_impl
        """,
        "megatron_loops": "barrier_with_L1_time finalize_model_grads_func microbatch_group_size_per_vp_stage",
        "links": "pipeline_dtype",
        "stand_in": "moe_expert_capacity_factor moe_router_topk num_moe_experts",
        "tokenizer": "pad_vocab_size tokenizer_type vocab_size",
        "validation": """
            context_parallel_size data_parallel_size decrease_batch_size_if_needed expert_gtp_weight_remat_size
            expert_model_parallel_size expert_tensor_parallel_size global_batch_size gtp_weight_remat_size
            hierarchical_context_parallel_sizes hybrid_context_parallel hybrid_layer_pattern micro_batch_size
            num_distributed_optimizer_instances num_layers pipeline_model_parallel_size seq_length
            step_batch_size_schedule tensor_model_parallel_size use_tp_pp_dp_mapping
            virtual_pipeline_model_parallel_size world_size
        """,
        "one_stage": """
            context_parallel_size expert_model_parallel_size expert_tensor_parallel_size hidden_size
            make_vocab_size_divisible_by padded_vocab_size params_dtype pipeline_model_parallel_size seed seq_length
            sequence_parallel tensor_model_parallel_size virtual_pipeline_model_parallel_size vocab_size world_size
        """,
        "stages": """
            bf16 context_parallel_size cp_comm_type ffn_hidden_size fp16 fp4 fp8 global_batch_size hidden_size
            hybrid_layer_pattern micro_batch_size moe_permute_fusion moe_router_fusion moe_router_load_balancing_type
            moe_token_dispatcher_type multi_latent_attention num_attention_heads overlap_param_gather perform_initialization
            pipeline_model_parallel_size qk_head_dim qk_pos_emb_head_dim recompute_modules seq_length
            tensor_model_parallel_size v_head_dim
        """,
        "profile": """
            attention_backend bf16 ffn_hidden_size fp16 global_batch_size hidden_size num_attention_heads num_layers
            pipeline_model_parallel_size recompute_granularity seq_length tensor_model_parallel_size transformer_impl
        """,
        "pretrain_gpt": """
            allow_ambiguous_pad_tokens check_for_nan_in_loss_and_grad context_parallel_size
            create_attention_mask_in_dataloader data_cache_path dataloader_inter_document_masking eod_mask_loss
            full_validation micro_batch_size mid_level_dataset_surplus mmap_bin_files mock_data mtp_num_layers
            multiple_validation_sets num_dataset_builder_threads object_storage_cache_path
            pipeline_model_parallel_size reset_attention_mask reset_position_ids seed seq_length sft split
        """,
    }.items()
}


# By assumption, the settings that may be missing (`bpipe.config.features.Settings` reads them as None).
_ASSUMED = {
    "linear layers without biases": "add_bias_linear",
    "no biases are fused": "bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion quick_geglu swiglu",
    "rotary embeddings are not fused": "apply_rope_fusion",
    "32 bits": "bf16 fp16",
    "checkpoints by rank": "ckpt_format",
    "no context parallelism": "context_parallel_size",
    "losses are averaged per micro-batch": "calculate_per_token_loss",
    "no activation offloading": "cpu_offloading cpu_offloading_num_layers fine_grained_activation_offloading",
    "no CUDA graphs": "cuda_graph_impl enable_cuda_graph external_cuda_graph",
    "CUDA graphs of whole layers": "cuda_graph_modules cuda_graph_scope",
    "no packed sequences": "dataloader_inter_document_masking hybrid_context_parallel sft",
    "no deferred gradients": "defer_embedding_wgrad_compute",
    "saved activations stay whole": "distribute_saved_activations",
    "standard attention": "experimental_attention_variant",
    "weights sharded by tensor parallelism alone": """
        expert_gtp_weight_remat_size gtp_weight_remat_size tensor_parallel_num_weight_shards
    """,
    "real process groups": "fake_process_group",
    "no FP4": "fp4",
    "no FP8": "fp8",
    "layers of one kind": "hybrid_layer_pattern is_hybrid_model",
    "models are built with their weights": "init_model_with_meta_device",
    "no in-process restart": "inprocess_restart",
    "no iteration is skipped": "iterations_to_skip",
    "nothing is loaded": "load",
    "softmax is not fused": "masked_softmax_fusion",
    "experts without auxiliary losses": "moe_aux_loss_coeff moe_router_load_balancing_type moe_z_loss_coeff",
    "experts one after the other": "moe_grouped_gemm",
    "experts without a fixed capacity": "moe_expert_capacity_factor moe_pad_expert_input_to_capacity",
    "no paged stash": "moe_paged_stash",
    "shared experts are not overlapped": "moe_shared_expert_overlap",
    "not the flex dispatcher": "moe_token_dispatcher_type",
    "no multi-token prediction": "mtp_detach_heads mtp_num_layers mtp_use_repeated_layer",
    "no latent attention": "multi_latent_attention",
    "checkpoints for all": "non_persistent_ckpt_type",
    "no experts": "num_experts num_moe_experts",
    "all micro-batches recompute the same": "num_microbatches_with_partial_activation_checkpoints",
    "no combined 1F1B": "overlap_moe_expert_parallel_comm",
    "no reinforcement learning": "perform_rl_step",
    "no layer layout": "pipeline_model_parallel_layout",
    "no pipeline": "pipeline_model_parallel_size",
    "no recomputation": "recompute_granularity recompute_modules",
    "nothing is saved": "save",
    "slices of equal length": "seq_length",
    "no sequence parallelism": "sequence_parallel",
    "no tensor parallelism": "tensor_model_parallel_size",
    "tensor-parallel communication is not overlapped": "tp_comm_overlap",
    "neither local nor Transformer Engine layers": "transformer_impl",
    "the model says whether weights are tied": "untie_embeddings_and_output_weights",
    "no FSDP": "use_megatron_fsdp use_torch_fsdp2",
    "no ring exchange": "use_ring_exchange_p2p",
    "sequences of equal length": "variable_seq_lengths",
    "no YAML configuration": "yaml_cfg",
}
OPTIONAL = dict(sorted((name, assumed) for assumed, names in _ASSUMED.items() for name in names.split()))
# 0.19.2 has these in one of the two only.
_NOT_IN_ARGUMENTS = set(
    """cpu_offloading cuda_graph_scope num_microbatches_with_partial_activation_checkpoints num_moe_experts
    variable_seq_lengths""".split()
)
_NOT_IN_CONFIGURATION = set(
    """bias_gelu_fusion bias_swiglu_fusion ckpt_format dataloader_inter_document_masking fake_process_group
    hybrid_layer_pattern inprocess_restart iterations_to_skip load non_persistent_ckpt_type num_experts perform_rl_step
    quick_geglu save seq_length sft swiglu untie_embeddings_and_output_weights use_megatron_fsdp use_torch_fsdp2
    yaml_cfg""".split()
)


def require(source: object, module: str) -> None:
    """Raise Unfit if Megatron's arguments, or a model's configuration, lack what one of our modules reads."""
    lacking = [name for name in REQUIRED[module] if not hasattr(source, name)]
    if lacking:
        megatron = running()
        kind = "configuration has" if module in OF_CONFIGURATION else "arguments have"
        raise Unfit(
            f"megatron-core {megatron.version} at {megatron.place} cannot be used by bpipe's {module}: its {kind} no "
            f"{', '.join(lacking)}. Install megatron-core=={TRIED_VERSIONS[-1]}, or train without bpipe"
        )


def say_absent(source: object, *, configuration: bool) -> None:
    """Print the settings that an untested version lacks, and the assumptions: it may have renamed one."""
    megatron = running()
    if megatron.tried:
        return
    elsewhere = _NOT_IN_CONFIGURATION if configuration else _NOT_IN_ARGUMENTS
    absent = [
        f"{name} ({meaning})"
        for name, meaning in OPTIONAL.items()
        if name not in elsewhere and not hasattr(source, name)
    ]
    if absent:
        remark(
            f"megatron-core {megatron.release} lacks these settings in its "
            f"{'model configuration' if configuration else 'arguments'}; bpipe assumes: {'; '.join(absent)}"
        )
