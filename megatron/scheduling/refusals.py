"""What of Megatron `--bpipe` cannot do, with the reason and the way out.

In: Megatron's parsed arguments, or the configuration of a model that is about to train. Out: nothing, or a ValueError with a line a reason.
Knows no tensors and imports no Megatron. What the settings do not have does not apply: a model's configuration says nothing of FSDP.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


class Settings:
    """Arguments or a configuration, read without knowing which of the two: what is not there is None."""

    def __init__(self, source: object) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name, None)


@dataclass(frozen=True)
class Refusal:
    """Something of Megatron's that `--bpipe` cannot do: its name in the documentation, when it applies, why, and the way out.

    What stands in the way of moving activations only, `moving`, does not hinder measuring them; what stands in the way of our own loop
    only, `own_loop`, does not hinder Megatron's. What was shown on a CPU only, with a stand-in, may be tried by the name `unproven`.
    """

    feature: str
    applies: Callable[[Settings], object]
    reason: str
    remedy: str
    moving: bool = False
    own_loop: bool = False
    unproven: str | None = None


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "CUDA graphs",
        lambda s: s.cuda_graph_impl not in (None, "none") or s.enable_cuda_graph or s.external_cuda_graph,
        "CUDA graphs fix the addresses of activations, which move",
        "use --cuda-graph-impl none, and drop --enable-cuda-graph / --external-cuda-graph",
    ),
    Refusal(
        "FP8",
        lambda s: s.fp8 is not None,
        "FP8 saves its values and scales in tensors that were moved with a stand-in only, on a CPU",
        "drop --fp8-format, or try it with --bpipe-unproven fp8 and compare the first losses with a run without --bpipe",
        unproven="fp8",
    ),
    Refusal("FP4", lambda s: s.fp4 is not None, "FP4 keeps state beside activations", "drop --fp4-format"),
    Refusal(
        "activation offloading",
        lambda s: s.cpu_offloading or (s.cpu_offloading_num_layers or 0) > 0 or s.fine_grained_activation_offloading,
        "activation offloading saves tensors through hooks of autograd, and to look at one is to fetch it: who moves what cannot be told",
        "drop --cpu-offloading-num-layers / --fine-grained-activation-offloading",
    ),
    Refusal(
        "combined 1F1B",
        # Megatron has --delay-wgrad-compute with it only.
        lambda s: s.overlap_moe_expert_parallel_comm,
        "the combined 1F1B schedule runs other steps",
        "drop --overlap-moe-expert-parallel-comm / --delay-wgrad-compute",
    ),
    Refusal("paged stash", lambda s: s.moe_paged_stash, "paged stash runs a step again", "drop --moe-paged-stash"),
    Refusal(
        "the flex dispatcher of experts",
        lambda s: _experts(s) and s.moe_token_dispatcher_type == "flex",
        "the flex dispatcher keeps tokens in communication buffers of its own, and moving those was never tried",
        "use --moe-token-dispatcher-type alltoall",
    ),
    # Autograd runs a node's backward on the stream of its forward, and there the memory that a load filled belongs to another stream's
    # pool: it would be given out again while the node still reads it.
    Refusal(
        "overlapped shared experts",
        lambda s: s.moe_shared_expert_overlap,
        "overlapped shared experts compute on a stream of their own, and what is moved belongs to the stream of everything else",
        "drop --moe-shared-expert-overlap",
        moving=True,
    ),
    Refusal(
        "variable sequence lengths",
        lambda s: s.variable_seq_lengths,
        "our own loop tells the shape of what a stage makes once, for all micro-batches",
        "leave variable_seq_lengths at False, or leave the schedule to Megatron's loop",
        own_loop=True,
    ),
    Refusal(
        "hybrid context parallelism",
        lambda s: s.hybrid_context_parallel,
        "with hybrid context parallelism the number of micro-batches follows from the data, and a program is made before they are seen",
        "drop --hybrid-context-parallel",
    ),
    Refusal(
        "distributed saved activations",
        lambda s: s.distribute_saved_activations,
        "saved activations already distributed over tensor-parallel ranks live in a shared buffer",
        "drop --distribute-saved-activations",
    ),
    Refusal(
        "recomputation of the MLP with biases",
        lambda s: s.recompute_granularity == "selective" and "mlp" in (s.recompute_modules or ()) and s.add_bias_linear,
        "Megatron's own recomputation of the MLP hangs when its linear layers have biases",
        "use --disable-bias-linear, or drop mlp from --recompute-modules",
    ),
    Refusal(
        "partial recomputation of micro-batches",
        lambda s: s.num_microbatches_with_partial_activation_checkpoints is not None,
        "our own loop tells no micro-batch to recompute otherwise than the others",
        "leave num_microbatches_with_partial_activation_checkpoints unset, or leave the schedule to Megatron's loop",
        own_loop=True,
    ),
    Refusal(
        "overlapped tensor-parallel communication",
        lambda s: s.tp_comm_overlap,
        "Transformer Engine keeps activations in communication buffers of its own, and moving those was never tried",
        "drop --tp-comm-overlap",
    ),
    Refusal(
        "weights sharded beyond tensor parallelism",
        lambda s: (s.gtp_weight_remat_size or 1) > 1 or (s.expert_gtp_weight_remat_size or 1) > 1,
        "weights that are gathered for a step are saved like activations, and moving those was never tried",
        "drop --tensor-parallel-num-weight-shards / --expert-tensor-parallel-num-weight-shards",
    ),
    Refusal(
        "ring exchange",
        lambda s: s.use_ring_exchange_p2p,
        "the ring exchange of a custom torch was never tried beside the transfers",
        "drop --use-ring-exchange-p2p",
    ),
    Refusal(
        "FSDP",
        lambda s: s.use_megatron_fsdp or s.use_torch_fsdp2,
        "FSDP frees parameters that saved tensors share",
        "drop --use-megatron-fsdp / --use-torch-fsdp2",
    ),
    Refusal(
        "in-process restart",
        lambda s: s.inprocess_restart,
        "an in-process restart cannot rebuild the pairs' process groups",
        "drop --inprocess-restart",
    ),
    Refusal(
        "reinforcement learning",
        lambda s: s.perform_rl_step,
        "reinforcement learning generates text between its iterations, which was never tried",
        "drop --perform-rl-step",
    ),
    Refusal(
        "a fake process group",
        lambda s: s.fake_process_group,
        "a fake process group sends nothing, so activations would not come back",
        "drop --fake-process-group",
    ),
    Refusal(
        "a YAML configuration",
        lambda s: s.yaml_cfg,
        "a YAML configuration replaces the command line, and was never tried",
        "give the flags on the command line instead of --yaml-cfg",
    ),
)

# What a placement that is not Megatron's own cannot do besides: ranks have other layers there, and one has the first stage and the last.
PLACED: tuple[Refusal, ...] = (
    Refusal(
        "checkpoints by rank",
        lambda s: (s.save or s.load) and s.ckpt_format != "torch_dist",
        "only checkpoints of the format torch_dist file weights by layer; others file them by rank, and ranks have other layers here",
        "use --ckpt-format torch_dist",
    ),
    Refusal(
        "local checkpoints",
        lambda s: s.non_persistent_ckpt_type == "local",
        "local checkpoints file weights by rank, and ranks have other layers here",
        "use --non-persistent-ckpt-type global",
    ),
    Refusal(
        "hybrid models",
        lambda s: s.hybrid_layer_pattern,
        "a pattern of layers is dealt out by pipeline rank, and ranks have other layers here",
        "drop --hybrid-layer-pattern",
    ),
    Refusal(
        "further tokens in a layout",
        lambda s: s.mtp_num_layers and s.pipeline_model_parallel_layout,
        "in a layout the layers that predict further tokens are looked up by pipeline rank, and ranks have other layers here",
        "drop --pipeline-model-parallel-layout or --mtp-num-layers",
    ),
    Refusal(
        "skipped iterations",
        lambda s: s.iterations_to_skip,
        "Megatron skips iterations on one data iterator a rank, and here a rank has one a chunk",
        "drop --iterations-to-skip",
    ),
)

# What shards of the vocabulary cannot do besides: no rank has all logits, and every rank has other rows than it has without.
SHARDED: tuple[Refusal, ...] = (
    Refusal(
        "prediction of further tokens",
        lambda s: s.mtp_num_layers,
        "further tokens' losses are made of logits that no rank has",
        "drop --mtp-num-layers",
    ),
    Refusal(
        "deferred gradients of the output layer",
        lambda s: s.defer_embedding_wgrad_compute,
        "Megatron defers the output layer's weight gradient on the last stage, where here is but a part of it",
        "drop --defer-embedding-wgrad-compute",
    ),
    Refusal(
        "models without weights at first",
        lambda s: s.init_model_with_meta_device,
        "rows are dealt out as soon as a model is built, and on the meta device it has none",
        "drop --init-model-with-meta-device",
    ),
    Refusal(
        "checkpoints by rank of shards",
        lambda s: (s.save or s.load) and s.ckpt_format not in (None, "torch_dist"),
        "only checkpoints of the format torch_dist file rows by their place in the vocabulary; others file them by rank",
        "use --ckpt-format torch_dist",
    ),
    Refusal(
        "local checkpoints of shards",
        lambda s: s.non_persistent_ckpt_type == "local",
        "local checkpoints file weights by rank",
        "use --non-persistent-ckpt-type global",
    ),
)


# What makes micro-batches of one stage save differing sizes: where the router sends tokens, what was packed together, how long sequences
# are, and which micro-batches recompute.
_DIFFERING: tuple[Callable[[Settings], object], ...] = (
    lambda s: _experts(s) and not s.moe_pad_expert_input_to_capacity,
    lambda s: s.sft or s.dataloader_inter_document_masking,
    lambda s: s.variable_seq_lengths,
    lambda s: s.num_microbatches_with_partial_activation_checkpoints is not None,
)


def differ(settings: object) -> bool:
    """Whether micro-batches of one stage may save differing sizes by these settings."""
    return any(applies(Settings(settings)) for applies in _DIFFERING)


def _experts(settings: Settings) -> bool:
    """Whether there are any; the arguments and a model's configuration have different names for it."""
    return bool(settings.num_experts or settings.num_moe_experts)


# What `--bpipe-unproven` takes.
UNPROVEN = tuple(refusal.unproven for refusal in REFUSALS if refusal.unproven is not None)


def reasons(settings: object, balance: bool, executor: bool = False, unproven: str | None = None) -> list[str]:
    """Why these settings cannot train with `--bpipe`, or by our loop, or cannot be measured with `--bpipe-report`: a line each, or none."""
    wanted = "--bpipe" if balance else "--bpipe-schedule" if executor else "--bpipe-report"
    asked = [refusal for refusal in REFUSALS if (balance or not refusal.moving) and (executor or not refusal.own_loop)]
    asked = [refusal for refusal in asked if refusal.unproven is None or refusal.unproven != unproven]
    return [f"{wanted}: {refusal.reason}; {refusal.remedy}" for refusal in asked if refusal.applies(Settings(settings))]


def reasons_of(refusals: Sequence[Refusal], settings: object, wanted: str) -> list[str]:
    """Why these settings cannot train with what `wanted`, a flag and its value, brings: a line each, or none."""
    return [f"{wanted}: {refusal.reason}; {refusal.remedy}" for refusal in refusals if refusal.applies(Settings(settings))]


def refuse(settings: object, balance: bool, executor: bool = False, unproven: str | None = None) -> None:
    """Raise ValueError with every reason. A script of one's own may set in its model what no flag says: give that model's configuration."""
    end_where([*reasons(settings, balance, executor, unproven), *(_of_sessions() if balance else ())])


def _of_sessions() -> Iterator[str]:
    """Asked of what is loaded: whoever trains without a session never loads it."""
    guards = sys.modules.get("terra.run.guards")
    if guards is not None and guards.is_any_open():
        yield (
            "a terra.Session is open: under it a stage saves placeholders, whose memory is not there when --bpipe looks for it; close the "
            "session, or train without --bpipe"
        )


def end_where(problems: Sequence[str]) -> None:
    """Raise ValueError with all of them at once, if there are any."""
    if problems:
        raise ValueError("\n  ".join(["this run cannot start:", *problems]))
