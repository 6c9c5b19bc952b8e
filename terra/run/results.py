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


def _outputs(result: Any) -> list[torch.Tensor | None] | None:
    """Return the tensors that an operation made, or None if it made anything else."""
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    are_tensors = all(isinstance(output, torch.Tensor) for output in outputs if output is not None)
    return outputs if are_tensors and result is not None else None


class Results:
    """Results of one session. `known`: by `Call.result_key`, what an operation makes."""

    def __init__(self, owner: Owner, outers: Outers) -> None:
        self.known: dict[Any, Outputs] = {}
        self._owner, self._outers = owner, outers

    def hand_out(self, call: Call, result: Any) -> Any:
        self._own(call)
        is_one = isinstance(result, torch.Tensor)
        outputs = _outputs(result)
        if outputs is None:
            if result is None:
                self._remember(call, Outputs((), False))
            return result
        arguments = {id(value_of(source)): place for place, source in reversed(list(enumerate(call.sources)))}
        pairs = [self._one(call, output, arguments) for output in outputs]
        if all(output is None or is_plain(output) for output in outputs):
            self._remember(call, Outputs(tuple(form for _, form in pairs), is_one))
        return pairs[0][0] if is_one else [handed for handed, _ in pairs]

    def _one(
        self, call: Call, output: torch.Tensor | None, arguments: Mapping[int, int]
    ) -> tuple[Any, Form | int | None]:
        """Return an output as the program gets it, and its form or the number of the argument that it is."""
        if output is None or not is_plain(output) or (call.function.makes_sizes and output.dtype == torch.int64):
            return output, None
        place = arguments.get(id(output))
        if place is None:
            form = form_of(output)
            return Placeholder(Cell(self._owner, form, output, has_shared_memory(output))), form
        argument = call.tensors[place]
        if isinstance(argument, Placeholder) and argument.cell.form != form_of(output):
            argument.become(Cell(self._owner, form_of(output), output, argument.cell.is_shared))
        return argument, place

    def _own(self, call: Call) -> None:
        """Own the tensors from outside, as if the runner got them."""
        for source in call.sources:
            if not isinstance(source, Outer) or source.is_shared:
                continue
            if not source.is_host or any(source is written for written in call.written):
                self._outers.own(source)

    def _remember(self, call: Call, made: Outputs) -> None:
        still = all(
            form_of(value_of(source)) == form
            for source, form in zip(call.sources, call.forms, strict=True)
            if isinstance(form, Form)
        )
        if not call.is_awaited and not call.function.moves and still:
            self.known.setdefault(call.result_key(), made)
