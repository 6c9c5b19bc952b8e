"""Settings of a training that do not depend on how it is cut over devices."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from bpipe.predict.cluster import DeviceKind
from bpipe.predict.layer_variants import Routing

# What decides how long a stage takes, of the model and of how it is trained: a profile that names them is for such setups
# only. What of the setup a trace names.
OF_MODEL = ("hidden_size", "ffn_hidden_size", "num_attention_heads")
OF_STAGE = ("tensor", "sequence", "recompute", "attention", "precision")
OF_SETUP = (*OF_STAGE, "sequence_parallel", "layers", "micro_batch")


@dataclass(frozen=True, slots=True)
class Traced:
    """Bytes that a micro-batch's forward saves, and parameters, by stage and both of one device. `facts`: what was
    traced, by the names of `OF_MODEL` and `OF_SETUP`."""

    facts: tuple[tuple[str, object], ...]
    saved_bytes: tuple[int, ...]
    parameters: tuple[int, ...]

    def conflict(self, setup: Any) -> str | None:
        """Return why the trace says nothing of a Setup; None: it does."""
        for name, value in self.facts:
            own = getattr(setup.model if name in OF_MODEL else setup, name)
            if own != value:
                return f"traced with {name} {_text(value)}, but the setup has {_text(own)}: trace that, too"
        for name in beyond_traces(setup):
            return f"traced without {name}, but the setup has them: leave one of the two out"
        return None


def beyond_traces(setup: Any) -> list[str]:
    """Return what a Setup has of which a trace's facts say nothing."""
    has = {
        "context parallelism": setup.context > 1,
        "experts": setup.model.experts is not None,
        "further tokens": setup.model.further is not None,
        "slices": setup.slices > 1,
        "shards of the vocabulary": setup.is_sharded,
    }
    return [name for name in has if has[name]]


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def traced_sizes(setup: Any) -> Traced | None:
    """Return a Setup's trace where it is of that setup."""
    traced: Traced | None = setup.traced
    return None if traced is None or setup.span is not None or traced.conflict(setup) is not None else traced


ATTENTION = ("unfused", "flash")
PRECISIONS = ("bf16", "fp16", "fp32")
KERNELS = ("gpu", "cpu")
# Whose layers: Megatron's --transformer-impl.
IMPLEMENTATIONS = ("transformer_engine", "local")
# What is captured in CUDA graphs: nothing, or an iteration, by Megatron's --cuda-graph-impl.
CUDA_GRAPHS = ("none", "full_iteration")
# Which weights' halves of split backwards are deferred: the trainer's `--bpipe-keep-weights-halves`.
KEPT_HALVES = ("linear", "none")
# How attention reaches the parts of a sequence on other context-parallel ranks: Megatron's --cp-comm-type.
CP_COMM_TYPES = ("p2p", "all_gather", "a2a")

FP8_FORMATS = ("hybrid", "e4m3")
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
# Scaled in blocks along the sum, a value is another one in either direction.
_IN_BLOCKS = ("blockwise", "mxfp8")

TYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
WHOLE = "fp32"
# By field of `StateTypes`, Megatron's choices; the flag is the field with dashes.
STATE_CHOICES = {
    "main_grads_dtype": (WHOLE, "bf16"),
    "main_params_dtype": (WHOLE, "fp16"),
    "exp_avg_dtype": (WHOLE, "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": (WHOLE, "fp16", "bf16", "fp8"),
}
_REMAINDER_BYTES = 2


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _switch(text: str) -> bool:
    """A switch that is off by default; `text` is its help in the commands."""
    switch: bool = field(default=False, metadata={"help": text})
    return switch


@dataclass(frozen=True, slots=True)
class Switches:
    """Switches that change times or memory, each named as Megatron's flag."""

    overlap_grad_reduce: bool = _switch("overlap the reduction of gradients with computation")
    overlap_param_gather: bool = _switch("overlap the gathering of updated weights with the next forwards")
    no_overlap_p2p_communication: bool = _switch("Megatron's interleaved loop waits for its messages between stages")
    tp_comm_overlap: bool = _switch(
        "with sequence parallelism: Transformer Engine overlaps gathers and scatters with matrix products, part by part"
    )
    bpipe_differing_sizes: bool = _switch("micro-batches may differ in size, so host buffers are an eighth larger")
    accumulate_allreduce_grads_in_fp32: bool = _switch("with fp16: sum and reduce gradients in 32 bits instead of 16")
    grad_reduce_in_bf16: bool = _switch("with bf16: sum and reduce gradients in 16 bits instead of 32")
    attention_softmax_in_fp32: bool = _switch(
        "without flash attention: a softmax in 32 bits, which is saved as well where its kernels are not fused"
    )
    no_masked_softmax_fusion: bool = _switch(
        "without flash attention: the softmax by separate kernels, which take longer"
    )

    def __post_init__(self) -> None:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("--overlap-param-gather needs --overlap-grad-reduce: give both")

    def check(self, training: Training, *, sequence_parallel: bool) -> None:
        """Check that every switch is of something that the training does.

        Args:
            training: Its other settings.
            sequence_parallel: Also True without tensor parallelism.

        Raises:
            ValueError: A switch is of something that the training does not do.
        """
        if self.overlap_param_gather and not training.distributed_optimizer:
            raise ValueError("--overlap-param-gather needs the distributed optimizer: give both, or neither")
        if self.grad_reduce_in_bf16 and training.precision != "bf16":
            raise ValueError(f"--grad-reduce-in-bf16 is for bf16, the precision is {training.precision}: leave it out")
        if self.tp_comm_overlap and not sequence_parallel:
            raise ValueError("--tp-comm-overlap is for sequence parallelism: give that, too, or leave this out")

    def with_overlaps(self, *, distributed_optimizer: bool) -> Switches:
        """Return them with gradients reduced and, if the optimizer is distributed, weights gathered meanwhile."""
        return replace(self, overlap_grad_reduce=True, overlap_param_gather=distributed_optimizer)

    @property
    def flags(self) -> tuple[str, ...]:
        """Switches that are on, as Megatron's flags."""
        return tuple(flag_of(name) for name in SWITCHES if getattr(self, name))


@dataclass(frozen=True, slots=True)
class Fp8:
    """Products of the layers' matrices in 8 bit, as Transformer Engine computes them.

    The embedding, output layer, norms, attention core, routers, weight gradients and the optimizer's state stay as they
    are.
    """

    format: str = FP8_FORMATS[0]
    """Format of gradients: `hybrid` has 5 bits of exponent."""
    recipe: str = FP8_RECIPES[0]
    """Where scales come from: past values of a tensor (`delayed`), its own values, which are read twice (`tensorwise`),
    blocks of 128 values with a scale of 32 bit (`blockwise`) or of 32 values with one of 8 bit (`mxfp8`)."""
    param_gather: bool = False
    """Whether weights are kept and gathered in 8 bit only."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("fp8 format", self.format, FP8_FORMATS),
            ("fp8 recipe", self.recipe, FP8_RECIPES),
        ):
            if value not in choices:
                raise ValueError(f"unknown {name} {value!r}: choose from {', '.join(choices)}")

    def check(self, device: DeviceKind, training: Training) -> None:
        """Raise ValueError for a device without such products, and for trainings that have no use for them."""
        if device.fp8_flops_per_s is None:
            raise ValueError(f"{device.name} has no known FP8 support: choose another device, or give it fp8_tflops")
        if self.recipe == "mxfp8" and not device.fp8_blocks:
            raise ValueError(f"{device.name} has no mxfp8: give --fp8-recipe tensorwise, delayed or blockwise")
        if training.precision == "fp32" or training.kernels == "cpu":
            raise ValueError("FP8 is for training in bf16 or fp16 on GPUs: give --precision bf16 and kernels gpu")
        if self.param_gather and not training.distributed_optimizer:
            raise ValueError("--fp8-param-gather is for the distributed optimizer: leave one of the two out")

    @property
    def value_bytes(self) -> Fraction:
        """Bytes of a value with its part of a scale."""
        return Fraction(33, 32) if self.recipe in _IN_BLOCKS else Fraction(1)

    def copies(self, multiplies_any_layout: bool) -> int:
        """Return the number of copies of an operand: two if a transposed one is kept, as on Hopper."""
        return 2 if self.recipe in _IN_BLOCKS or not multiplies_any_layout else 1

    @property
    def readings(self) -> int:
        """How often a 16-bit tensor is read to be written in 8 bit."""
        return 2 if self.recipe == "tensorwise" else 1

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a weight that is gathered after an update: with mxfp8 it passes in 16 bit."""
        return 1 if self.param_gather and self.recipe != "mxfp8" else 2


@dataclass(frozen=True, slots=True)
class StateTypes:
    """Types of what Adam keeps, by Megatron's `--use-precision-aware-optimizer`; without that flag all are fp32.

    Main weights of 32 bit are then 16 bits that complete the bf16 weight to 32 (`store_param_remainders`), except that
    Megatron itself keeps whole main weights if weights are in 8 bit and scales are not delayed.
    """

    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str = WHOLE
    main_params_dtype: str = WHOLE
    exp_avg_dtype: str = WHOLE
    exp_avg_sq_dtype: str = WHOLE
    optimizer_cpu_offload: bool = False
    """Whether Megatron's `HybridDeviceOptimizer` keeps and updates weights, all in 32 bits whatever the types above."""
    optimizer_offload_fraction: float = 1.0
    """The share of them on the CPU."""

    def __post_init__(self) -> None:
        if not 0 <= self.optimizer_offload_fraction <= 1:
            raise ValueError(
                f"--optimizer-offload-fraction {self.optimizer_offload_fraction:g} is no share: give a number from 0 to 1"
            )
        if self.optimizer_cpu_offload and not self.use_precision_aware_optimizer:
            raise ValueError("--optimizer-cpu-offload needs --use-precision-aware-optimizer: give both, or neither")
        for name, choices in STATE_CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{flag_of(name)} {value} is unknown: choose from {', '.join(choices)}")
            if value != WHOLE and not self.use_precision_aware_optimizer:
                raise ValueError(
                    f"{flag_of(name)} {value} needs --use-precision-aware-optimizer: give that, too, or leave the type out"
                )

    def check(self, training: Training) -> None:
        """Raise ValueError for a training that Megatron refuses."""
        if not self.use_precision_aware_optimizer:
            return
        if not training.distributed_optimizer:
            raise ValueError(
                "--use-precision-aware-optimizer needs the distributed optimizer: give --use-distributed-optimizer, "
                "or leave it out"
            )
        if training.precision == "fp32":
            raise ValueError("--use-precision-aware-optimizer is for bf16 and fp16: give another precision")
        fp8 = training.fp8
        if self.optimizer_cpu_offload and fp8 is not None and fp8.param_gather and fp8.recipe != "delayed":
            raise ValueError(
                f"--optimizer-cpu-offload and --fp8-param-gather with --fp8-recipe {fp8.recipe} exclude each other: give "
                "--fp8-recipe delayed, or leave one of them out"
            )
        if training.switches.accumulate_allreduce_grads_in_fp32 and self.main_grads_dtype != WHOLE:
            raise ValueError(
                f"--main-grads-dtype {self.main_grads_dtype} and --accumulate-allreduce-grads-in-fp32 exclude each "
                f"other: leave one of them out"
            )

    def gradient_copy_bytes(self, fp8: Fp8 | None) -> int:
        """Return bytes per parameter of a 32-bit copy of 16-bit gradients while weights are updated."""
        return 0 if self._keeps_all(fp8) else TYPE_BYTES[WHOLE]

    def state_bytes(self, precision: str, fp8: Fp8 | None) -> tuple[int, int, int]:
        """Return bytes per parameter of main weights and each moment, wherever they are."""
        if self.optimizer_cpu_offload:
            return (TYPE_BYTES[WHOLE],) * 3
        moments = TYPE_BYTES[self.exp_avg_dtype], TYPE_BYTES[self.exp_avg_sq_dtype]
        remains = precision == "bf16" and self.main_params_dtype == WHOLE and self._keeps_all(fp8)
        return _REMAINDER_BYTES if remains else TYPE_BYTES[self.main_params_dtype], *moments

    def _keeps_all(self, fp8: Fp8 | None) -> bool:
        """Whether Adam itself keeps main weights, and reads gradients as they are."""
        scaled = fp8 is not None and fp8.recipe != "delayed"
        keeps = not scaled or self.main_params_dtype != WHOLE or self.optimizer_cpu_offload
        return self.use_precision_aware_optimizer and keeps

    @property
    def on_cpu(self) -> Fraction:
        """Share of parameters that are updated by the CPU."""
        offloaded = self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0
        return Fraction(offloaded).limit_denominator(10**6)


SWITCHES = tuple(switch.name for switch in fields(Switches))
SWITCH_HELP: dict[str, str] = {switch.name: switch.metadata["help"] for switch in fields(Switches)}
STATE_FIELDS = tuple(entry.name for entry in fields(StateTypes))


# Without slots: `Setup` inherits from a class with slots, too.
@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings that all configurations of a search share."""

    precision: str = PRECISIONS[0]
    distributed_optimizer: bool = True
    """Whether replicas share the optimizer's state (ZeRO-1)."""
    kernels: str = KERNELS[0]
    """Fused kernels of a GPU, or plain torch's, with which Megatron runs on a CPU."""
    transformer_impl: str = IMPLEMENTATIONS[0]
    """Whose softmax unfused attention has on a GPU: Transformer Engine's or Megatron's own; layers are alike."""
    cuda_graph_impl: str = CUDA_GRAPHS[0]
    """What is captured in a CUDA graph: its memory is not shared with the update of weights."""
    switches: Switches = Switches()
    routing: Routing = Routing()  # noqa: RUF009  (a frozen value)
    """How tokens come to experts; loads are taken to be even."""
    cp_comm_type: str = CP_COMM_TYPES[0]
    """How attention reaches the parts of a sequence on other context-parallel ranks."""
    fp8: Fp8 | None = None
    """Products in 8 bit; None without."""
    state_types: StateTypes = StateTypes()
    """Types of gradients and of the optimizer's state."""
    traced: Traced | None = None
    """Sizes of stages in Megatron's own model, for the setup that was traced."""
