"""The configurations of a search, with their slices and shards of the vocabulary, and counts of what cut the others.

Memory is not checked here. Slices of equal length are tried, and for long sequences also slices of equal seconds. The
latter are tried only without balancing, which counts slices, not bytes (`--memory` balances bytes).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from bpipe.balance.config import BALANCES, BalanceConfig
from bpipe.build import ScheduleConfig, unchecked
from bpipe.predict.cluster import Cluster
from bpipe.predict.costs import lengths_of_equal_seconds
from bpipe.predict.layer_variants import Routing
from bpipe.predict.layout import Setup, split_layers
from bpipe.predict.model import Model
from bpipe.predict.profile import Profile
from bpipe.predict.recompute import BLOCK, RECOMPUTE, Recompute, read_scope
from bpipe.predict.slices import even_bounds
from bpipe.predict.training import ATTENTION, IMPLEMENTATIONS, Training
from bpipe.schedule.check.deadlock import WaitLevel
from bpipe.schedule.check.rules import ScheduleError, check_waits
from bpipe.schedule.families.families import DEFAULTS, FAMILIES, default_family
from bpipe.schedule.families.family import Family
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import Vocabulary, microbatches_of
from bpipe.schedule.program import Exchange

# An open number of recomputed layers.
OPEN = f"{BLOCK}:1"


def with_block(setup: Setup, num_layers: int) -> Setup:
    """Return the setup with the first layers of every stage recomputed."""
    return replace(setup, recompute=Recompute(method="block", num_layers=num_layers).text)


def fewest_layers(upper: int, is_enough: Callable[[int], bool]) -> int | None:
    """Return the smallest number up to `upper` that is enough, if larger ones are, too; None if `upper` is not."""
    if upper < 1 or not is_enough(upper):
        return None
    low, high = 1, upper
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return high


SEARCHED_SCOPES = RECOMPUTE
VOCABULARIES = tuple(mode.value for mode in Vocabulary)
# Fields that a space shares with its setups.
_SHARED = ("model", "cluster", "global_batch", "sequence", "attention", *(field.name for field in fields(Training)))


@dataclass(frozen=True, slots=True)
class Space(Training):
    """Space to search. Tuples hold the choices; None means all that are possible."""

    model: Model
    cluster: Cluster
    global_batch: int
    """Sequences of an iteration, over all replicas."""
    sequence: int
    """Tokens of a sequence."""
    attention: str = "flash"
    recompute: tuple[str, ...] = SEARCHED_SCOPES
    """Texts of `bpipe.predict.recompute`, and `BLOCK`."""
    schedules: tuple[str, ...] = DEFAULTS
    """Names of families."""
    balances: tuple[str, ...] = BALANCES
    """Balanced or not, by the names of `BALANCES`."""
    max_micro_batch: int = 64
    """Largest micro-batch size."""
    max_chunks: int = 8
    """Most chunks per rank."""
    profile: Profile | None = None
    """Measured seconds, in place of predicted ones."""
    hosts: tuple[str, ...] = (PAIR,)
    """Hosts of what balanced configurations evict (`schedule.hosts`)."""
    expert: int | None = None
    """Expert-parallel size; by default all that can share the experts."""
    contexts: tuple[int, ...] = (1,)
    """Context-parallel sizes."""
    vocabulary_parallel: tuple[str, ...] | None = (Vocabulary.WHOLE.value,)
    """Algorithms of the output layer's shards; None: whole, and each that lowers the bound of the time if the last rank
    computes longer than others."""
    tensors: tuple[int, ...] | None = None
    """Tensor-parallel sizes."""
    pipelines: tuple[int, ...] | None = None
    """Pipeline-parallel sizes."""
    micro_batches: tuple[int, ...] | None = None
    """Micro-batch sizes."""
    chunk_counts: tuple[int, ...] | None = None
    """Chunks per rank."""
    others: tuple[tuple[str, str], ...] = ()
    """Flags and values of the launch that the trainer may refuse."""
    slices: tuple[int, ...] = (1,)
    """Numbers of slices per sequence."""

    def __post_init__(self) -> None:
        for name, values, choices in (
            ("balance", self.balances, BALANCES),
            ("vocabulary_parallel", self.vocabularies, VOCABULARIES),
        ):
            for value in values:
                if value not in choices:
                    raise ValueError(f"unknown {name} {value!r}: choose from {', '.join(choices)}")
        object.__setattr__(self, "recompute", tuple(dict.fromkeys(map(read_scope, self.recompute))))
        if self.attention not in ATTENTION:
            raise ValueError(f"unknown attention {self.attention!r}: choose from {', '.join(ATTENTION)}")
        if min(self.slices, default=0) < 1:
            raise ValueError(f"--slices {' '.join(map(str, self.slices)) or 'none'}: give numbers from 1 on")
        sizes = {"--gbs": self.global_batch, "--max-micro-batch": self.max_micro_batch, "--max-chunks": self.max_chunks}
        for flag, size in sizes.items():
            if size < 1:
                raise ValueError(f"{flag} is {size}, but must be at least 1")

    @property
    def vocabularies(self) -> tuple[str, ...]:
        """Modes of the output layer that may be tried: whole or in shards."""
        return VOCABULARIES if self.vocabulary_parallel is None else self.vocabulary_parallel

    @property
    def balancing(self) -> list[BalanceConfig | None]:
        """Balanced or not, and with whom as hosts."""
        ways = product(self.balances, dict.fromkeys(self.hosts))
        return list(dict.fromkeys(None if name == BALANCES[0] else BalanceConfig(hosts=hosts) for name, hosts in ways))


def with_free_switches(space: Space) -> Space:
    """Return the space with all of Megatron's overlaps of communication with computation, which cost nothing."""
    switches = replace(
        space.switches.with_overlaps(distributed_optimizer=space.distributed_optimizer),
        no_overlap_p2p_communication=False,
        tp_comm_overlap=space.kernels == "gpu" and space.transformer_impl == IMPLEMENTATIONS[0],
    )
    return replace(space, switches=switches)


# Tokens from which on activations of a sequence may not fit and attention may hide an exchange of keys and values; and the
# fewest tokens per device.
LONG_SEQUENCE, LEAST_PART = 32768, 8192

# Reasons that cut candidates, in the order of the checks, and what each counts: for grids, a whole t*p*d at once.
CUTS = {
    "asked": "grids, micro-batch sizes and numbers of chunks: excluded by flags (--tp, --pp, --mbs, --vp)",
    "mamba": "grids: t does not divide heads or groups of Mamba layers, or c is more than 1",
    "tensor": "grids: t does not divide heads, query groups or sequence",
    "context": "grids: the sequence is not a multiple of 2*c and t*c, or a2a has too few heads, or the number of "
    "devices is not a multiple of t*c",
    "ranks": "grids: p is more than the layers",
    "batch": "grids: d does not divide the global batch",
    "micro_batches": "micro-batch sizes: interleaving and two pipes need a number of micro-batches that p divides",
    "chunks": "numbers of chunks: the layers cannot be divided over so many stages",
    "pipes": "micro-batch sizes: two pipes need at least four ranks, and an even number of them",
    "experts": "micro-batch sizes: experts in two pipes are not modelled",
    "pairs": "choices of balancing: no pair of ranks has anything to share",
    "profile": "configurations: the profile does not cover them",
    "layers": "choices of how many layers to recompute: it fits with none, or needs all layers of a stage",
    "branches": "grids with a micro-batch size and recomputation: more memory than a device has, whatever the schedule",
    "memory": "configurations: more memory than a device has",
    "queues": "configurations with shards: ranks would wait for each other in the one queue of a device",
    "unneeded": "balanced configurations: they fit without balancing too",
    "refused": "configurations: the trainer refuses them with the flags of the launch",
    "skipped": "grids with a micro-batch size and recomputation: no schedule could make one clearly faster than "
    "the slowest row",
    "slower": "configurations: none could be clearly faster than the slowest row, so whether they fit was not checked",
}


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order, in O(sqrt(number)) steps."""
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return low + [number // divisor for divisor in reversed(low) if divisor * divisor != number]


class Branch(NamedTuple):
    """One cut of the devices with a micro-batch size and what is recomputed; the schedule, its balancing, shards and
    slices are open."""

    tensor: int
    context: int
    pipeline: int
    data: int
    micro_batch: int
    recompute: str
    routing: Routing


def enumerate_branches(space: Space, cuts: Counter[str]) -> Iterator[Branch]:
    """Yield every branch, counting what is impossible in `cuts`; one with `OPEN` represents all numbers of layers."""
    for tensor, context, pipeline, data in _grids(space, cuts):
        per_replica = space.global_batch // data
        for micro_batch in range(1, min(space.max_micro_batch, per_replica) + 1):
            if per_replica % micro_batch:
                continue
            if not _is_asked(space.micro_batches, micro_batch):
                cuts["asked"] += 1
                continue
            for recompute, routing in product(_scopes(space), _routings(space, tensor * context * data)):
                yield Branch(tensor, context, pipeline, data, micro_batch, recompute, routing)


def setups_of(space: Space, branch: Branch, cuts: Counter[str]) -> Iterator[Setup]:
    """Yield a branch's configurations with whole vocabularies and sequences, each first without balancing and then
    with it."""
    num_microbatches = space.global_batch // branch.data // branch.micro_batch
    for choice in _schedules(space, branch.pipeline, num_microbatches, cuts):
        for balance in space.balancing:
            if balance is not None and branch.pipeline == 1:
                cuts["pairs"] += 1
                continue
            yield _setup(space, branch, balance=balance, **choice._asdict())


def plainest(space: Space, branch: Branch) -> Setup:
    """Return a branch's configuration with 1F1B and nothing of ours, which represents all of them in bounds."""
    layers = split_layers(space.model.num_layers, branch.pipeline, allow_uneven=True)
    return _setup(space, branch, schedule=default_family(1), layers=layers)


def _setup(space: Space, branch: Branch, **choice: Any) -> Setup:
    shared = {name: getattr(space, name) for name in _SHARED}
    sizes = {name: getattr(branch, name) for name in branch._fields if name != "data"}
    return Setup(**{**shared, **sizes, **choice})


def _routings(space: Space, devices: int) -> tuple[Routing, ...]:
    """Expert-parallel sizes, with whole experts by default; one way for a model without experts."""
    experts, routing = space.model.experts, space.routing
    if experts is None:
        return (routing,)
    divided = routing.expert_tensor or 1
    return tuple(
        replace(routing, expert=number, expert_tensor=divided)
        for number in divisors(experts.num_experts)
        if space.expert in (None, number) and devices % (number * divided) == 0
    )


def num_grids(space: Space) -> int:
    """Return the number of ways to write the devices as t*c*p*d with t inside a node."""
    return sum(map(len, (pipelines for *_, pipelines in _with_pipelines(space))))


def usual_contexts(sequence: int, devices: int) -> tuple[int, ...]:
    """Return the context-parallel sizes searched by default: 1, and for long sequences more, as long as each
    device keeps a good part."""
    if sequence < LONG_SEQUENCE:
        return (1,)
    return tuple(size for size in divisors(devices) if size * LEAST_PART <= sequence)


def _with_pipelines(space: Space) -> Iterator[tuple[int, int, list[int]]]:
    """Yield sizes t and c with all possible p, which is 0 if they do not divide the devices."""
    devices = space.cluster.num_devices
    for tensor, context in product(divisors(space.cluster.devices_per_domain), space.contexts):
        yield tensor, context, [0] if devices % (tensor * context) else divisors(devices // (tensor * context))


def _cut_of_layers(space: Space, tensor: int, context: int) -> str | None:
    model, groups = space.model, space.model.num_query_groups
    if model.hybrid is not None and model.hybrid.refused(tensor, context, on_cpu=False) is not None:
        return "mamba"
    if model.num_attention_heads % tensor or space.sequence % tensor or (groups % tensor and tensor % groups):
        return "tensor"
    if context == 1:
        return None
    heads = (model.num_attention_heads, groups) if space.cp_comm_type == "a2a" else ()
    whole = (space.cluster.num_devices, space.sequence, *heads)
    return "context" if any(size % (tensor * context) for size in whole) or space.sequence % (2 * context) else None


def _is_asked(sizes: tuple[int, ...] | None, size: int) -> bool:
    return sizes is None or size in sizes


def _grids(space: Space, cuts: Counter[str]) -> Iterator[tuple[int, int, int, int]]:
    devices, model = space.cluster.num_devices, space.model
    for tensor, context, pipelines in _with_pipelines(space):
        cut = _cut_of_layers(space, tensor, context) if _is_asked(space.tensors, tensor) else "asked"
        if cut is not None:
            cuts[cut] += len(pipelines)
            continue
        for pipeline in pipelines:
            data = devices // (tensor * context * pipeline)
            if not _is_asked(space.pipelines, pipeline):
                cuts["asked"] += 1
            elif pipeline > model.num_layers:
                cuts["ranks"] += 1
            elif space.global_batch % data:
                cuts["batch"] += 1
            else:
                yield tensor, context, pipeline, data


class _Choice(NamedTuple):
    """A schedule with what it takes."""

    schedule: str
    num_chunks: int
    layers: tuple[int, ...]
    group_size: int | None = None


def _schedules(space: Space, pipeline: int, num_microbatches: int, cuts: Counter[str]) -> Iterator[_Choice]:
    for schedule in space.schedules:
        family = FAMILIES[schedule]
        if family.splits and pipeline == 1:
            # A single rank never waits: it would be 1F1B.
            continue
        cut = _cut_of(family, space, pipeline, num_microbatches)
        if cut is not None:
            cuts[cut] += 1
        elif family.max_chunks == 1:
            if not _is_asked(space.chunk_counts, 1):
                cuts["asked"] += 1
                continue
            layers = split_layers(space.model.num_layers, pipeline, allow_uneven=True)
            if layers is not None:
                yield _Choice(schedule, 1, layers)
        else:
            yield from _in_chunks(schedule, space, pipeline, num_microbatches, cuts)


def _cut_of(family: Family, space: Space, pipeline: int, num_microbatches: int) -> str | None:
    if family.num_pipes > 1:
        if space.model.experts is not None:
            return "experts"
        if pipeline < 4 or pipeline % 2:
            # Megatron sees half the ranks, which still have to form a pipeline.
            return "pipes"
        return "micro_batches" if num_microbatches % pipeline else None
    if family.max_chunks == 1:
        return None
    # Megatron needs 3 ranks for exchanges that block.
    looped = family.exchange is Exchange.MEGATRON_INTERLEAVED
    is_short = pipeline < (3 if looped and space.switches.no_overlap_p2p_communication else 2)
    return "micro_batches" if is_short or (looped and num_microbatches % pipeline) else None


def _in_chunks(
    schedule: str, space: Space, pipeline: int, num_microbatches: int, cuts: Counter[str]
) -> Iterator[_Choice]:
    family, num_layers = FAMILIES[schedule], space.model.num_layers
    # If the ranks divide the layers, chunks that do not would only make some ranks slower.
    uneven = num_layers % pipeline != 0
    for chunks in family.chunks(max(space.max_chunks, *(space.chunk_counts or (1,)))):
        if not _is_asked(space.chunk_counts, chunks):
            cuts["asked"] += 1
            continue
        layers = _layers_of(schedule, num_layers, pipeline, chunks, uneven)
        if layers is None:
            cuts["chunks"] += 1
            continue
        if chunks == 1 and family.takes_groups:
            # One chunk has no groups: it would be 1F1B in halves.
            continue
        for group in groups(schedule, pipeline, num_microbatches):
            yield _Choice(schedule, chunks, layers, group)


def is_in_order(schedule: str, pipeline: int, chunks: int) -> bool:
    """Whether stages are placed as in Megatron: over all ranks in order, and again for the next chunks."""
    family = FAMILIES[schedule]
    in_order = (tuple(stage % pipeline for stage in range(pipeline * chunks)),)
    return family.num_pipes == 1 and family.layout(pipeline, chunks).placements == in_order


def _layers_of(schedule: str, num_layers: int, pipeline: int, chunks: int, uneven: bool) -> tuple[int, ...] | None:
    """Return layers by stage, or None. A rank with both ends needs layers in both: others were never trained."""
    layers = split_layers(num_layers, pipeline * chunks, uneven)
    placements = FAMILIES[schedule].layout(pipeline, chunks).placements
    ends_meet = len(placements) > 1 or placements[0][0] == placements[0][-1]
    return None if layers is not None and 0 in layers and ends_meet else layers


def groups(schedule: str, pipeline: int, num_microbatches: int, slices: int = 1) -> tuple[int | None, ...]:
    """Return group sizes: the fewest micro-batches that keep the pipeline busy (less memory), and one per rank (less
    time). With slices, also those of the micro-batches whose slices fill the ranks."""
    family = FAMILIES[schedule]
    if not (family.takes_groups and family.splits):
        return (None,)
    counts = (pipeline, microbatches_of(pipeline, slices))
    return tuple(sorted({min(size, num_microbatches) for p in counts for size in (family.usual_group(p), p)}))


def _scopes(space: Space) -> tuple[str, ...]:
    """With flash attention, selective recomputation frees nothing, so it is tried only if it is the only choice."""
    scopes = tuple(dict.fromkeys(OPEN if scope == BLOCK else scope for scope in space.recompute))
    return tuple(scope for scope in scopes if not (scope == "selective" and space.attention == "flash")) or scopes


# Tokens of a sequence from which on slices are searched by default, and tokens of the shortest slice.
SLICED_SEQUENCE, SHORTEST = 8192, 1024
# Tokens from which on later slices take clearly longer.
UNEVEN_SEQUENCE = 32768
NUMBERS = (1, 2, 4, 8)


def usual_slices(sequence: int) -> tuple[int, ...]:
    """Return the numbers of slices searched by default: 1, and more if each has a good part of a long sequence."""
    if sequence < SLICED_SEQUENCE:
        return (1,)
    return tuple(number for number in NUMBERS if number * SHORTEST <= sequence)


class Slicer:
    """Cutter of one space's setups, whose layers of one kind take equally long in every schedule."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = [number for number in numbers if number > 1]
        self._lengths: dict[object, tuple[int, ...]] = {}

    def of(self, setup: Setup) -> Iterator[Setup]:
        """Yield the setup in slices of each number."""
        sliced = FAMILIES[setup.schedule].takes_slices and setup.pipeline > 1 and setup.context == 1
        if not sliced or setup.is_sharded or setup.model.hybrid is not None:
            return
        sizes = setup.schedule, setup.pipeline, setup.num_microbatches
        if setup.group_size != groups(*sizes)[0]:
            # Slices are tried once for all groups of whole sequences.
            return
        for number in self._numbers:
            try:
                even_bounds(setup.sequence, number, setup.sequence_shards)
            except ValueError:
                continue
            for group in groups(*sizes, number):
                even = replace(setup, slices=number, group_size=group)
                yield even
                if even.sequence < UNEVEN_SEQUENCE or even.balance is not None:
                    continue
                key = even.tensor, even.micro_batch, even.recompute, even.routing, even.layers, even.slices
                if key not in self._lengths:
                    self._lengths[key] = lengths_of_equal_seconds(even)
                if len(set(self._lengths[key])) > 1:
                    yield replace(even, slice_lengths=self._lengths[key])


# Steps of the steady phase within which ranks deadlock if they ever do.
_STEPS = 4
# From this generation on Megatron does not want CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor or context parallelism.
_MANY_QUEUES = ("b200", "gb200")


def with_shards(setup: Setup, algorithms: Sequence[str]) -> Iterator[Setup]:
    """Yield the setup with shards by each algorithm that the trainer has for it: the output layer alone, then the
    embedding, too."""
    family = FAMILIES[setup.schedule]
    if family.sharded is None or setup.pipeline < 2 or setup.slices > 1:
        return
    one_queue = has_one_queue(setup)
    for name in algorithms:
        algorithm = Vocabulary(name)
        if algorithm is Vocabulary.WHOLE or (algorithm is Vocabulary.INTERLACED and not family.interlaces):
            continue
        if algorithm is Vocabulary.TWO and one_queue:
            # Every rank would wait for all others after its S.
            continue
        for inputs in (False,) if one_queue else (False, True):
            yield replace(setup, vocabulary=algorithm, input_shards=inputs)


def has_one_queue(setup: Setup) -> bool:
    """Whether a device's streams share one queue, as Megatron wants with tensor or context parallelism."""
    return (
        setup.kernels == "gpu"
        and max(setup.tensor, setup.context) > 1
        and not setup.cluster.device.name.startswith(_MANY_QUEUES)
    )


def stands_still(setup: Setup) -> bool:
    """Whether ranks would deadlock in one queue, as sends precede their receivers; the trainer checks this at start."""
    if not (has_one_queue(setup) and (setup.is_sharded or setup.num_pipes > 1)):
        return False
    plain = replace(setup, balance=None)
    return _waits(
        plain.program(
            setup.num_microbatches if setup.num_pipes > 1 else min(setup.num_microbatches, _STEPS * setup.stride)
        )
    )


@lru_cache(maxsize=1024)
def _waits(program: ScheduleConfig) -> bool:
    try:
        check_waits(unchecked(program), WaitLevel.ONE_QUEUE, program.passing)
    except ScheduleError:
        return True
    return False
