"""One configuration of a training: how a model is cut over devices, what is recomputed, and how it is balanced."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bpipe.balance.budget import ActivationBudget
from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, ScheduleSpec, sized
from bpipe.predict.cluster import Cluster, ErrorBars, error_bars, time_factor
from bpipe.predict.layer_variants import Routing
from bpipe.predict.model import Model
from bpipe.predict.recompute import Recompute, StageLayers, read_recompute, stage_layers
from bpipe.predict.training import (
    ATTENTION,
    CP_COMM_TYPES,
    CUDA_GRAPHS,
    IMPLEMENTATIONS,
    KEPT_HALVES,
    KERNELS,
    PRECISIONS,
    Training,
)
from bpipe.schedule.families.families import FAMILIES, default_family
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import EVEN, Layout, SliceLengths, Vocabulary, microbatches_of
from bpipe.schedule.program import Exchange

# To the fewest micro-batches that all pairs can keep.
EVENLY = BalanceConfig()
_CHOICES = {
    "attention": ATTENTION,
    "precision": PRECISIONS,
    "kernels": KERNELS,
    "keep_weights_halves": KEPT_HALVES,
    "cp_comm_type": CP_COMM_TYPES,
    "transformer_impl": IMPLEMENTATIONS,
    "cuda_graph_impl": CUDA_GRAPHS,
}


@dataclass(frozen=True, slots=True)
class Setup(ScheduleSpec, Training):
    """One configuration, with a request for its schedule.

    A schedule with two pipes has two copies of every stage in each pipeline: `data` counts pipelines, `replicas` copies
    of the weights.
    """

    model: Model
    cluster: Cluster
    tensor: int
    """Tensor-parallel size."""
    pipeline: int
    """Ranks of a pipeline."""
    micro_batch: int
    """Sequences of a micro-batch."""
    global_batch: int
    """Sequences of an iteration, over all replicas."""
    sequence: int
    """Tokens of a sequence."""
    layers: tuple[int, ...]
    """Layers of every stage. The first of several may have the embedding alone, the last the output layer alone."""
    recompute: str = "selective"
    """A text of `bpipe.predict.recompute`."""
    attention: str = "flash"
    schedule: str = default_family(1)
    """Name of the schedule's family."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks share what is between matrices; without tensor parallelism it changes nothing."""
    keep_weights_halves: str = KEPT_HALVES[0]
    """With split backwards: which weights' halves are deferred."""
    budget_bytes: tuple[int, ...] | None = None
    """Bytes that a device of each rank may hold; by default all that it has."""
    context: int = 1
    """Context-parallel size."""
    slice_lengths: SliceLengths = EVEN
    """Lengths of slices, if sequences are cut."""
    span: tuple[int, int] | None = None
    """First and end token of a slice: sizes and seconds are then those of its tokens (`predict.slices`)."""
    mtp_stage: int | None = None
    """Stage that predicts further tokens, if it is not the last."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_layers()
        self._check_model()
        self._check_division()
        self._check_schedule()
        self._check_context()
        self._check_fp8()
        self._check_routing()
        self._check_slices()

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: choose from {', '.join(choices)}")
        # One recomputation has one text, so that equal setups compare equal.
        text = self.recomputed.checked(self.model, self.kernels, self.fp8 is not None).text
        object.__setattr__(self, "recompute", text)
        if self.kernels == "cpu" and self.attention == "flash":
            raise ValueError("CPU kernels compute attention unfused: choose attention unfused")
        for name in ("tensor", "pipeline", "micro_batch", "global_batch", "sequence", "num_chunks", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")

    def _check_layers(self) -> None:
        stages, num_layers = self.pipeline * self.num_chunks, self.model.num_layers
        empty = without_layers(self.layers, self.mtp_stage)
        if (len(self.layers), sum(self.layers)) != (stages, num_layers) or empty is not None:
            raise ValueError(f"layers {self.layers} must give {stages} stages {num_layers} layers in all")
        if self.mtp_stage is not None and not (self.norm_stage <= self.mtp_stage < stages - 1 and self.model.further):
            raise ValueError(
                f"stage {self.mtp_stage} cannot predict further tokens: give a stage behind all layers and before the "
                "last, and --mtp-num-layers, or leave it to the last stage"
            )
        self.switches.check(self, sequence_parallel=self.tensor == 1 or self.sequence_parallel)
        self.state_types.check(self)

    def _check_model(self) -> None:
        model, cpu = self.model, self.kernels == "cpu"
        if cpu and (model.qk_norm or model.squared_relu or model.latent):
            raise ValueError(
                "CPU kernels are not modelled with norms of queries and keys, squared ReLUs or latent attention"
            )
        if cpu and model.experts and (self.tensor > 1 or self.routing.expert > 1):
            raise ValueError("CPU kernels with experts are modelled only without tensor and expert parallelism")
        refused = None if model.hybrid is None else model.hybrid.refused(self.tensor, self.context, cpu)
        if refused is not None:
            raise ValueError(f"{model.name}: {refused}")
        model.check_attention(self.attention == "flash", self.sequence)

    def _check_routing(self) -> None:
        experts, routing = self.model.experts, self.routing
        if experts is None:
            if routing != Routing():
                raise ValueError(f"{self.model.name} has no experts: leave out the settings of their dispatcher")
            return
        ep, divided, block = routing.expert, self.expert_tensor, self.tensor * self.context * self.data
        if experts.num_experts % ep:
            raise ValueError(f"expert parallel {ep} does not divide the {experts.num_experts} experts")
        if block % (ep * divided):
            raise ValueError(
                f"expert parallel {ep} * expert tensor parallel {divided} does not divide tensor * "
                f"{'context * ' * (self.context > 1)}data parallel = {block}: choose sizes that do"
            )
        if self.tensor > 1 and not self.sequence_parallel:
            raise ValueError("experts with tensor parallelism need sequence parallelism: give --sequence-parallel")
        if self.num_pipes > 1:
            raise ValueError(f"{self.schedule} has two pipes, for which experts are not modelled: choose another")

    def _check_division(self) -> None:
        t, p, devices = self.tensor, self.pipeline, self.cluster.num_devices
        if devices % (t * p * self.context):
            sizes = (t, p) if self.context == 1 else (t, p, self.context)
            cut = f"{'*'.join('tpc'[: len(sizes)])} = {'*'.join(map(str, sizes))} = {math.prod(sizes)}"
            raise ValueError(f"{cut} does not divide the {devices} devices of the cluster")
        for name, value in (("attention heads", self.model.num_attention_heads), ("sequence", self.sequence)):
            if value % t:
                raise ValueError(f"tensor parallel {t} does not divide {value} ({name})")
        groups = self.model.num_query_groups
        if groups % t and t % groups:
            raise ValueError(f"tensor parallel {t} and {groups} query groups: one number must divide the other")
        if self.cluster.devices_per_domain % t:
            raise ValueError(
                f"tensor parallel {t} does not divide the {self.cluster.devices_per_domain} devices of "
                f"{self.cluster.domain}"
            )
        if self.global_batch % (self.micro_batch * self.data):
            step = self.micro_batch * self.data
            raise ValueError(
                f"global batch {self.global_batch} is not a multiple of micro-batch {self.micro_batch} * data "
                f"parallel {self.data}: the nearest is {max(1, round(self.global_batch / step)) * step}"
            )

    def _check_schedule(self) -> None:
        p = self.pipeline
        # Raises for a schedule that does not exist, or not with these chunks, ranks, groups or shards.
        program = self.program(1)
        pipes = program.layout.num_pipes
        if program.limit is not None:
            raise ValueError(
                f"{self.schedule} without a group chooses its order for a bound, which is not modelled: give the "
                "group, or a bound for each rank"
            )
        if self.num_microbatches % pipes:
            raise ValueError(
                f"{self.schedule} has {pipes} pipes, which need equal shares of the {self.num_microbatches} "
                f"micro-batches: use a global batch that is a multiple of micro-batch {self.micro_batch} * data "
                f"parallel {self.data} * {pipes}"
            )
        looped = FAMILIES[self.schedule].exchange is Exchange.MEGATRON_INTERLEAVED
        if looped and self.switches.no_overlap_p2p_communication and p < 3:
            raise ValueError(f"--no-overlap-p2p-communication with chunks needs 3 or more pipeline ranks, not {p}")
        if looped and self.num_microbatches % p:
            raise ValueError(
                f"with chunks Megatron needs the number of micro-batches ({self.num_microbatches}) to be a multiple "
                f"of the {p} pipeline ranks"
            )

    def _check_context(self) -> None:
        c, model, how = self.context, self.model, self.cp_comm_type
        if c == 1:
            return
        if self.sequence % math.lcm(2 * c, self.sequence_shards * c):
            parts = f"2*c{f' and t*c = {self.tensor * c}' if self.sequence_shards > 1 else ''}"
            raise ValueError(f"context parallel {c}: the sequence, {self.sequence}, must be a multiple of {parts}")
        if self.kernels == "cpu" or self.attention == "unfused":
            raise ValueError(
                f"context parallel {c} needs flash attention on GPUs, the only kind that Transformer Engine computes "
                "over several ranks: choose attention flash and kernels gpu"
            )
        refused = model.no_context(self.sequence, how)
        if refused is not None:
            raise ValueError(refused)
        if how == "a2a" and (
            model.num_attention_heads % (self.tensor * c) or model.num_query_groups % (self.tensor * c)
        ):
            raise ValueError(
                f"a2a gives every context-parallel rank other heads: t*c = {self.tensor * c} does not divide the "
                f"{model.num_attention_heads} heads and {model.num_query_groups} query groups"
            )

    def _check_slices(self) -> None:
        """Their lengths are checked by `predict.slices`."""
        if self.slices == 1:
            if self.slice_lengths != EVEN:
                raise ValueError("slice lengths need slices: give slices, too, or leave the lengths out")
            return
        if self.context > 1:
            raise ValueError(
                f"slices {self.slices} and context parallel {self.context}: a ring of context-parallel ranks "
                "exchanges parts of equal length, but each slice attends to more keys than the one before: leave "
                "one of the two out"
            )
        if self.model.hybrid is not None:
            raise ValueError(
                f"{self.model.name}: Mamba layers carry a state from token to token, but slices do not pass it on: "
                "leave slices out"
            )

    def _check_fp8(self) -> None:
        if self.fp8 is None:
            return
        self.fp8.check(self.cluster.device, self)
        if self.splits:
            raise ValueError(f"{self.schedule} splits backwards, whose memory in FP8 is not modelled: choose another")

    @property
    def peak_flops_per_s(self) -> float:
        """Peak FLOP/s of a device by which MFU is counted: with FP8, that of 8-bit products."""
        device = self.cluster.device
        return device.peak_flops_per_s if self.fp8 is None or device.fp8_flops_per_s is None else device.fp8_flops_per_s

    @property
    def time_factor(self) -> float:
        """Factor for the formulas' seconds: that of its kind of runs, and of this cluster if it is calibrated."""
        return time_factor(self.cluster, self.model.experts is not None)

    @property
    def error_bars(self) -> ErrorBars | None:
        """How far runs of its kind lay from their predictions; None if no run of its kind is known."""
        return error_bars(self.cluster, self.model.experts is not None)

    @property
    def data(self) -> int:
        return self.cluster.num_devices // (self.tensor * self.context * self.pipeline)

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def limit_bytes(self) -> tuple[int, ...]:
        """Bytes that a device of each rank may hold."""
        return self.budget_bytes or (self.cluster.limit_bytes,) * self.pipeline

    @property
    def padded_vocabulary(self) -> int:
        """Vocabulary padded to a multiple of 128 per tensor-parallel rank, and with shards of all ranks."""
        multiple = math.lcm(128, self.pipeline if self.is_sharded else 1) * self.tensor
        return -(-self.model.vocabulary // multiple) * multiple

    @property
    def is_sharded(self) -> bool:
        """Whether the vocabulary's layers are split over the pipeline's ranks."""
        return self.vocabulary is not Vocabulary.WHOLE

    @property
    def vocabulary_shards(self) -> int:
        """Number of devices over which the rows of the output layer are divided."""
        return self.tensor * (self.pipeline if self.is_sharded else 1)

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.num_chunks

    @property
    def placements(self) -> tuple[tuple[int, ...], ...]:
        """Placement of each pipe: the rank of every stage."""
        return _layout(self.schedule, self.pipeline, self.num_chunks).placements

    @property
    def num_pipes(self) -> int:
        return len(self.placements)

    @property
    def replicas(self) -> int:
        """How many devices have the same weights."""
        return self.data * self.context * self.num_pipes

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank computes, in any pipe, ascending."""
        return _layout(self.schedule, self.pipeline, self.num_chunks).stages_of(rank)

    @property
    def recomputed(self) -> Recompute:
        """The parsed value of `recompute`."""
        return read_recompute(self.recompute)

    @property
    def stage_layers(self) -> tuple[StageLayers, ...]:
        """Number of layers of each kind in every stage, by what of them is recomputed."""
        return stage_layers(self.model, self.recomputed, self.layers, self.further_stage)

    @property
    def further_stage(self) -> int | None:
        """Stage that predicts further tokens; None if there are none."""
        if self.model.further is None:
            return None
        return self.num_stages - 1 if self.mtp_stage is None else self.mtp_stage

    @property
    def norm_stage(self) -> int:
        """Stage of the final norm: with further tokens, that of the last layer."""
        last = self.num_stages - 1
        return last if self.model.further is None else max(stage for stage, num in enumerate(self.layers) if num)

    @property
    def differs(self) -> bool:
        """Whether micro-batches of a stage may differ in size, so that host buffers have a reserve: experts that are
        not padded take what comes, and slices are of other lengths or save scores of ever more keys."""
        experts = self.model.experts is not None and not self.routing.padded
        return self.switches.bpipe_differing_sizes or experts or self._slices_differ

    @property
    def _slices_differ(self) -> bool:
        if self.slices == 1:
            return False
        recomputed = self.recomputed
        again = recomputed.method is not None or "core_attn" in recomputed.modules
        is_even = self.slice_lengths == EVEN and self.sequence % (self.slices * self.sequence_shards) == 0
        return not is_even or (self.attention == "unfused" and not again)

    @property
    def expert_tensor(self) -> int:
        """Number of devices over which each expert is divided."""
        return self.routing.expert_tensor or self.tensor

    @property
    def expert_replicas(self) -> int:
        """How many devices have the same part of the same experts."""
        return self.tensor * self.context * self.data // (self.routing.expert * self.expert_tensor)

    @property
    def splits(self) -> bool:
        """Whether backwards are computed in halves."""
        return FAMILIES[self.schedule].splits

    @property
    def turn_size(self) -> int:
        """How many micro-batches go through a chunk before the next: 1 where there are no groups."""
        return self.group_size or FAMILIES[self.schedule].usual_group(self._one_a_rank)

    @property
    def _one_a_rank(self) -> int:
        """Micro-batches that make one micro-batch, or slice, per rank."""
        return microbatches_of(self.pipeline, self.slices)

    @property
    def stride(self) -> int:
        """Micro-batches, or slices, after which the steady phase repeats: whole groups, at least one per rank."""
        return -(-self._one_a_rank // self.turn_size) * self.turn_size

    @property
    def keeps_halves(self) -> bool:
        """Whether weights' halves wait for their place, and hold what they need."""
        return self.keep_weights_halves != "none"

    @property
    def sequence_shards(self) -> int:
        """Number of devices over which a layer's parts between its matrices are divided."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def hosts(self) -> str:
        """Kind of hosts to which activations leave (`schedule.hosts`)."""
        return PAIR if self.balance is None else self.balance.hosts

    @property
    def partners(self) -> tuple[int, ...] | None:
        """Rank that hosts for each, where that is given."""
        return None if self.balance is None else self.balance.partners

    @property
    def activation_budget(self) -> ActivationBudget | None:
        """Rooms within which it is balanced, where bytes say what leaves."""
        return None if self.balance is None else self.balance.activation_budget

    def program(self, num_microbatches: int | None = None) -> ScheduleConfig:
        """Return the schedule configuration of this setup."""
        return sized(self, self.schedule, self.pipeline, num_microbatches or self.num_microbatches)


@lru_cache(maxsize=1024)
def _layout(schedule: str, pipeline: int, chunks: int) -> Layout:
    return FAMILIES[schedule].layout(pipeline, chunks)


def without_layers(layers: Sequence[int], further_stage: int | None = None) -> int | None:
    """Return the first stage without a layer that needs one: of several the first may have the embedding alone, the
    last the output layer, and another one the prediction of further tokens."""
    spared = (0, further_stage, len(layers) - 1) if len(layers) > 1 else ()
    return next((stage for stage, num in enumerate(layers) if num < (stage not in spared)), None)


def split_layers(num_layers: int, num_stages: int, allow_uneven: bool = False) -> tuple[int, ...] | None:
    """Return the layers of each stage, or None if there is no such split.

    Uneven: the remainder goes, one each, to the stages before the last, which has the output layer; early stages hold
    most micro-batches. With one or two stages more than layers the last has the output layer alone, then the first the
    embedding.
    """
    share, rest = divmod(num_layers, num_stages)
    spared = num_stages - num_layers
    if allow_uneven and num_layers and spared in (1, 2):
        return (*(0,) * (spared - 1), *(1,) * num_layers, 0)
    if not share or (rest and not allow_uneven):
        return None
    return (*(share,) * (num_stages - 1 - rest), *(share + 1,) * rest, share)
