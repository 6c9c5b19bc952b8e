"""Compute a rank's stages with Megatron's own steps, as our executor asks for them, in any order."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model

from bpipe.runtime import RuntimeFault
from bpipe.runtime.stage import Tensors
from bpipe.schedule.action import Action, Key
from megatron.scheduling.loop.halves import Halves


@dataclass
class Call:
    """Arguments of a call of Megatron's pipelined loop, and its results.

    Attributes:
        config: Megatron's configuration of the model.
        models: By chunk.
        data: By chunk.
        losses: What the loop returns.
        num_tokens: What finalising gradients gets.
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
    """One rank's part of a program.

    Attributes:
        chunks: By stage, the index of its model.
        last_stage: The pipeline's last stage, wherever it is.
        split: Stages and micro-batches whose backward is split.
        halves: Runs the second halves.
        numbers: How many numbers of actions a micro-batch of the call has: one for each pipe and slice.
    """

    chunks: Mapping[int, int]
    last_stage: int
    split: Set[Key]
    halves: Halves
    numbers: int = 1


class ChunkStages:
    """The stages of one rank."""

    def __init__(self, part: RankPart) -> None:
        self._part = part
        self.chunks, self.last_stage = part.chunks, part.last_stage
        self.has_last = part.last_stage in part.chunks
        self._call: Call | None = None
        # By stage and micro-batch, the input and output of its forward, until its backward.
        self._held: dict[Key, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def begin(self, call: Call | None) -> None:
        """Begin a call of the loop, or end the last one."""
        self._call = call
        self._held.clear()

    def forward(self, action: Action, received: Tensors) -> Tensors:
        call, _ = self._of(action)
        is_last = action.stage == self.last_stage
        input_, output = self.step(action, received, call.forward_step_func, call.losses, is_last)
        self.hold(action, input_, output)
        return (output,)

    def hold(self, action: Action, input_: torch.Tensor | None, output: torch.Tensor) -> None:
        """Hold the input and output of a forward until its backward."""
        if not self._of(action)[0].forward_only:
            self._held[action.key] = input_, output

    def step(
        self,
        action: Action,
        received: Tensors,
        forward_step_func: Callable[..., Any],
        losses: list[Any],
        is_last_stage: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run Megatron's own step, and return its input and output; the last stage's output is the loss."""
        call, chunk = self._of(action)
        input_ = received[0] if received else None
        if input_ is not None:
            input_.requires_grad_(input_.is_floating_point())
        number = action.microbatch // self._part.numbers
        split = action.key in self._part.split and not call.forward_only
        with self._part.halves.deferring(action.key) if split else contextlib.nullcontext():
            output, num_tokens = schedules.forward_step(
                forward_step_func,
                call.data[chunk],
                call.models[chunk],
                call.num_microbatches,
                input_,
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
        return input_, output

    def count(self, _: Action, num_tokens: torch.Tensor) -> None:
        """Add the tokens of a forward to the call's."""
        assert self._call is not None
        self._call.num_tokens += num_tokens

    def check(self) -> None:
        """Raise ValueError for what is known to be wrong only after the last computation of a call."""

    def let_go(self, made: Tensors) -> None:
        assert self._call is not None
        for tensor in made:
            schedules.deallocate_output_tensor(tensor, self._call.config.deallocate_pipeline_outputs)

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        call, _ = self._of(action)
        input_, output = self._held.pop(action.key)
        if not gradients and action.stage != self.last_stage:
            raise RuntimeFault(f"{action} was given no gradient, but only the last stage makes its own from the loss")
        gradient = schedules.backward_step(input_, output, gradients[0] if gradients else None, call.config)
        return () if gradient is None else (gradient,)

    def backward_input(self, action: Action, gradients: Tensors) -> Tensors:
        with self._part.halves.deferring(action.key):
            return self.backward(action, gradients)

    def backward_weight(self, action: Action) -> None:
        self._part.halves.run(action.key)

    def _of(self, action: Action) -> tuple[Call, int]:
        assert self._call is not None, f"{action} belongs to no call of the loop"
        return self._call, self.chunks[action.stage]
