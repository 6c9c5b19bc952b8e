"""Describe a feature of Megatron's and the state in which this project's use of it is.

In: Megatron's arguments, the configuration of a model that is about to train, or a launch's flags, as `Settings`. Out:
`Feature` values. What the settings do not have does not apply: a model's configuration says nothing of FSDP.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class State(enum.Enum):
    """State of a feature, the better first."""

    SUPPORTED = "supported"
    GUARDED = "guarded"
    REFUSED = "refused"


class Settings:
    """Arguments or a configuration, read without knowing which of the two: what is not there is None."""

    def __init__(self, source: object) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name, None)


def has_experts(settings: Settings) -> bool:
    """Return whether there are any; the arguments and a model's configuration have different names for it."""
    return bool(settings.num_experts or settings.num_moe_experts)


@dataclass(frozen=True)
class Feature:
    """Something of Megatron's: its name in the documentation, when it applies, why it has its state, and the way out.

    `proof` is what shows it: tests in tests/gloo of what is supported, and of the rest tests of a stand-in with the same
    shape of memory; empty where a reason needs none. What stands in the way of moving activations only, `moving`, does
    not hinder measuring them; what stands in the way of our own loop only, `own_loop`, does not hinder Megatron's.
    """

    name: str
    applies: Callable[[Settings], object]
    reason: str
    remedy: str
    state: State = State.REFUSED
    proof: str = ""
    moving: bool = False
    own_loop: bool = False
