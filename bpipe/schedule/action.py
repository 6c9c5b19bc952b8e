"""Actions: what a rank does for one micro-batch."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """Kind of an action. The value is its spelling in text, as in torch.distributed.pipelining where it has one."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SHARD_FORWARD = "S"
    SHARD_BACKWARD = "T"
    INPUT_FORWARD = "IF"
    INPUT_BACKWARD = "IB"
    EVICT = "EVICT"
    HOST = "HOST"
    RETURN = "RETURN"
    LOAD = "LOAD"

    # The default hash of an enum member is a Python call; schedules hash millions of them.
    __hash__ = object.__hash__


# Computations of a rank's shard of the output layer with its loss, and of the embedding.
SHARDS = frozenset({Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD, Kind.INPUT_FORWARD, Kind.INPUT_BACKWARD})
COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}) | SHARDS
# Kinds that complete the gradient of a stage's input, which the stage before waits for, and those of its weights.
OF_THE_INPUT = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
OF_THE_WEIGHTS = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
# Kinds that read the activations saved by their stage's forward.
READING = OF_THE_INPUT | OF_THE_WEIGHTS
TRANSFER = frozenset({Kind.EVICT, Kind.HOST, Kind.RETURN, Kind.LOAD})

# Both ends of a transfer are actions: the evictor's on the left, its acceptor's on the right.
OTHER_END = {Kind.EVICT: Kind.HOST, Kind.LOAD: Kind.RETURN, Kind.HOST: Kind.EVICT, Kind.RETURN: Kind.LOAD}


# (stage, micro-batch): identifies what one forward saved, until its backward.
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Action:
    """One action: `stage` is the pipeline stage whose activations it concerns (with chunks, 0 <= stage < p*v).

    A HOST or RETURN carries the *evictor's* stage, so both ends of a transfer name the same activations. A shard's
    action belongs to no stage: there `stage` is its rank.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @property
    def key(self) -> Key:
        """The stage and micro-batch whose activations it concerns."""
        return self.stage, self.microbatch

    @property
    def computations(self) -> tuple[Action, ...]:
        """The action itself: in an order it is a cell of its own, like a slot."""
        return (self,)

    @property
    def other_end(self) -> Action:
        """The action at the other end of this transfer."""
        return Action(self.stage, OTHER_END[self.kind], self.microbatch)


_ACTIONS: dict[tuple[int, Kind], list[Action]] = {}


def by_microbatch(stage: int, kind: Kind, num_microbatches: int) -> Sequence[Action]:
    """Return a stage's actions of a kind by micro-batch, at least `num_microbatches` of them.

    Each action is made once and kept: a search uses the same ones in hundreds of schedules.
    """
    actions = _ACTIONS.setdefault((stage, kind), [])
    actions.extend(Action(stage, kind, microbatch) for microbatch in range(len(actions), num_microbatches))
    return actions


def of_microbatch(action: Action, microbatch: int) -> Action:
    """Return the same action of another micro-batch."""
    return by_microbatch(action.stage, action.kind, microbatch + 1)[microbatch]
