"""Layouts: which rank computes which stage of which micro-batch.

A pipe is one way through all stages; micro-batch m takes pipe m % num_pipes. Several pipes run over the same ranks,
each with its own replica of every stage. The vocabulary's layers may be split over all ranks, as shards that belong to
no stage. A micro-batch's sequence may be cut into slices that pass through the stages one after the other: a number n
in place of a micro-batch then means slice n % slices of micro-batch n // slices.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bpipe.schedule.action import SHARDS, Action, Kind

# The rules for replicas of a stage are known for two (`schedule.check.rules`).
MOST_PIPES = 2
TWO_PIPES = "at most two are supported, in opposite directions"


class Vocabulary(enum.Enum):
    """How the output layer is split over ranks, and what the last stage's backward waits for.

    Source of the algorithms: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024.
    """

    WHOLE = "none"  # the last stage computes it
    ONE = "1"  # the backward waits for every shard's T
    TWO = "2"  # the backward waits for every shard's S: what T would reduce is in what S gathers
    INTERLACED = "interlaced"  # as ONE, and nothing runs at the same time

    __hash__ = object.__hash__


# How the trainer can split the output layer.
TRAINED_SHARDS = tuple(vocabulary.value for vocabulary in Vocabulary if vocabulary is not Vocabulary.WHOLE)

# Lengths of slices: equal, of equal FLOPs, or the tokens of each.
EVEN, WORK = "even", "work"
SliceLengths = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement of stages on ranks.

    Attributes:
        placements: `placements[pipe][stage]` is a rank.
        vocabulary: How the output layer is split.
        input_shards: Whether the embedding is split over all ranks, too.
        slices: Number of slices of a micro-batch's sequence.
    """

    placements: tuple[tuple[int, ...], ...]
    vocabulary: Vocabulary = Vocabulary.WHOLE
    input_shards: bool = False
    slices: int = 1

    @property
    def num_pipes(self) -> int:
        return len(self.placements)

    @property
    def num_stages(self) -> int:
        """Number of stages over all chunks of one pipe, p*v."""
        return len(self.placements[0])

    @property
    def shard_kinds(self) -> tuple[Kind, ...]:
        """Kinds of computation that every rank runs for every micro-batch besides those of its stages."""
        output = () if self.vocabulary is Vocabulary.WHOLE else (Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD)
        return (*output, *((Kind.INPUT_FORWARD, Kind.INPUT_BACKWARD) if self.input_shards else ()))

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a stage's computations of a micro-batch."""
        return self.placements[microbatch % len(self.placements)][stage]

    def rank_of_action(self, action: Action) -> int:
        """Return the rank that runs a computation. A shard's action names its rank."""
        return action.stage if action.kind in SHARDS else self.rank_of(action.stage, action.microbatch)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank computes in any pipe, ascending."""
        stages = _stages_by_rank(self.placements)
        return stages[rank] if 0 <= rank < len(stages) else ()

    def replicas(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that compute a stage, one per pipe."""
        return tuple(placement[stage] for placement in self.placements)


@lru_cache(maxsize=1024)
def _stages_by_rank(placements: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Stages of all ranks at once: a search asks for them hundreds of thousands of times."""
    stages: list[list[int]] = [[] for _ in range(1 + max(map(max, placements)))]
    for stage, owners in enumerate(zip(*placements, strict=True)):
        for rank in set(owners):
            stages[rank].append(stage)
    return tuple(map(tuple, stages))


def one_pipe(stage_to_rank: Sequence[int]) -> Layout:
    """Return a layout with one pipe, in which `stage_to_rank[stage]` is a rank."""
    return Layout((tuple(stage_to_rank),))


def microbatches_of(num_slices: int, slices: int) -> int:
    """Return the fewest whole micro-batches that have `num_slices` slices."""
    return -(-num_slices // slices)


def reversed_slice(number: int, slices: int) -> int:
    """Return the number whose backward is a stage's `number`-th: the last slice of each micro-batch comes first."""
    return number // slices * slices + slices - 1 - number % slices
