"""Gather operations into a block, and find the program that runs it.

In: calls, as they are issued. Out: a `Block` for the runner.

A variant of a block is known by its signature: of every operation its node, what it makes of the forms that it takes,
and *which value* each argument is: which of those made in the block, or which of those fed. Without the last `(x if c
else y) + 1` would take what it took the first time. Numbers are fed each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from terra.backend.operations import Input, Outputs, Step, compile_block
from terra.run.cell import Cell, Form, below_autograd, undispatched
from terra.run.issue import Call, Outer, Outers, Source
from terra.run.runner import Block, Program
from terra.run.state import State
from terra.trace.graph import Node

# What a value's source is, in a signature: three times its number and one of these.
_MADE, _CELL, _FED = 0, 1, 2


class Gathering:
    """The block that Python is issuing."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.calls: list[tuple[Call, Node, Outputs]] = []
        self.signature: list[Any] = [state]
        self.fed: list[Any] = []
        self.made: list[Cell] = []
        self._sources: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.calls)

    def add(self, call: Call, node: Node, made: Outputs, outers: Outers, owner: Any) -> list[Cell]:
        """Add a call and return cells for its results."""
        self.calls.append((call, node, made))
        known, fed, sources = self._sources, self.fed, []
        for leaf in call.leaves:
            kind = type(leaf)
            if kind is Cell and not leaf.is_shared:
                source = known.get(id(leaf))
                if source is None:
                    source = known[id(leaf)] = 3 * len(fed) + _CELL
                    fed.append(leaf)
            elif kind is Outer or kind is Cell:
                source = self._outer(leaf, call, outers)
            else:
                source = 3 * len(fed) + _FED
                fed.append(leaf)
            sources.append(source)
        self.signature += node.number, id(made), tuple(sources)
        cells = []
        for form in made.outputs:
            if type(form) is Form:
                cell = Cell(owner, form)
                known[id(cell)] = 3 * len(self.made) + _MADE
                self.made.append(cell)
                cells.append(cell)
        return cells

    def key(self) -> tuple[Any, ...]:
        return tuple(self.signature)

    def _outer(self, source: Source, call: Call, outers: Outers) -> int:
        """Return a tensor from outside, or memory that Python has too."""
        is_written = any(source is each for each in call.written)
        if source.is_shared or (isinstance(source, Outer) and source.is_host and not is_written):
            # As it is now: Python may write it before the block runs.
            value: Any = source.tensor if isinstance(source, Outer) else source.value
            self.fed.append(_copy(value))
            return 3 * (len(self.fed) - 1) + _FED
        assert isinstance(source, Outer)
        known = self._sources.get(id(source.tensor))
        if known is None:
            known = self._sources[id(source.tensor)] = 3 * len(self.fed) + _FED
            self.fed.append(source.tensor)
            outers.own(source)
        return known


def _copy(value: torch.Tensor) -> torch.Tensor:
    """With the same strides; where a dimension repeats its memory the copy does so too."""
    with undispatched(), below_autograd():
        once = value[tuple(slice(0, 1 if stride == 0 else None) for stride in value.stride())]
        copy = torch.empty_strided(once.shape, once.stride(), dtype=value.dtype)
        return copy.copy_(once).as_strided(value.shape, value.stride())


class Variants:
    """Programs of the blocks that were gathered, of one session."""

    def __init__(self, place: Callable[[Node], str]) -> None:
        self._place = place
        # A signature names a `Made` by its identity: whoever owns these must keep them as long.
        self._programs: dict[tuple[Any, ...], Program] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def clear(self) -> None:
        self._programs.clear()

    def block(self, gathered: Gathering) -> Block:
        signature = gathered.key()
        program = self._programs.get(signature)
        if program is None:
            steps = [
                self._step(call, node, made, iter(sources))
                for (call, node, made), sources in zip(gathered.calls, gathered.signature[3::3], strict=True)
            ]
            program = self._programs[signature] = compile_block(steps)
        gathered.made.reverse()
        # They hold what was issued, which Python may have let go: the block must not keep it while it runs.
        gathered.calls.clear()
        return Block(program, gathered.fed, gathered.made, gathered.state)

    def _step(self, call: Call, node: Node, made: Outputs, sources: Iterator[int]) -> Step:
        template, count = call.template, call.num_positional
        args = tuple(_filled(part, sources) for part in template[:count])
        kwargs = {template[place]: _filled(template[place + 1], sources) for place in range(count, len(template), 2)}
        return Step(call.function.operation, args, kwargs, made, self._place(node))


def _filled(part: Any, sources: Iterator[int]) -> Any:
    """Return a part of a template, with its leaves."""
    if isinstance(part, tuple) and part[:1] == ("[",):
        return [_filled(each, sources) for each in part[1:]]
    if isinstance(part, type):
        number, kind = divmod(next(sources), 3)
        return Input(number, kind != _MADE, kind == _CELL)
    return part
