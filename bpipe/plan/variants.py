"""Slices and shards of the vocabulary (docs/vocabulary.md) with which a configuration can be trained.

Slices of equal length are tried, and for long sequences also slices of equal seconds, which the trainer takes as a list
of lengths. The latter are tried only without balancing, which counts slices, not bytes (`--memory` balances bytes).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from bpipe.build import ScheduleConfig, unchecked
from bpipe.plan.space import groups
from bpipe.predict.costs import lengths_of_equal_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.slice_lengths import even_bounds
from bpipe.schedule.check.deadlock import WaitLevel
from bpipe.schedule.check.rules import ScheduleError, check_waits
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.layout import Vocabulary

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
                yield from self._of_lengths(replace(setup, slices=number, group_size=group))

    def _of_lengths(self, even: Setup) -> Iterator[Setup]:
        yield even
        if even.sequence >= UNEVEN_SEQUENCE and even.balance is None:
            lengths = self._timed(even)
            if len(set(lengths)) > 1:
                yield replace(even, slice_lengths=lengths)

    def _timed(self, even: Setup) -> tuple[int, ...]:
        key = even.tensor, even.micro_batch, even.recompute, even.routing, even.layers, even.slices
        if key not in self._lengths:
            self._lengths[key] = lengths_of_equal_seconds(even)
        return self._lengths[key]


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
