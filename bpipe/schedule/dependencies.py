"""What a computation needs from others: THE dependency rule.

What passes between computations are *values*: a stage's output, the gradient of a stage's input and, if the vocabulary
is split, what all shards have made of a micro-batch together. A computation needs at most one value and makes at most
one:

    F   needs the output of the stage before (the first: the embeddings of all input shards), makes its stage's output
    B   needs the gradient of the next stage (the last: what all output shards have made), makes the gradient of its stage's input
    I   the same: the half of a backward that the stage before waits for
    W   needs and makes nothing that others have: the other half, of its own stage's weights
    S   needs the last stage's output, makes a shard's part of the statistics of the loss
    T   needs the statistics of all shards, makes a shard's part of the last stage's gradient
    IF  needs nothing, makes a shard's part of the embeddings;  IB needs the first stage's gradient

Within its own stage a backward reads what the forward saved, and W what I left: that never leaves the rank
(`Dependencies.own_operand_of`). Values are numbered, so that tables of them are lists.
"""

from typing import NamedTuple

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.layout import Layout, Vocabulary

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_S, _T, _IF, _IB = Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD, Kind.INPUT_FORWARD, Kind.INPUT_BACKWARD

NOTHING = -1


class Route(NamedTuple):
    """Ranks that make a value, each a part of it, and ranks that need it."""

    makers: tuple[int, ...]
    takers: tuple[int, ...]

    @property
    def parties(self) -> tuple[int, ...]:
        """Ranks that pass the value on, makers first, each once. With one rank nothing is sent."""
        return tuple(dict.fromkeys((*self.makers, *self.takers)))


class Dependencies:
    """Values of a schedule: outputs of all stages, then gradients, then those of shards, each group by micro-batch."""

    def __init__(self, layout: Layout, num_microbatches: int) -> None:
        self.layout, self.num_microbatches = layout, num_microbatches
        self.num_stages = layout.num_stages
        stages, width = self.num_stages, num_microbatches
        self.num_ranks = ranks = len({rank for placement in layout.placements for rank in placement})
        # A group of values has one per micro-batch. Tables hold the first of a group, by kind and stage (shards: rank).
        outputs = [stage * width for stage in range(stages)]
        gradients = [(stages + stage) * width for stage in range(stages)]
        statistics, hidden, embeddings = ((2 * stages + group) * width for group in range(3))
        last = {Vocabulary.WHOLE: NOTHING, Vocabulary.TWO: statistics}.get(layout.vocabulary, hidden)
        backward = [*gradients[1:], last]
        inputs = embeddings if layout.input_shards else NOTHING
        self._made: dict[Kind, list[int]] = {
            _FORWARD: outputs,
            _BACKWARD: gradients,
            _INPUT: gradients,
            _WEIGHT: [NOTHING] * stages,
            _S: [statistics] * ranks,
            _T: [NOTHING if last == statistics else hidden] * ranks,
            _IF: [embeddings] * ranks,
            _IB: [NOTHING] * ranks,
        }
        self._needed: dict[Kind, list[int]] = {
            _FORWARD: [inputs, *outputs[:-1]],
            _BACKWARD: backward,
            _INPUT: backward,
            _WEIGHT: [NOTHING] * stages,
            _S: [outputs[-1]] * ranks,
            _T: [statistics] * ranks,
            _IF: [NOTHING] * ranks,
            _IB: [gradients[0]] * ranks,
        }
        # What a stage's earlier pass made, by kind. A shard's second pass depends on its first through all shards.
        self._own = {_BACKWARD: outputs, _INPUT: outputs, _WEIGHT: gradients}
        shards = layout.input_shards or layout.vocabulary is not Vocabulary.WHOLE
        self.num_values = (2 * stages + 3 * shards) * width
        # Values that all shards gather, and of which the last stage gets the sum: nothing is reduced after T.
        self.in_two_steps = range(statistics, statistics + width) if last == statistics else range(0)
        # From this value on, every rank is a maker.
        self.first_shared = 2 * stages * width
        self._by_pipe = tuple(self._routes(pipe) for pipe in range(layout.num_pipes))

    def _routes(self, pipe: int) -> tuple[Route, ...]:
        """Routes on one pipe, by group of values."""
        placement, split = self.layout.placements[pipe], self.layout.vocabulary
        everybody = tuple(sorted({rank for stages in self.layout.placements for rank in stages}))
        shards = everybody if split is not Vocabulary.WHOLE else ()
        inputs = everybody if self.layout.input_shards else ()
        after = [*((rank,) for rank in placement[1:]), shards]
        before = [inputs, *((rank,) for rank in placement[:-1])]
        outputs = [Route((rank,), takers) for rank, takers in zip(placement, after, strict=True)]
        gradients = [Route((rank,), takers) for rank, takers in zip(placement, before, strict=True)]
        statistics, hidden = Route(shards, shards), Route(shards, placement[-1:])
        return (*outputs, *gradients, statistics, hidden, Route(inputs, placement[:1]))

    def value_of(self, action: Action) -> int:
        """Return the value that a computation makes, or makes a part of; NOTHING if others need none."""
        first = self._made[action.kind][action.stage]
        return NOTHING if first == NOTHING else first + action.microbatch

    def operand_of(self, action: Action) -> int:
        """Return the value that a computation needs from others; NOTHING if it needs only its own stage's."""
        first = self._needed[action.kind][action.stage]
        return NOTHING if first == NOTHING else first + action.microbatch

    def own_operand_of(self, action: Action) -> int:
        """Return the value that its own stage made earlier of the micro-batch; NOTHING for a first pass."""
        first = self._own.get(action.kind)
        return NOTHING if first is None else first[action.stage] + action.microbatch

    def first_operand_of(self, kind: Kind, stage: int) -> int:
        """Return the operand of a stage's computation of micro-batch 0; those of the other micro-batches follow it."""
        return self._needed[kind][stage]

    def route(self, value: int) -> Route:
        """Return the makers and takers of a value."""
        group, microbatch = divmod(value, self.num_microbatches)
        return self._by_pipe[microbatch % len(self._by_pipe)][group]

    def sort(self, value: int) -> str:
        """Return the kind of a value as text."""
        group = value // self.num_microbatches
        if group < 2 * self.num_stages:
            return ("output", "gradient")[group // self.num_stages]
        return ("statistics", "last gradient", "embeddings")[group - 2 * self.num_stages]

    def describe(self, value: int) -> str:
        """Return the value in words, for messages to people."""
        group, microbatch = divmod(value, self.num_microbatches)
        if group < 2 * self.num_stages:
            backward, stage = divmod(group, self.num_stages)
            return f"the {self.sort(value)} of {stage}{'FB'[backward]}{microbatch}"
        return f"the {self.sort(value)} of micro-batch {microbatch}"
