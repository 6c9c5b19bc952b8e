"""Run a step plainly and with a session: what it gives must be equal in every bit, with its type."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import terra

# A step for every value that it yields.
Steps = Iterator[Any]
STEPS = 6
KINDS = ("threaded", "lazy")


def opened(kind: str) -> contextlib.closing[terra.Session]:
    return contextlib.closing(terra.Session(kind))  # type: ignore[arg-type]


def bits(made: Any) -> Any:
    """Numbers with their types, out of whatever a step gives."""
    if isinstance(made, torch.Tensor):
        return made.dtype, made.detach().numpy().tobytes(), tuple(made.shape), made.requires_grad
    if isinstance(made, dict):
        return {name: bits(each) for name, each in made.items()}
    return [bits(each) for each in made] if isinstance(made, (list, tuple)) else made


def plainly(build: Callable[[], Steps]) -> list[Any]:
    steps = build()
    return [bits(next(steps)) for _ in range(STEPS)]


def in_session(session: terra.Session, build: Callable[[], Steps]) -> list[Any]:
    steps, made = build(), []
    for _ in range(STEPS):
        with session:
            made.append(next(steps))
        made[-1] = bits(made[-1])
    return made


def is_equal(kind: str, build: Callable[[], Steps]) -> None:
    expected = plainly(build)
    with opened(kind) as session:
        assert in_session(session, build) == expected
        assert (session.fallbacks, session.co_executed + session.at_once) == (0, STEPS - 3)
