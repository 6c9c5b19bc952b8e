"""Hand out the results of operations that ran at once, in the program's thread, as placeholders with their values.

What an operation made of which forms is remembered: the next time it need not run before the program goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from terra.run.cell import Cell, Form, Owner, Placeholder, below_autograd, form_of, has_shared_memory, is_plain, plain
from terra.run.issue import Call, Outer, Outers, rebuilt, value_of


class Outputs(NamedTuple):
    """What an operation makes: one tensor if `is_one`, otherwise a sequence of them.

    `outputs` has, of each, its form, or the number of the tensor argument that it is, or None if it is no tensor.
    """

    outputs: tuple[Form | int | None, ...]
    is_one: bool


def run_below(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation below autograd, which has seen it."""
    with below_autograd():
        return operation(*args, **kwargs)


def values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments with their placeholders' values, waited for."""
    return rebuilt(args, plain), {name: rebuilt(value, plain) for name, value in kwargs.items()}


def _outputs(found: Any) -> list[torch.Tensor | None] | None:
    """Return the tensors that an operation made, None where it made anything else."""
    outputs = [found] if isinstance(found, torch.Tensor) else list(found) if isinstance(found, (tuple, list)) else None
    are_tensors = outputs is not None and all(each is None or isinstance(each, torch.Tensor) for each in outputs)
    return outputs if are_tensors else None


class Results:
    """Results of one session. `known`: by `Call.result_key`, what an operation makes."""

    def __init__(self, owner: Owner, outers: Outers) -> None:
        self.known: dict[Any, Outputs] = {}
        self._owner, self._outers = owner, outers

    def hand_out(self, call: Call, found: Any) -> Any:
        self._own(call)
        is_one = isinstance(found, torch.Tensor)
        outputs = _outputs(found)
        if outputs is None:
            if found is None:
                self._remember(call, Outputs((), False))
            return found
        arguments = {id(value_of(source)): place for place, source in reversed(list(enumerate(call.sources)))}
        made = [self._one(call, each, arguments) for each in outputs]
        if all(each is None or is_plain(each) for each in outputs):
            self._remember(call, Outputs(tuple(form for _, form in made), is_one))
        return made[0][0] if is_one else [handed for handed, _ in made]

    def _one(
        self, call: Call, output: torch.Tensor | None, arguments: Mapping[int, int]
    ) -> tuple[Any, Form | int | None]:
        """Return an output as the program gets it, and its form, or which argument it is."""
        if output is None or not is_plain(output) or (call.function.makes_sizes and output.dtype == torch.int64):
            return output, None
        place = arguments.get(id(output))
        if place is None:
            form = form_of(output)
            return Placeholder(Cell(self._owner, form, output, has_shared_memory(output))), form
        given = call.tensors[place]
        if isinstance(given, Placeholder) and given.cell.form != form_of(output):
            given.become(Cell(self._owner, form_of(output), output, given.cell.is_shared))
        return given, place

    def _own(self, call: Call) -> None:
        """Own the tensors from outside, as if the runner got them."""
        for source in call.sources:
            if not isinstance(source, Outer) or source.is_shared:
                continue
            if not source.is_host or any(source is each for each in call.written):
                self._outers.own(source)

    def _remember(self, call: Call, made: Outputs) -> None:
        still = all(
            form_of(value_of(each)) == form
            for each, form in zip(call.sources, call.forms, strict=True)
            if isinstance(form, Form)
        )
        if not call.is_awaited and not call.function.moves and still:
            self.known.setdefault(call.result_key(), made)
