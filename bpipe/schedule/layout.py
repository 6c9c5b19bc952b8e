"""Say where a schedule's parts are: which rank computes which stage of which micro-batch.

In: placements. Out: a frozen `Layout`.

A pipe is one way through all stages; micro-batch m takes pipe m % num_pipes. Several pipes run over the same ranks,
each with its own replica of every stage. The vocabulary's layers may be split over all ranks, as shards that belong to
no stage. A micro-batch's sequence may be cut into slices that go through the stages one behind the other: number n,
which stands where a micro-batch does, is then slice n % slices of micro-batch n // slices. Knows no order, no tensors,
no nodes of a cluster.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bpipe.schedule.action import SHARDS, Action, Kind

# What replicas of a stage must keep among each other is known of two (`schedule.check.replicas`).
MOST_PIPES = 2
TWO_PIPES = "at most two are supported, in opposite directions"


class Vocabulary(enum.Enum):
    """Mode of vocabulary parallelism: whether the output layer is split over all ranks, and what the last stage's
    backward waits for.

    Source of the algorithms: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024.
    """

    WHOLE = "none"  # the last stage computes it
    ONE = "1"  # the backward waits for every shard's T
    TWO = "2"  # the backward waits for every shard's S: what T would reduce is in what S gathers
    INTERLACED = "interlaced"  # as ONE, and nothing runs beside it

    __hash__ = object.__hash__


# How the trainer can split the output layer.
TRAINED_SHARDS = tuple(one.value for one in Vocabulary if one is not Vocabulary.WHOLE)
# What it calls fewer layers for the last stage instead.
REDISTRIBUTE = "redistribute"

# How long slices are: alike, of as many FLOPs each, or the tokens of each.
EVEN, WORK = "even", "work"
SliceLengths = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement of stages: `placements[pipe][stage]` is a rank.

    `input_shards`: the embedding is split over all ranks, too.

    `slices`: a micro-batch's sequence is cut into so many, each with a number of its own.
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
        """Kinds of computation that every rank runs for every micro-batch beside its stages."""
        output = () if self.vocabulary is Vocabulary.WHOLE else (Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD)
        return (*output, *((Kind.INPUT_FORWARD, Kind.INPUT_BACKWARD) if self.input_shards else ()))

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a stage's computations of a micro-batch."""
        return self.placements[microbatch % len(self.placements)][stage]

    def rank_of_action(self, action: Action) -> int:
        """Return the rank that runs a computation. A shard's action names its rank."""
        return (
            action.stage
            if action.kind in SHARDS
            else self.placements[action.microbatch % len(self.placements)][action.stage]
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank computes in any pipe, ascending."""
        found = _stages_by_rank(self.placements)
        return found[rank] if 0 <= rank < len(found) else ()

    def replicas(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that compute a stage, one a pipe."""
        return tuple(placement[stage] for placement in self.placements)


@lru_cache(maxsize=1024)
def _stages_by_rank(placements: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """What `Layout.stages_of` says, of all ranks at once: a search asks it hundreds of thousands of times."""
    found: list[list[int]] = [[] for _ in range(1 + max(map(max, placements)))]
    for stage, owners in enumerate(zip(*placements, strict=True)):
        for rank in set(owners):
            found[rank].append(stage)
    return tuple(map(tuple, found))


def one_pipe(stage_to_rank: Sequence[int]) -> Layout:
    """Return a layout with one pipe, in which `stage_to_rank[stage]` is a rank."""
    return Layout((tuple(stage_to_rank),))


def microbatches_of(num_slices: int, slices: int) -> int:
    """Return the fewest whole micro-batches that have so many slices."""
    return -(-num_slices // slices)


def reversed_slice(number: int, slices: int) -> int:
    """Return the number whose backward is a stage's `number`-th: of each micro-batch the last slice's comes first."""
    return number // slices * slices + slices - 1 - number % slices
