"""Compute a rank's stages with Megatron's own steps, as our executor asks for them.

In: one call of Megatron's pipelined loop (its model, data, functions), and the computations of a program. Out: the
tensors that other stages need, the losses that the loop returns, and the number of tokens. Knows no order and no
messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model

from bpipe.runtime.errors import RuntimeFault
from bpipe.runtime.stage import Tensors
from bpipe.schedule.action import Action, Key
from megatron.scheduling.loop.halves import Halves


@dataclass
class Call:
    """Arguments of a call of Megatron's pipelined loop; `config` is Megatron's, of the model.

    `models` and `data` have an entry per chunk.

    `losses` is what the loop returns, `num_tokens` what it tells whoever finalises gradients.
    """

    config: Any
    models: list[torch.nn.Module]
    data: list[Iterator[Any] | None]
    forward_step_func: Callable[..., Any]
    num_microbatches: int
    cp_size: int
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    losses: list[Any] = field(default_factory=list)
    num_tokens: torch.Tensor = field(default_factory=lambda: torch.zeros([], dtype=torch.int, device="cuda"))


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a program."""

    chunks: Mapping[int, int]
    """By stage, its place in the list of models."""

    last_stage: int
    """The pipeline's last stage, wherever it is."""

    split: Set[Key]
    """Stages and micro-batches whose backward comes in halves."""

    halves: Halves
    """What runs the second halves."""

    numbers: int = 1
    """Numbers of actions for one micro-batch of the call: pipes share them out, and slices are parts of one."""


class ChunkStages:
    """The stages of one rank. `begin` says first of which call."""

    def __init__(self, part: RankPart) -> None:
        self._part = part
        self.chunks, self.last_stage = part.chunks, part.last_stage
        self.has_last = part.last_stage in part.chunks
        self._call: Call | None = None
        # By stage and micro-batch: what its forward received and made, until its backward.
        self._held: dict[Key, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def begin(self, call: Call | None) -> None:
        """Begin a call to which computations belong from now on; None: no call."""
        self._call = call
        self._held.clear()

    def forward(self, action: Action, received: Tensors) -> Tensors:
        call, _ = self._of(action)
        given, made = self.step(action, received, call.forward_step_func, call.losses, action.stage == self.last_stage)
        self.hold(action, given, made)
        return (made,)

    def hold(self, action: Action, given: torch.Tensor | None, made: torch.Tensor) -> None:
        """Hold what a forward received and made until its backward."""
        if not self._of(action)[0].forward_only:
            self._held[action.stage, action.microbatch] = given, made

    def step(
        self,
        action: Action,
        received: Tensors,
        forward_step_func: Callable[..., Any],
        losses: list[Any],
        is_last_stage: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run Megatron's own step. Return what the forward received and made; on the last stage that is the loss."""
        call, chunk = self._of(action)
        given = received[0] if received else None
        if given is not None:
            given.requires_grad_(given.is_floating_point())
        key = action.stage, action.microbatch
        number = action.microbatch // self._part.numbers
        split = key in self._part.split and not call.forward_only
        with self._part.halves.deferring(key) if split else contextlib.nullcontext():
            made, num_tokens = schedules.forward_step(
                forward_step_func,
                call.data[chunk],
                call.models[chunk],
                call.num_microbatches,
                given,
                losses,
                call.config,
                call.cp_size,
                collect_non_loss_data=call.collect_non_loss_data,
                is_first_microbatch=schedules.check_first_val_step(call.first_val_step, call.forward_only, number == 0),
                current_microbatch=number,
                vp_stage=chunk if len(call.models) > 1 else None,
                is_last_stage=is_last_stage,
            )
        self.count(action, num_tokens)
        # The model would keep it until its next forward.
        get_attr_wrapped_model(call.models[chunk], "set_input_tensor")([None])
        return given, made

    def count(self, _: Action, num_tokens: torch.Tensor) -> None:
        """Add the tokens of a forward to the call's."""
        assert self._call is not None
        self._call.num_tokens += num_tokens

    def check(self) -> None:
        """Raise ValueError, behind the last computation of a call, for what only then is known to be wrong."""

    def let_go(self, made: Tensors) -> None:
        assert self._call is not None
        for tensor in made:
            schedules.deallocate_output_tensor(tensor, self._call.config.deallocate_pipeline_outputs)

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        call, _ = self._of(action)
        given, made = self._held.pop(action.key)
        if not gradients and action.stage != self.last_stage:
            raise RuntimeFault(f"{action} was given no gradient, but only the last stage makes its own from the loss")
        gradient = schedules.backward_step(given, made, gradients[0] if gradients else None, call.config)
        return () if gradient is None else (gradient,)

    def backward_input(self, action: Action, gradients: Tensors) -> Tensors:
        with self._part.halves.deferring(action.key):
            return self.backward(action, gradients)

    def backward_weight(self, action: Action) -> None:
        self._part.halves.run(action.key)

    def _of(self, action: Action) -> tuple[Call, int]:
        assert self._call is not None, f"{action} belongs to no call of the loop"
        return self._call, self.chunks[action.stage]
