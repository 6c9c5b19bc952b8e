"""Run a step plainly and with a session: its results must be equal in every bit, and of equal types."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import terra

# One step for every value that it yields.
Steps = Iterator[Any]
STEPS = 6
KINDS = ("threaded", "lazy")


def opened(kind: str) -> contextlib.closing[terra.Session]:
    return contextlib.closing(terra.Session(kind))  # type: ignore[arg-type]


def bits(result: Any) -> Any:
    """Convert any result of a step to numbers with their types."""
    if isinstance(result, torch.Tensor):
        return result.dtype, result.detach().numpy().tobytes(), tuple(result.shape), result.requires_grad
    if isinstance(result, dict):
        return {name: bits(value) for name, value in result.items()}
    return [bits(value) for value in result] if isinstance(result, (list, tuple)) else result


def plainly(build: Callable[[], Steps]) -> list[Any]:
    steps = build()
    return [bits(next(steps)) for _ in range(STEPS)]


def in_session(session: terra.Session, build: Callable[[], Steps]) -> list[Any]:
    steps, results = build(), []
    for _ in range(STEPS):
        with session:
            results.append(next(steps))
        results[-1] = bits(results[-1])
    return results


def is_equal(kind: str, build: Callable[[], Steps]) -> None:
    expected = plainly(build)
    with opened(kind) as session:
        assert in_session(session, build) == expected
        assert (session.fallbacks, session.co_executed + session.at_once) == (0, STEPS - 3)
