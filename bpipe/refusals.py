"""Say what of Megatron's features this project cannot train with, with the reason and the way out: the table that the
trainer asks.

In: Megatron's arguments, the configuration of a model that is about to train, or a launch's flags. Out: a line a
reason. What the settings do not have does not apply: a model's configuration says nothing of FSDP. Imports nothing, so
that a plan asks it as the trainer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class Settings:
    """Arguments or a configuration, read without knowing which of the two: what is not there is None."""

    def __init__(self, source: object) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name, None)


def has_experts(settings: Settings) -> bool:
    """Return whether there are any; the arguments and a model's configuration have different names for it."""
    return bool(settings.num_experts or settings.num_moe_experts)


@dataclass(frozen=True)
class Refusal:
    """Something of Megatron's that `--bpipe` cannot do: its name in the documentation, when it applies, why, and the
    way out.

    What stands in the way of moving activations only, `moving`, does not hinder measuring them; what stands in the way
    of our own loop only, `own_loop`, does not hinder Megatron's. What was shown on a CPU only, with a stand-in, may be
    tried by the name `unproven`.
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
        "drop --fp8-format, or try it with --bpipe-unproven fp8 and compare the first losses with a run without "
        "--bpipe",
        unproven="fp8",
    ),
    Refusal("FP4", lambda s: s.fp4 is not None, "FP4 keeps state beside activations", "drop --fp4-format"),
    Refusal(
        "activation offloading",
        lambda s: s.cpu_offloading or (s.cpu_offloading_num_layers or 0) > 0 or s.fine_grained_activation_offloading,
        "activation offloading saves tensors through hooks of autograd, and to look at one is to fetch it: who moves "
        "what cannot be told",
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
        lambda s: has_experts(s) and s.moe_token_dispatcher_type == "flex",
        "the flex dispatcher keeps tokens in communication buffers of its own, and moving those was never tried",
        "use --moe-token-dispatcher-type alltoall",
    ),
    # Autograd runs a node's backward on the stream of its forward, and there the memory that a load filled belongs to
    # another stream's pool: it would be given out again while the node still reads it.
    Refusal(
        "overlapped shared experts",
        lambda s: s.moe_shared_expert_overlap,
        "overlapped shared experts compute on a stream of their own, and what is moved belongs to the stream of "
        "everything else",
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
        "with hybrid context parallelism the number of micro-batches follows from the data, and a program is made "
        "before they are seen",
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

# What a placement that is not Megatron's own cannot do besides: ranks have other layers there, and one has the first
# stage and the last.
PLACED: tuple[Refusal, ...] = (
    Refusal(
        "checkpoints by rank",
        lambda s: (s.save or s.load) and s.ckpt_format != "torch_dist",
        "only checkpoints of the format torch_dist file weights by layer; others file them by rank, and ranks have "
        "other layers here",
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
        "in a layout the layers that predict further tokens are looked up by pipeline rank, and ranks have other "
        "layers here",
        "drop --pipeline-model-parallel-layout or --mtp-num-layers",
    ),
    Refusal(
        "skipped iterations",
        lambda s: s.iterations_to_skip,
        "Megatron skips iterations on one data iterator a rank, and here a rank has one a chunk",
        "drop --iterations-to-skip",
    ),
)

# What shards of the vocabulary cannot do besides: no rank has all logits, and every rank has other rows than it has
# without.
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
        "only checkpoints of the format torch_dist file rows by their place in the vocabulary; others file them by "
        "rank",
        "use --ckpt-format torch_dist",
    ),
    Refusal(
        "local checkpoints of shards",
        lambda s: s.non_persistent_ckpt_type == "local",
        "local checkpoints file weights by rank",
        "use --non-persistent-ckpt-type global",
    ),
)


def _routing(settings: Settings) -> tuple[str, ...]:
    """How the router of experts balances loads: Megatron takes one way, or a list."""
    types = settings.moe_router_load_balancing_type
    return tuple(types) if isinstance(types, (list, tuple)) else (types,)


def _has_auxiliary_losses(settings: Settings) -> bool:
    """Whether the router of experts has a loss of its own."""
    coefficients = settings.moe_aux_loss_coeff
    weighed = any(coefficients) if isinstance(coefficients, (list, tuple)) else bool(coefficients)
    return has_experts(settings) and bool(settings.moe_z_loss_coeff or weighed)


def _routes_again(settings: Settings) -> bool:
    """Whether routers are computed again in the backward."""
    selective = settings.recompute_granularity == "selective" and "moe" in (settings.recompute_modules or ())
    return settings.recompute_granularity == "full" or selective


# What micro-batches that are cut into slices cannot do besides: a slice sees the keys of those before it, and nothing
# else of them.
SLICED: tuple[Refusal, ...] = (
    Refusal(
        "Transformer Engine's attention",
        lambda s: s.transformer_impl == "transformer_engine",
        "its causal mask of slices was read and never run, nor was flash attention's",
        "use --transformer-impl local, or try it with --bpipe-unproven slices and compare the first losses with a run "
        "without slices",
        unproven="slices",
    ),
    Refusal(
        "context parallelism",
        lambda s: (s.context_parallel_size or 1) > 1,
        "a ring of ranks exchanges parts of equal length, and slices attend to ever more keys",
        "use --context-parallel-size 1: slices need as much less memory",
    ),
    Refusal(
        "packed sequences",
        lambda s: s.sft or s.dataloader_inter_document_masking,
        "where packed sequences begin is told of a whole row",
        "drop --sft / --dataloader-inter-document-masking",
    ),
    Refusal(
        "hybrid models in slices",
        lambda s: s.hybrid_layer_pattern or s.is_hybrid_model,
        "Mamba layers carry a state from token to token, which slices do not",
        "drop --hybrid-layer-pattern",
    ),
    Refusal(
        "other attention",
        lambda s: s.experimental_attention_variant,
        "sparse and linear attention keep other things than keys and values",
        "drop --experimental-attention-variant",
    ),
    Refusal(
        "fused rotary positions of latent attention",
        lambda s: s.multi_latent_attention and s.apply_rope_fusion,
        "the fused kernel looks positions up from the sequence's beginning",
        "use --no-rope-fusion",
    ),
    Refusal(
        "fused softmax",
        lambda s: s.transformer_impl == "local" and (s.bf16 or s.fp16) and s.masked_softmax_fusion,
        "the fused softmax takes as many keys as queries, and slices have more",
        "use --no-masked-softmax-fusion",
    ),
    Refusal(
        "one layer for all further tokens",
        lambda s: s.mtp_num_layers and s.mtp_use_repeated_layer,
        "a layer keeps the keys of one pass, and this one runs once for each further token",
        "drop --mtp-use-repeated-layer",
    ),
    Refusal(
        "further tokens in a layout of slices",
        lambda s: s.mtp_num_layers and s.pipeline_model_parallel_layout,
        "a layout may predict further tokens on another stage than the loss, which never ran in slices",
        "drop --pipeline-model-parallel-layout or --mtp-num-layers",
    ),
    Refusal(
        "capacity of experts",
        lambda s: has_experts(s) and s.moe_expert_capacity_factor is not None,
        "which tokens an expert drops is decided among a whole micro-batch's",
        "drop --moe-expert-capacity-factor",
    ),
    Refusal(
        "routing of a whole micro-batch",
        lambda s: has_experts(s) and {"sinkhorn", "quantile_balancing", "global_aux_loss"} & set(_routing(s)),
        "Sinkhorn and quantile balancing choose experts among all tokens of a micro-batch, and a global loss counts "
        "those of several",
        "use --moe-router-load-balancing-type aux_loss, seq_aux_loss or none",
    ),
    Refusal(
        "losses of experts computed again",
        lambda s: _has_auxiliary_losses(s) and _routes_again(s),
        "tokens by expert would be known only behind the backwards that need them",
        "use --recompute-granularity selective without moe, or set --moe-aux-loss-coeff and --moe-z-loss-coeff to 0",
    ),
    Refusal(
        "losses of experts by token",
        lambda s: _has_auxiliary_losses(s) and s.calculate_per_token_loss,
        "Megatron weighs a router's losses by the tokens that it is given, which are a slice's",
        "drop --calculate-per-token-loss, or set --moe-aux-loss-coeff and --moe-z-loss-coeff to 0",
    ),
)


def sliced_reasons(settings: object, slices: int, unproven: str | None) -> list[str]:
    """Return why these settings cannot train in so many slices, of 2 or more: a line each."""
    asked = [refusal for refusal in SLICED if refusal.unproven is None or refusal.unproven != unproven]
    return reasons_of(asked, settings, f"--bpipe-slices {slices}")


# What `--bpipe-unproven` takes.
UNPROVEN = tuple(refusal.unproven for refusal in (*REFUSALS, *SLICED) if refusal.unproven is not None)


# What Megatron's parser calls otherwise than the flag.
_NAMES = {"fp8_format": "fp8", "fp4_format": "fp4"}
# What a launch has that does not say it, as far as the table asks.
_DEFAULTS = {
    "add_bias_linear": True,
    "ckpt_format": "torch_dist",
    "transformer_impl": "transformer_engine",
    "masked_softmax_fusion": True,
    "apply_rope_fusion": True,
}
# Flags that switch one of these off.
_SWITCHED_OFF = {
    "disable_bias_linear": "add_bias_linear",
    "no_masked_softmax_fusion": "masked_softmax_fusion",
    "no_rope_fusion": "apply_rope_fusion",
}


def settings_of(flags: Iterable[str]) -> SimpleNamespace:
    """Return a launch's flags as the table reads them: by the names of Megatron's arguments, which has checked their
    values."""
    found: dict[str, Any] = dict(_DEFAULTS)
    name = ""
    for word in flags:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            name = _NAMES.get(name, name)
            found[name] = _value(value) if equals else True
        elif found.get(name) is True:
            found[name] = _value(word)
        elif name:
            before = found[name]
            found[name] = [*(before if isinstance(before, list) else [before]), _value(word)]
    for flag, name in _SWITCHED_OFF.items():
        if found.pop(flag, False):
            found[name] = False
    return SimpleNamespace(**found)


def _value(word: str) -> int | str | None:
    return int(word) if word.isdecimal() else None if word == "None" else word


def reasons(settings: object, balance: bool, executor: bool = False, unproven: str | None = None) -> list[str]:
    """Return why these settings cannot train with `--bpipe`, or in our loop, or cannot be measured with
    `--bpipe-report`: a line each.

    Each names the flag that asks for it, as far as the settings say which: a model's configuration does not.
    """
    asked = [refusal for refusal in REFUSALS if (balance or not refusal.moving) and (executor or not refusal.own_loop)]
    asked = [refusal for refusal in asked if refusal.unproven is None or refusal.unproven != unproven]
    return reasons_of(asked, settings, "--bpipe" if balance else asked_by(settings) if executor else "--bpipe-report")


def asked_by(settings: object) -> str:
    """Return the flag by which our own loop runs."""
    said = Settings(settings)
    asked = {
        "--bpipe-schedule": said.bpipe_schedule,
        "--bpipe-vocabulary": said.bpipe_vocabulary,
        "--bpipe-slices": None if said.bpipe_slices in (None, 1) else said.bpipe_slices,
    }
    for flag, value in asked.items():
        if value is not None:
            return f"{flag} {value}"
    return "--bpipe-executor" if said.bpipe_executor else "--bpipe-schedule"


def reasons_of(refusals: Sequence[Refusal], settings: object, wanted: str) -> list[str]:
    """Return why these settings cannot train with `wanted`, a flag and its value: a line each."""
    return [
        f"{wanted}: {refusal.reason}; {refusal.remedy}" for refusal in refusals if refusal.applies(Settings(settings))
    ]
