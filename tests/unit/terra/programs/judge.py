"""Judge whether a runner computes what plain execution does, to the last bit.

In: a program's build, a runner. Out: the first difference.

A runner is given a function that runs one step, and runs it in its way. Everything that a step leaves behind is
compared: losses, weights, gradients, optimizer's state, the states of random numbers, and what Python did besides
torch.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from tests.unit.terra.programs.program import Program

Build = Callable[[int], Program]
Runner = Callable[[Callable[[], torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """`what` is one of loss, log, state and random; `step` is the step after which it was seen first."""

    what: str
    name: str
    step: int
    detail: str

    def __str__(self) -> str:
        return f"{self.what} {self.name} after step {self.step}: {self.detail}"


@dataclass
class History:
    """What was seen after each step; losses are read at the end."""

    program: Program
    losses: list[torch.Tensor] = field(default_factory=list)
    states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    randoms: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    num_notes: dict[int, int] = field(default_factory=dict)


def plain(step: Callable[[], torch.Tensor]) -> torch.Tensor:
    return step()


def compare(build: Build, steps: int, runner: Runner, *, seed: int = 0, each_step: bool = False) -> Difference | None:
    """None where nothing differs.

    With `each_step` the runner's state is looked at after every step, else after the last one only, so that the runner
    may go on with a step while Python is at the next.
    """
    with random_states_kept():
        expected = run(build, steps, plain, seed=seed, each_step=True)
        found = run(build, steps, runner, seed=seed, each_step=each_step)
        return _first_difference(expected, found)


def run(build: Build, steps: int, runner: Runner, *, seed: int = 0, each_step: bool = True) -> History:
    """Build the program and run its steps. Leaves the states of random numbers where the program left them."""
    program = build(seed)
    seen = History(program)
    for number in range(steps):
        seen.losses.append(runner(partial(program.step, number)))
        seen.num_notes[number] = len(program.log)
        if each_step or number == steps - 1:
            seen.states[number] = program.state()
            seen.randoms[number] = _randoms(program)
    return seen


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Programs seed what all share."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _randoms(program: Program) -> dict[str, torch.Tensor]:
    """Of all generators, as bytes."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().clone(),
        "python": _bytes_of(repr(random.getstate())),
        "numpy": _bytes_of(f"{kind} {keys.tolist()} {rest}"),
        **{name: generator.get_state().clone() for name, generator in program.generators.items()},
    }


def _bytes_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _first_difference(expected: History, found: History) -> Difference | None:
    for number in range(len(expected.losses)):
        detail = difference(expected.losses[number], found.losses[number])
        if detail:
            return Difference("loss", "loss", number, detail)
        detail = _of_logs(expected, found, number)
        if detail:
            return Difference("log", "log", number, detail)
        if number in found.states:
            for what, one, other in (
                ("state", expected.states[number], found.states[number]),
                ("random", expected.randoms[number], found.randoms[number]),
            ):
                for name in dict.fromkeys([*one, *other]):
                    detail = difference(one.get(name), other.get(name))
                    if detail:
                        return Difference(what, name, number, detail)
    return None


def _of_logs(expected: History, found: History, number: int) -> str:
    one, other = (each.program.log[: each.num_notes[number]] for each in (expected, found))
    for place, (said, says) in enumerate(zip(one, other, strict=False)):
        if said != says:
            return f"note {place} is {says!r} in place of {said!r}"
    return "" if len(one) == len(other) else f"{len(other)} notes in place of {len(one)}"


def difference(one: torch.Tensor | None, other: torch.Tensor | None) -> str:
    """Empty where both have the same type, shape and bits; -0.0 is not 0.0, and a NaN is equal to itself."""
    if one is None or other is None:
        return "" if one is other else ("is missing" if other is None else "should not be there")
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{other.dtype} {list(other.shape)} in place of {one.dtype} {list(one.shape)}"
    bits = [_bits(each) for each in (one, other)]
    if np.array_equal(*bits):
        return ""
    size = one.element_size()
    first = int(np.flatnonzero(bits[0] != bits[1])[0]) // size
    number = len(set((np.flatnonzero(bits[0] != bits[1]) // size).tolist()))
    values = [each.detach().flatten()[first].item() for each in (one, other)]
    return f"{number} of {one.numel()} elements, the first at {first}: {values[1]!r} in place of {values[0]!r}"


def _bits(tensor: torch.Tensor) -> np.ndarray:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return whole.view(torch.uint8).numpy() if whole.numel() else np.empty(0, np.uint8)
