"""Run a block as functions of TorchScript: the same operations in the same order, called from C++ without the
interpreter's lock. In: `Step`s. Out: a program.

Operations in a row become one function, written as TorchScript's graph, whose passes are off in the runner's thread,
for they would take operations out. It returns all that was made, so that what a row makes is kept until it has run.
What cannot be written so, as an operation that returns nothing, is called as `terra.backend.operations` does.
TorchScript is not developed further: all that needs it is here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from terra.backend import operations
from terra.backend.operations import Input, Outputs, Step
from terra.run.cell import Form
from terra.run.runner import Program

# A number may stand for a tensor here: each has an overload for numbers, which makes of it what Python would.
_WITH_NUMBERS = frozenset({"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_"})
# Of torch's types the names that a graph's text has.
_WORDS = {
    "TensorType": "Tensor",
    "NumberType": "Scalar",
    "IntType": "int",
    "FloatType": "float",
    "ComplexType": "complex",
    "BoolType": "bool",
    "StringType": "str",
    "DeviceObjType": "Device",
}
# Constants that a graph's text can hold; others are passed.
_WRITTEN = frozenset({int, bool})
_HERE = re.compile(r"^ *(%.*)\n *~+ <--- HERE$", re.MULTILINE)


def compile_block(steps: Sequence[Step]) -> Program:
    """Compile a block as TorchScript.

    An operation's error is a RuntimeError of TorchScript's, with what the operation said in it.
    """
    fused: list[Step] = []
    rows: dict[int, _Row] = {}
    number = 0
    for can, group in groupby(steps, _can_be_written):
        row = list(group)
        if can and len(row) > 1:
            written = rows[len(fused)] = _Row(row, number)
            fused.append(written.step())
        else:
            fused += row
        number += sum(_num_made(step) for step in row)
    return operations.compile_block(
        fused, lambda place, error: rows[place].blamed(error) if place in rows else fused[place]
    )


def _num_made(step: Step) -> int:
    return sum(isinstance(form, Form) for form in step.made.outputs)


# -- which operations
# --------------------------------------------------------------------------------------------------------------------


def _can_be_written(step: Step) -> bool:
    """Return whether TorchScript takes just this operation for what is written."""
    if step.operation.namespace != "aten" or not isinstance(step.operation, torch._ops.OpOverload):
        return False
    kinds = []
    for argument, value in _arguments(step):
        kind = _kind(argument.type, value)
        if kind is None or (
            _is_number(value) and kind == "Tensor" and step.operation._schema.name[6:] not in _WITH_NUMBERS
        ):
            return False
        kinds.append("Scalar" if kind == "Tensor" and _is_number(value) else kind)
    made = _made(step.operation)
    return made is not None and _chosen(step.operation._schema.name, tuple(kinds), made) in _meant(step.operation)


def _arguments(step: Step) -> Iterator[tuple[Any, Any]]:
    """Return all that the operation has, with their defaults where they were not given."""
    for place, argument in enumerate(step.operation._schema.arguments):
        if place < len(step.args):
            yield argument, step.args[place]
        else:
            yield argument, step.kwargs.get(argument.name, argument.default_value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Input) and value.kind in (int, float, complex)


def _kind(declared: Any, value: Any) -> str | None:
    """Return how the graph names the type of this value, which stands where the operation has `declared`; None if it
    cannot."""
    if declared.kind() == "OptionalType":
        return "NoneType" if value is None else _kind(declared.getElementType(), value)
    if type(value) is bool and declared.kind() != "BoolType":
        # Python takes it for a number, a graph does not.
        return None
    if declared.kind() == "ListType":
        return _kind_of_list(declared.getElementType(), value) if isinstance(value, list) else None
    return _WORDS.get(declared.kind())


def _kind_of_list(element: Any, values: list[Any]) -> str | None:
    """The same of a list."""
    if element.kind() == "OptionalType":
        inner = _WORDS.get(element.getElementType().kind())
        return inner and f"{inner}?[]"
    inner = _WORDS.get(element.kind())
    return inner and f"{inner}[]" if all(_kind(element, each) for each in values) else None


@functools.cache
def _made(operation: Any) -> tuple[str, ...] | None:
    """Types of what it returns: tensors, or one list of them; None for all else."""
    kinds = tuple(str(each.type) for each in operation._schema.returns)
    if kinds == ("List[Tensor]",):
        return ("Tensor[]",)
    return kinds if kinds and set(kinds) == {"Tensor"} else None


@functools.cache
def _chosen(name: str, kinds: tuple[str, ...], made: tuple[str, ...]) -> str:
    """What TorchScript takes an operation for, by its name and the types of all its arguments."""
    given = ", ".join(f"%a{place} : {kind}" for place, kind in enumerate(kinds) if kind != "NoneType")
    named = ", ".join("%none" if kind == "NoneType" else f"%a{place}" for place, kind in enumerate(kinds))
    outputs = ", ".join(f"%o{place} : {kind}" for place, kind in enumerate(made))
    lines = (
        f"graph({given}):",
        "%none : NoneType = prim::Constant()",
        f"{outputs} = {name}({named})",
        "return (%none)\n",
    )
    return next((node.schema() for node in torch._C.parse_ir("\n  ".join(lines)).nodes() if node.kind() == name), "")


@functools.cache
def _meant(operation: Any) -> tuple[str, ...]:
    schema, packet = operation._schema, operation.overloadpacket
    meant = [str(schema)]
    if schema.name[6:] in _WITH_NUMBERS:
        name = schema.overload_name.replace("Tensor", "Scalar")
        meant += [str(getattr(packet, name)._schema)] if name in packet.overloads() else []
    return tuple(meant)


# -- how they are written
# ----------------------------------------------------------------------------------------------------------------


class _Row:
    """`number` values were made in the block before this row."""

    def __init__(self, steps: Sequence[Step], number: int) -> None:
        self._steps = steps
        # Of what is passed: the name in the graph with its type, and what the block passes there.
        self._inputs: dict[str, Any] = {}
        self._constants: dict[str, str] = {"%none : NoneType": "prim::Constant()"}
        self._lines: list[str] = []
        # Which operation a line belongs to.
        self._of_lines: dict[str, Step] = {}
        self._made: set[str] = set()
        self._forms: list[Form] = []
        for step in steps:
            self._write(step, number + len(self._forms))

    def step(self) -> Step:
        """Run all operations of the row as one."""
        made = ", ".join(sorted(self._made, key=lambda name: int(name[2:])))
        lines = [
            f"graph({', '.join(self._inputs)}):",
            *(f"  {name} = {value}" for name, value in self._constants.items()),
        ]
        lines += [
            *(f"  {line}" for line in self._lines),
            f"  %made : Tensor[] = prim::ListConstruct({made})",
            "  return (%made)\n",
        ]
        function = torch._C._create_function_from_graph("block", torch._C.parse_ir("\n".join(lines)))
        return Step(function, tuple(self._inputs.values()), {}, Outputs(tuple(self._forms), False), "")

    def blamed(self, error: BaseException) -> Step:
        """Return the operation that failed: TorchScript's message shows its line."""
        found = _HERE.search(str(error))
        return self._of_lines.get(found[1] if found else "", self._steps[0])

    def _write(self, step: Step, number: int) -> None:
        words = ", ".join([self._word(value, argument.type) for argument, value in _arguments(step)])
        names = []
        for place, form in enumerate(step.made.outputs):
            if isinstance(form, Form):
                names.append(f"%v{number}")
                self._made.add(names[-1])
                self._forms.append(form)
                number += 1
            else:
                names.append(f"%unused{len(self._lines)}_{place}")
        typed = ", ".join(f"{name} : Tensor" for name in names)
        call = f"{step.operation._schema.name}({words})"
        if _made(step.operation) == ("Tensor[]",):
            listed = f"%list{len(self._lines)}"
            self._line(f"{listed} : Tensor[] = {call}", step)
            self._line(f"{typed} = prim::ListUnpack({listed})", step)
        else:
            self._line(f"{typed} = {call}", step)

    def _line(self, text: str, step: Step) -> None:
        self._lines.append(text)
        self._of_lines[text] = step

    def _word(self, value: Any, declared: Any) -> str:
        kind = _kind(declared, value)
        if value is None:
            return "%none"
        if isinstance(value, Input):
            if _is_number(value):
                return self._input(f"%n{value.number}", "Scalar" if kind == "Tensor" else kind, value)
            name = f"%{'f' if value.is_fed else 'v'}{value.number}"
            return name if name in self._made else self._input(name, "Tensor", value)
        if isinstance(value, list):
            words = ", ".join([self._word(each, _element(declared)) for each in value])
            name = f"%list{len(self._lines)}"
            self._lines.append(f"{name} : {kind} = prim::ListConstruct({words})")
            return name
        if type(value) in _WRITTEN and kind in ("int", "bool", "Scalar"):
            name = f"%{type(value).__name__}{int(value)}".replace("-", "minus")
            self._constants[f"{name} : {type(value).__name__}"] = f"prim::Constant[value={int(value)}]()"
            return name
        return self._input(f"%k{len(self._inputs)}", kind, value)

    def _input(self, name: str, kind: str | None, value: Any) -> str:
        self._inputs[f"{name} : {kind}"] = value
        return name


def _element(declared: Any) -> Any:
    while declared.kind() == "OptionalType":
        declared = declared.getElementType()
    return declared.getElementType()
