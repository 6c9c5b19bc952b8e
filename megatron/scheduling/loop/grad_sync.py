"""When gradients and parameters of each chunk are synchronised between data-parallel ranks.

The functions are those that Megatron's trainer puts into the model's configuration. Gradients of all micro-batches but a
chunk's last must not start a reduction, so all but the last run inside of the chunk's `no_sync`. If the trainer asks for
all of a chunk at once, the reduction starts after its last computation, while other stages still compute. After the first
stage's last backward nothing computes any more, so there reductions start inside of it, as in Megatron's own 1F1B.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.schedule.action import OF_THE_INPUT, OF_THE_WEIGHTS, SHARDS, Action, Kind

# Kinds of computations that make gradients of weights; each of these sets has a last micro-batch of its own.
_HALVES = (OF_THE_INPUT, OF_THE_WEIGHTS, frozenset({Kind.SHARD_BACKWARD}), frozenset({Kind.INPUT_BACKWARD}))
# Kinds that may be the first to read a chunk's weights: S comes after a forward of every stage.
_READING = (Kind.FORWARD, Kind.INPUT_FORWARD)


@dataclass(frozen=True)
class Marks:
    """Computations at which something starts, each with its chunk."""

    first: Mapping[Action, int]
    """The first computation of each chunk that reads weights."""

    last: Mapping[Action, int]
    """The last computation of each kind that makes gradients of weights."""

    final: Mapping[Action, int]
    """The very last of them of each chunk."""

    ending: int | None = None
    """The chunk in which a pipeline ends, if the rank has it: the first stage's, or the shard of the embedding."""

    @property
    def opening(self) -> int | None:
        """The chunk that computes first."""
        return next(iter(self.first.values()), None)

    @classmethod
    def of(cls, order: Iterable[Action], chunks: Mapping[int, int], num_pipes: int = 1) -> Marks:
        """Return the marks of an order.

        `chunks` has the index of each stage's model. A shard's weight is in the last model. Two pipes end with two
        stages, and mirror images reduce in one order, which is that of their last computations.
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
        ending = chunks.get(0) if num_pipes == 1 else None
        if any(action.kind is Kind.INPUT_BACKWARD for action in final.values()):
            ending = of_shards
        return cls(
            {action: chunk for chunk, action in first.items()},
            {action: chunk for end in ends for chunk, action in end.items()},
            {action: chunk for chunk, action in final.items()},
            ending,
        )


class Syncing:
    """Synchronisation of one iteration."""

    def __init__(self, marks: Marks, config: Any, models: Sequence[torch.nn.Module]) -> None:
        """`config` is Megatron's: its functions are one for all chunks, a list with one per chunk, or None."""
        self._marks, self._models = marks, models
        no_sync = config.no_sync_func or contextlib.nullcontext
        # Chunks that share a function are inside of it together.
        self._no_sync: list[Callable[[], Any]] = no_sync if isinstance(no_sync, list) else [no_sync]
        self._inside: dict[int, Any] = {}
        self._grad_sync = _by_chunk(config.grad_sync_func, len(models))
        self._param_sync = _by_chunk(config.param_sync_func, len(models)) if len(models) > 1 else None
        # In the order in which they are needed. In Megatron's loop for one stage per rank the modules' hooks gather.
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
        """Whether reductions start as soon as this computation has completed a bucket."""
        return action in self._marks.last and (
            self._grad_sync is None or self._marks.last[action] == self._marks.ending
        )

    def end(self) -> None:
        """Leave all contexts after the last computation."""
        while self._inside:
            self._inside.popitem()[1].__exit__(None, None, None)

    def _gather(self) -> None:
        """Start to gather the next chunk, while the chunk before it computes its first micro-batches."""
        if self._to_gather and self._param_sync is not None:
            chunk = self._to_gather.pop(0)
            self._param_sync[chunk](self._models[chunk].parameters())

    def _enter(self, chunk: int) -> None:
        place = chunk % len(self._no_sync)
        self._inside[place] = self._no_sync[place]()
        self._inside[place].__enter__()

    def _leave(self, chunk: int) -> None:
        self._inside.pop(chunk % len(self._no_sync)).__exit__(None, None, None)


def _by_chunk(functions: Any, num_chunks: int) -> list[Callable[..., Any]] | None:
    return functions if functions is None or isinstance(functions, list) else [functions] * num_chunks
