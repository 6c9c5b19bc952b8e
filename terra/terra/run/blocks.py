"""Gather operations into a block, and compile the program that runs it.

A variant of a block is known by its signature: of every operation its node, what it makes of the forms that it takes,
and *which value* each argument is: which of those made in the block, or which of those fed. Without the last `(x if c
else y) + 1` would take what it took the first time. Numbers are fed each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from traceback import walk_tb
from typing import Any, NamedTuple

import torch

from terra.run.cell import Cell, Form, below_autograd, undispatched
from terra.run.issue import Call, Outer, Outers, Outputs, Source
from terra.run.runner import Block, Program, State
from terra.trace.graph import Node
from terra.trace.place import Place

# In a signature, a value's source is three times its number, plus one of these.
_MADE, _CELL, _FED = 0, 1, 2
_FILE = "<terra block>"


class Gathering:
    """The block that Python is issuing."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.calls: list[tuple[Call, Node, Outputs]] = []
        self.signature: list[Any] = [state]
        self.fed: list[Any] = []
        self.made: list[Cell] = []
        self._sources: dict[int, int] = {}

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

    def _outer(self, source: Source, call: Call, outers: Outers) -> int:
        """Return the source of a tensor from outside, or of memory that Python has too."""
        is_written = any(source is written for written in call.written)
        if source.is_shared or (isinstance(source, Outer) and source.is_host and not is_written):
            # As it is now: Python may write it before the block runs.
            value: Any = source.tensor if isinstance(source, Outer) else source.value
            self.fed.append(_copy(value))
            return 3 * (len(self.fed) - 1) + _FED
        assert isinstance(source, Outer)
        number = self._sources.get(id(source.tensor))
        if number is None:
            number = self._sources[id(source.tensor)] = 3 * len(self.fed) + _FED
            self.fed.append(source.tensor)
            outers.own(source)
        return number


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, also where a dimension repeats its memory."""
    with undispatched(), below_autograd():
        once = value[tuple(slice(0, 1 if stride == 0 else None) for stride in value.stride())]
        copy = torch.empty_strided(once.shape, once.stride(), dtype=value.dtype)
        return copy.copy_(once).as_strided(value.shape, value.stride())


class Variants:
    """The compiled programs of one session's blocks. `places`: where operations were issued, by a node's site."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        # A signature names an `Outputs` by its identity: whoever owns these must keep them as long.
        self.programs: dict[tuple[Any, ...], Program] = {}

    def block(self, gathered: Gathering) -> Block:
        signature = tuple(gathered.signature)
        program = self.programs.get(signature)
        if program is None:
            steps = [
                self._step(call, node, made, iter(sources))
                for (call, node, made), sources in zip(gathered.calls, gathered.signature[3::3], strict=True)
            ]
            program = self.programs[signature] = compile_block(steps)
        gathered.made.reverse()
        # They hold what was issued, which Python may have let go: the block must not keep it while it runs.
        gathered.calls.clear()
        return Block(program, gathered.fed, gathered.made, gathered.state)

    def _step(self, call: Call, node: Node, made: Outputs, sources: Iterator[int]) -> Step:
        template, count = call.template, call.num_positional
        args = tuple(_filled(part, sources) for part in template[:count])
        kwargs = {template[place]: _filled(template[place + 1], sources) for place in range(count, len(template), 2)}
        site: Any = node.key[2]
        return Step(call.function.operation, args, kwargs, made, str(self._places[site]))


def _filled(part: Any, sources: Iterator[int]) -> Any:
    """Return a part of a template, with its leaves."""
    if isinstance(part, tuple) and part[:1] == ("[",):
        return [_filled(element, sources) for element in part[1:]]
    if isinstance(part, type):
        number, kind = divmod(next(sources), 3)
        return Input(number, kind != _MADE, kind == _CELL)
    return part


class Input(NamedTuple):
    """A value by its source: fed to the block, perhaps in a cell, or made in it."""

    number: int
    is_fed: bool
    in_cell: bool = False

    @property
    def name(self) -> str:
        """The variable that holds it."""
        return f"{'f' if self.is_fed else 'v'}{self.number}"


class Step(NamedTuple):
    """One operation: arguments are `Input`s, lists of them, or plain values. `place` is the line that issued it."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Outputs
    place: str

    @property
    def inputs(self) -> list[Input]:
        return _inputs((self.args, self.kwargs))


def compile_block(steps: Sequence[Step]) -> Program:
    """Compile a block as one straight function, which lets a value go where it is last used."""
    text, names = _Text(steps).write()
    exec(compile(text, _FILE, "exec"), names)
    block = names["block"]
    calls = [number for number, line in enumerate(text.split("\n"), 1) if line.startswith("    out = ")]

    def run(fed: list[Any], made: list[Cell]) -> None:
        try:
            block(fed, made.pop)
        except BaseException as error:
            frames = walk_tb(error.__traceback__)
            line = next((number for frame, number in frames if frame.f_code.co_filename == _FILE), 1)
            step = steps[sum(number <= line for number in calls) - 1]
            error.add_note(f"terra: {step.operation} was issued at {step.place}")
            raise

    return run


def _raise_differing(tensor: Any, form: Form) -> None:
    raise RuntimeError(
        f"terra: an operation made {tuple(tensor.shape)} with strides {tensor.stride()} where it made {form.shape} with "
        f"{form.stride} of the same arguments before: its result depends on something that terra cannot see; run this "
        "part outside the session"
    )


class _Text:
    """The text of a block's function, and the names that it uses."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._names: dict[str, Any] = {"differs": _raise_differing}
        self._loaded: set[str] = set()
        self._lines = ["def block(fed, cell):"]

    def write(self) -> tuple[str, dict[str, Any]]:
        last = {value.name: place for place, step in enumerate(self._steps) for value in step.inputs}
        ends: dict[int, list[str]] = {}
        for name, place in last.items():
            ends.setdefault(place, []).append(name)
        number = 0
        for place, step in enumerate(self._steps):
            made = self._call(place, step, number)
            number += len(made)
            dead = [*ends.get(place, ()), *(name for name in made if name not in last)]
            self._lines.append(f"    del {', '.join(['out', *dead])}")
        return "\n".join(self._lines) + "\n", self._names

    def _call(self, place: int, step: Step, number: int) -> list[str]:
        """Write one call, and return the names of what it made."""
        for value in step.inputs:
            if value.is_fed and value.name not in self._loaded:
                self._loaded.add(value.name)
                # Not kept by the message any longer.
                in_cell = ".value" if value.in_cell else ""
                self._lines.append(f"    {value.name} = fed[{value.number}]{in_cell}; fed[{value.number}] = None")
        arguments = [*map(self._word, step.args), *(f"{key}={self._word(value)}" for key, value in step.kwargs.items())]
        self._names[f"o{place}"] = getattr(step.operation, "_op", step.operation)
        self._lines.append(f"    out = o{place}({', '.join(arguments)})")
        names: list[str] = []
        for index, form in enumerate(step.made.outputs):
            if isinstance(form, Form):
                name = f"v{number + len(names)}"
                names.append(name)
                self._names[f"e{name}"] = form
                facts = f"({name}.shape, {name}.stride(), {name}.storage_offset())"
                self._lines += [
                    f"    {name} = out{'' if step.made.is_one else f'[{index}]'}",
                    f"    if {facts} != e{name}[:3] or {name}.dtype != e{name}[3]:",
                    f"        differs({name}, e{name})",
                    f"    cell().value = {name}",
                ]
        return names

    def _word(self, value: Any) -> str:
        if isinstance(value, Input):
            return value.name
        if isinstance(value, list):
            return f"[{', '.join(map(self._word, value))}]"
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name


def _inputs(value: Any) -> list[Input]:
    if isinstance(value, Input):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for part in value for leaf in _inputs(part)] if isinstance(value, (list, tuple)) else []
