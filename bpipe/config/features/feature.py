"""Features of Megatron, and how far this project supports them."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class State(enum.Enum):
    """State of a feature, the best first."""

    SUPPORTED = "supported"
    GUARDED = "guarded"
    REFUSED = "refused"


class Settings:
    """Megatron's arguments or a model's configuration, read alike: what it does not have is None."""

    def __init__(self, source: object) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name, None)


def has_experts(settings: Settings) -> bool:
    """Whether a model has experts; the arguments and a model's configuration name their number differently."""
    return bool(settings.num_experts or settings.num_moe_experts)


@dataclass(frozen=True)
class Feature:
    """A feature of Megatron.

    Attributes:
        name: Its name in the documentation.
        applies: Whether settings use it.
        reason: Why it has its state.
        remedy: What to do without it.
        state: How far it is supported.
        proof: Test that shows it: in tests/gloo for what is supported, of a stand-in with the same shape of memory for
            the rest; empty if the reason needs none.
        moving: Whether it matters only if activations move, and not for measuring them.
        own_loop: Whether it matters only in our own loop, and not in Megatron's.
    """

    name: str
    applies: Callable[[Settings], object]
    reason: str
    remedy: str
    state: State = State.REFUSED
    proof: str = ""
    moving: bool = False
    own_loop: bool = False
