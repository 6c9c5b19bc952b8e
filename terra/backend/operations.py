"""Run a block by calling its operations, one after the other: exactly those that the program issued.

In: `Step`s. Out: a program.

The program is one straight Python function, compiled once a variant; a value is let go where it is last used.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from terra.run.cell import Cell, Form
from terra.run.runner import Program

_FILE = "<terra block>"


class Outputs(NamedTuple):
    """Results of an operation.

    For each output: its form, or the number of the tensor argument that it is, or None where it is none.

    `is_one`: one tensor, not a sequence of them.
    """

    outputs: tuple[Form | int | None, ...]
    is_one: bool


class Input(NamedTuple):
    """A value by its source: `fed` by the message, or made in the block; `in_cell`: the feed is a cell."""

    number: int
    is_fed: bool
    in_cell: bool = False


class Step(NamedTuple):
    """One operation: arguments are `Given`, lists of them, or plain values as they are.

    `place` is the line that issued it.
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Outputs
    place: str


def compile_block(steps: Sequence[Step]) -> Program:
    """Compile a block as a function whose lines tell, of an error, which operation it was."""
    text, names = _Text(steps).write()
    exec(compile(text, _FILE, "exec"), names)
    block = names["block"]
    calls = [number for number, line in enumerate(text.split("\n"), 1) if line.startswith("    out = ")]

    def run(fed: list[Any], made: list[Cell]) -> None:
        try:
            block(fed, made.pop)
        except BaseException as error:
            line = _line(error.__traceback__)
            step = steps[sum(each <= line for each in calls) - 1]
            error.add_note(f"terra: {step.operation} was issued at {step.place}")
            raise

    return run


def _line(traceback: TracebackType | None) -> int:
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == _FILE:
            return traceback.tb_lineno
        traceback = traceback.tb_next
    return 1


def differs(found: Any, form: Form) -> None:
    raise RuntimeError(
        f"terra: an operation made {tuple(found.shape)} with strides {found.stride()} where it made {form.shape} with "
        f"{form.stride} of "
        "the same arguments before: its result depends on something that terra cannot see; run this part outside the "
        "session"
    )


class _Text:
    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._names: dict[str, Any] = {"differs": differs}
        self._loaded: set[str] = set()
        self._lines = ["def block(fed, cell):"]

    def write(self) -> tuple[str, dict[str, Any]]:
        last: dict[str, int] = {}
        for place, step in enumerate(self._steps):
            for each in _givens((step.args, step.kwargs)):
                last[_name(each)] = place
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
        """Returns the names of what it made."""
        for each in _givens((step.args, step.kwargs)):
            name = _name(each)
            if each.is_fed and name not in self._loaded:
                self._loaded.add(name)
                # Not kept by the message any longer.
                self._lines.append(
                    f"    {name} = fed[{each.number}]{'.value' if each.in_cell else ''}; fed[{each.number}] = None"
                )
        arguments = [*map(self._word, step.args), *(f"{key}={self._word(value)}" for key, value in step.kwargs.items())]
        self._names[f"o{place}"] = getattr(step.operation, "_op", step.operation)
        self._lines.append(f"    out = o{place}({', '.join(arguments)})")
        names: list[str] = []
        for index, form in enumerate(step.made.outputs):
            if isinstance(form, Form):
                name = f"v{number + len(names)}"
                names.append(name)
                self._names[f"e{name}"] = form
                self._lines += [
                    f"    {name} = out{'' if step.made.is_one else f'[{index}]'}",
                    f"    if ({name}.shape, {name}.stride(), {name}.storage_offset()) != e{name}[:3] or {name}.dtype "
                    f"!= e{name}[3]:",
                    f"        differs({name}, e{name})",
                    f"    cell().value = {name}",
                ]
        return names

    def _word(self, value: Any) -> str:
        if isinstance(value, Input):
            return _name(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._word, value))}]"
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name


def _name(given: Input) -> str:
    return f"{'f' if given.is_fed else 'v'}{given.number}"


def _givens(value: Any) -> list[Input]:
    if isinstance(value, Input):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [given for each in value for given in _givens(each)] if isinstance(value, (list, tuple)) else []
