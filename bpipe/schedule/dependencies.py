"""Say what a computation needs from others: THE dependency rule.

In: a Layout and a number of micro-batches. Out: `Dependencies`.

What passes between computations are *values*: a stage's output, the gradient of a stage's input, and, where the
vocabulary is split, what all shards have made of a micro-batch together. A computation needs at most one value and
makes at most one:

    F   needs the output of the stage before (the first: the embeddings of all input shards), makes its stage's output
    B   needs the gradient of the stage behind (the last: what all output shards have made), makes the gradient of its stage's input
    I   the same: the half of a backward that the stage before waits for
    W   needs and makes nothing that others have: the other half, of its own stage's weights
    S   needs the last stage's output, makes a shard's part of the statistics of the loss
    T   needs the statistics of all shards, makes a shard's part of the last stage's gradient
    IF  needs nothing, makes a shard's part of the embeddings;  IB needs the first stage's gradient

Of its own stage a backward reads what the forward saved, and W what I left: that never leaves the rank
(`Dependencies.own`). Values are numbered, so that tables of them are lists. Knows no order and no time; who sends when
is `schedule.lowering.lower`.
"""

from __future__ import annotations

from typing import NamedTuple

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.layout import Layout, Vocabulary

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_S, _T, _IF, _IB = Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD, Kind.INPUT_FORWARD, Kind.INPUT_BACKWARD

NOTHING = -1


class Route(NamedTuple):
    """The ranks that make a value, each a part of it, and those that need it."""

    makers: tuple[int, ...]
    takers: tuple[int, ...]

    @property
    def parties(self) -> tuple[int, ...]:
        """The ranks that pass a value on, makers first, each once. With one rank nothing is sent."""
        return tuple(dict.fromkeys((*self.makers, *self.takers)))


class Dependencies:
    """Values of a schedule: outputs of all stages, then gradients, then those of shards, each group by micro-batch."""

    def __init__(self, layout: Layout, num_microbatches: int) -> None:
        self.layout, self.num_microbatches = layout, num_microbatches
        self.num_stages = layout.num_stages
        stages, width = self.num_stages, num_microbatches
        self._last = stages - 1
        self.num_ranks = ranks = len({rank for placement in layout.placements for rank in placement})
        # A group of values has one of each micro-batch. Tables hold the first of a group, by kind and stage (or rank,
        # of shards).
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
        # What a stage's earlier pass made, by kind. A shard's second pass needs its first by what it needs of all.
        self._own: dict[Kind, list[int] | None] = {
            **dict.fromkeys(Kind),
            _BACKWARD: outputs,
            _INPUT: outputs,
            _WEIGHT: gradients,
        }
        shards = layout.input_shards or layout.vocabulary is not Vocabulary.WHOLE
        self.num_values = (2 * stages + 3 * shards) * width
        # What all shards gather and, of what each makes of that, the last stage the sum: nothing is reduced behind T.
        self.in_two_steps = range(statistics, statistics + width) if last == statistics else range(0)
        # From here on a value has a maker on every rank.
        self.first_shared = 2 * stages * width
        self._by_pipe = tuple(self._routes(pipe) for pipe in range(layout.num_pipes))

    def _routes(self, pipe: int) -> tuple[Route, ...]:
        """By group of values, as numbered: who makes and who needs them on this pipe."""
        placement, split = self.layout.placements[pipe], self.layout.vocabulary
        everybody = tuple(sorted({rank for one in self.layout.placements for rank in one}))
        shards = everybody if split is not Vocabulary.WHOLE else ()
        inputs = everybody if self.layout.input_shards else ()
        behind = [*((rank,) for rank in placement[1:]), shards]
        before = [inputs, *((rank,) for rank in placement[:-1])]
        outputs = [Route((rank,), takers) for rank, takers in zip(placement, behind, strict=True)]
        gradients = [Route((rank,), takers) for rank, takers in zip(placement, before, strict=True)]
        last = (placement[self._last],)
        statistics = Route(shards, shards)
        hidden = Route(shards, last)
        return (*outputs, *gradients, statistics, hidden, Route(inputs, (placement[0],)))

    def value_of(self, action: Action) -> int:
        """Return the value that a computation makes, or of which it makes a part; NOTHING for none that others need."""
        first = self._made[action.kind][action.stage]
        return NOTHING if first == NOTHING else first + action.microbatch

    def operand_of(self, action: Action) -> int:
        """Return the value that a computation needs; NOTHING where all it needs is on its own rank since its own
        forward."""
        first = self._needed[action.kind][action.stage]
        return NOTHING if first == NOTHING else first + action.microbatch

    def own_operand_of(self, action: Action) -> int:
        """Return the value that its own stage made of the micro-batch before, and whose saved activations it reads;
        NOTHING for a first pass."""
        first = self._own[action.kind]
        return NOTHING if first is None else first[action.stage] + action.microbatch

    def first_operand_of(self, kind: Kind, stage: int) -> int:
        """Return the first operand of a stage's computations of a kind: that of micro-batch 0, which the others'
        follow."""
        return self._needed[kind][stage]

    def route(self, value: int) -> Route:
        """Return the makers and takers of a value."""
        group, microbatch = divmod(value, self.num_microbatches)
        return self._by_pipe[microbatch % len(self._by_pipe)][group]

    def sort(self, value: int) -> str:
        """Return the kind of a value as text, whoever makes it."""
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
