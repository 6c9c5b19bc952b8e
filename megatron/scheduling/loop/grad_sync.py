"""Keep Megatron's data-parallel books around a program's computations: when gradients and parameters of each chunk are
synchronised.

In: the computations of a rank's program, in order; the functions that the trainer put into the model's configuration.
Out: calls of these. Gradients of all micro-batches but a chunk's last must not start a reduction, so all but that one
run inside of its `no_sync`. Where the trainer asks for all of a chunk's at once, they start behind its last
computation, while other stages still compute. Behind the first stage's last backward nobody does: there reductions
start inside of it, as in Megatron's own 1F1B. Knows no tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.schedule.action import OF_THE_INPUT, OF_THE_WEIGHTS, SHARDS, Action, Kind

# What of a chunk's computations makes gradients of weights: each of these has a last micro-batch of its own.
_HALVES = (OF_THE_INPUT, OF_THE_WEIGHTS, frozenset({Kind.SHARD_BACKWARD}), frozenset({Kind.INPUT_BACKWARD}))
# What may be the first to read a chunk's weights: S comes behind a forward of every stage.
_READING = (Kind.FORWARD, Kind.INPUT_FORWARD)


@dataclass(frozen=True)
class Marks:
    """Marks of a program, by computation: `first` a chunk's first that reads weights, `last` the last of a half,
    `final` the very last.

    `ending` is the chunk in which a pipeline ends, if the rank has it: the first stage's, or every rank's shard of the
    embedding.
    """

    first: Mapping[Action, int]
    last: Mapping[Action, int]
    final: Mapping[Action, int]
    ending: int | None = None

    @property
    def opening(self) -> int | None:
        """The chunk that computes first."""
        return next(iter(self.first.values()), None)

    @classmethod
    def of(cls, order: Iterable[Action], chunks: Mapping[int, int], num_pipes: int = 1) -> Marks:
        """Return the marks of an order.

        `chunks[stage]` is a stage's place in the list of models. A shard's weight is in the last of them.

        Two pipes end with two stages, and mirror images reduce in one order, which is that of their last computations.
        """
        of_shards = max(chunks.values(), default=0)
        first: dict[int, Action] = {}
        ends: list[dict[int, Action]] = [{} for _ in _HALVES]
        final: dict[int, Action] = {}
        for action in order:
            chunk = of_shards if action.kind in SHARDS else chunks[action.stage]
            if action.kind in _READING:
                first.setdefault(chunk, action)
            for half, end in zip(_HALVES, ends, strict=True):
                if action.kind in half:
                    end[chunk] = final[chunk] = action
        closing = {action: chunk for end in ends for chunk, action in end.items()}
        if any(action.kind is Kind.INPUT_BACKWARD for action in final.values()):
            return cls(_by_action(first), closing, _by_action(final), of_shards)
        return cls(_by_action(first), closing, _by_action(final), chunks.get(0) if num_pipes == 1 else None)


def _by_action(chunks: Mapping[int, Action]) -> dict[Action, int]:
    return {action: chunk for chunk, action in chunks.items()}


class Syncing:
    """Gradient synchronisation of one iteration.

    `config` is Megatron's: one function for all chunks, a list of one per chunk, or None.
    """

    def __init__(self, marks: Marks, config: Any, models: Sequence[torch.nn.Module]) -> None:
        self._marks, self._models = marks, models
        alone = config.no_sync_func or contextlib.nullcontext
        # Chunks that share a function are inside of it together.
        self._no_sync: list[Callable[[], Any]] = alone if isinstance(alone, list) else [alone]
        self._inside: dict[int, Any] = {}
        self._grad_sync = _a_chunk(config.grad_sync_func, len(models))
        self._param_sync = _a_chunk(config.param_sync_func, len(models)) if len(models) > 1 else None
        # In the order in which they are needed. Megatron's loop for one stage per rank leaves the gathering to the
        # modules' hooks.
        self._to_gather = list(marks.first.values()) if self._param_sync is not None else []

    def begin(self) -> None:
        """Gather the parameters of the first two chunks, before the first computation."""
        for place in range(len(self._no_sync)):
            self._enter(place)
        self._gather()
        self._gather()

    def before(self, action: Action) -> None:
        if self._to_gather and self._marks.first.get(action, self._marks.opening) != self._marks.opening:
            self._gather()
        if self._reduces_inside(action):
            self._leave(self._marks.last[action])

    def after(self, action: Action) -> None:
        if self._reduces_inside(action):
            self._enter(self._marks.last[action])
        chunk = self._marks.final.get(action)
        if self._grad_sync is not None and chunk not in (None, self._marks.ending):
            self._leave(chunk)
            self._grad_sync[chunk](self._models[chunk].parameters())
            self._enter(chunk)

    def _reduces_inside(self, action: Action) -> bool:
        """Return whether reductions start as soon as this computation has made what a bucket still lacks."""
        return action in self._marks.last and (
            self._grad_sync is None or self._marks.last[action] == self._marks.ending
        )

    def end(self) -> None:
        """Leave all contexts behind the last computation."""
        while self._inside:
            self._inside.popitem()[1].__exit__(None, None, None)

    def _gather(self) -> None:
        """Start the next chunk's, while the one before it computes its first micro-batches."""
        if self._to_gather and self._param_sync is not None:
            chunk = self._to_gather.pop(0)
            self._param_sync[chunk](self._models[chunk].parameters())

    def _enter(self, chunk: int) -> None:
        place = chunk % len(self._no_sync)
        self._inside[place] = self._no_sync[place]()
        self._inside[place].__enter__()

    def _leave(self, chunk: int) -> None:
        self._inside.pop(chunk % len(self._no_sync)).__exit__(None, None, None)


def _a_chunk(given: Any, num_chunks: int) -> list[Callable[..., Any]] | None:
    return given if given is None or isinstance(given, list) else [given] * num_chunks
