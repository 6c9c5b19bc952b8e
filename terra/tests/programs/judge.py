"""Check whether a runner computes the same as plain execution, to the last bit.

`compare` returns the first difference. A runner takes a function that runs one step, and runs it in its own way. All
effects of a step are compared: losses, weights, gradients, optimizer state, random states, and what Python did besides
torch.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from tests.programs.program import Program

Build = Callable[[int], Program]
Runner = Callable[[Callable[[], torch.Tensor]], torch.Tensor]


@dataclass
class History:
    """The state after each step; losses are read at the end."""

    program: Program
    losses: list[torch.Tensor] = field(default_factory=list)
    states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    randoms: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    num_notes: dict[int, int] = field(default_factory=dict)


def plain(step: Callable[[], torch.Tensor]) -> torch.Tensor:
    return step()


def compare(build: Build, steps: int, runner: Runner, *, seed: int = 0, each_step: bool = False) -> str | None:
    """Return the first difference, if there is one.

    Args:
        each_step: Whether to read the runner's state after every step, instead of only after the last, which lets the
        runner
            continue a step while Python is at the next.
    """
    with random_states_kept():
        expected = run(build, steps, plain, seed=seed, each_step=True)
        actual = run(build, steps, runner, seed=seed, each_step=each_step)
        return _first_difference(expected, actual)


def run(build: Build, steps: int, runner: Runner, *, seed: int = 0, each_step: bool = True) -> History:
    """Build the program and run its steps. Leaves random states as the program left them."""
    program = build(seed)
    history = History(program)
    for number in range(steps):
        history.losses.append(runner(partial(program.step, number)))
        history.num_notes[number] = len(program.log)
        if each_step or number == steps - 1:
            history.states[number] = program.state()
            history.randoms[number] = _randoms(program)
    return history


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the shared generators, which programs seed."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _randoms(program: Program) -> dict[str, torch.Tensor]:
    """Return the states of all generators as bytes."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().clone(),
        "python": _bytes_of(repr(random.getstate())),
        "numpy": _bytes_of(f"{kind} {keys.tolist()} {rest}"),
        **{name: generator.get_state().clone() for name, generator in program.generators.items()},
    }


def _bytes_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _first_difference(expected: History, actual: History) -> str | None:
    for number in range(len(expected.losses)):
        pairs = [("loss", {"": expected.losses[number]}, {"": actual.losses[number]})]
        if number in actual.states:
            pairs += [("state", expected.states[number], actual.states[number])]
            pairs += [("random state", expected.randoms[number], actual.randoms[number])]
        for kind, expected_tensors, actual_tensors in pairs:
            for name in dict.fromkeys([*expected_tensors, *actual_tensors]):
                pair = expected_tensors.get(name), actual_tensors.get(name)
                if _bits(pair[0]) != _bits(pair[1]):
                    return f"{kind} {name} after step {number}: {pair[1]} in place of {pair[0]}"
        notes, others = (history.program.log[: history.num_notes[number]] for history in (expected, actual))
        if notes != others:
            return f"log after step {number}: {others} in place of {notes}"
    return None


def _bits(tensor: torch.Tensor | None) -> object:
    """Return type, shape and bytes: -0.0 differs from 0.0, and a NaN equals itself."""
    if tensor is None:
        return None
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return tensor.dtype, tensor.shape, whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""
