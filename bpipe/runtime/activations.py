"""Hold the saved activations of one forward, and where they are."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bpipe.runtime.states import advance
from bpipe.schedule.action import Action
from bpipe.transport.base import Pending


class ActivationsState(enum.Enum):
    HERE = "here"
    LEAVING = "leaving"
    AWAY = "away"
    COMING = "coming"


_NEXT = {
    ActivationsState.HERE: ActivationsState.LEAVING,
    ActivationsState.LEAVING: ActivationsState.AWAY,
    ActivationsState.AWAY: ActivationsState.COMING,
    ActivationsState.COMING: ActivationsState.HERE,
}
# What freed and refilled memory is filled with when poisoning is on: a NaN in every floating type, an absurd index in
# every integer type.
POISON = 0xFF


@dataclass
class Activations:
    """The saved activations of one forward. `roots`, `inputs` and `held` are dropped once its storages are known.

    `outputs` are where the stage's outputs lay when it had run: what autograd saved of these stays. How long whoever
    sends them, or the next stage, holds them too differs between micro-batches, and all of a stage's are to be of one
    size.
    """

    forward: Action
    roots: Sequence[Any]
    inputs: Sequence[torch.Tensor | None]
    outputs: frozenset[int] = frozenset()
    held: Sequence[torch.Tensor] = ()
    state: ActivationsState = ActivationsState.HERE
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    lengths: tuple[int, ...] = ()
    pending: Pending | None = None
    action: Action | None = None

    def move(self, state: ActivationsState, action: Action) -> None:
        self.state = advance(self.state, state, _NEXT, f"activations of {self.forward}", action)
        self.action = action
