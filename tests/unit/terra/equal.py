"""Run a step plainly and with a session: what it gives must be equal in every bit, with its type."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

import terra

Step = Callable[[], Any]
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


def plainly(build: Callable[[], Step]) -> list[Any]:
    step = build()
    return [bits(step()) for _ in range(STEPS)]


def in_session(session: terra.Session, build: Callable[[], Step]) -> list[Any]:
    step, made = build(), []
    for _ in range(STEPS):
        with session:
            made.append(step())
        made[-1] = bits(made[-1])
    return made


def is_equal(kind: str, build: Callable[[], Step]) -> None:
    expected = plainly(build)
    with opened(kind) as session:
        assert in_session(session, build) == expected
        assert (session.fallbacks, session.co_executed + session.at_once) == (0, STEPS - 3)
