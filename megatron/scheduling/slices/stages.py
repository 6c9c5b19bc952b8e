"""Compute a rank's stages slice by slice, as our executor asks for them.

In and out as `chunks.ChunkStages`, whose steps are Megatron's.

A script's forward step is called once a slice, with the whole row. Hooks of each model cut what it is given and pad
what it gives back; the number of micro-batches stays the call's, and tokens and reports are counted once a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch

from bpipe.ir.action import Action
from bpipe.runtime.stage import Key, Tensors
from megatron.scheduling.loop.chunks import Call, ChunkStages
from megatron.scheduling.loop.halves import Halves
from megatron.scheduling.slices.judging import judge
from megatron.scheduling.slices.rows import RepeatedRows, Reports
from megatron.scheduling.slices.slicing import Slicing


class SlicedStages(ChunkStages):
    """The stages of one rank; micro-batches of actions are numbers of slices."""

    def __init__(
        self, chunks: Mapping[int, int], last_stage: int, split: Set[Key], halves: Halves, slicing: Slicing
    ) -> None:
        super().__init__(chunks, last_stage, split, halves, slicing.number)
        self._slicing = slicing
        self._cutting = slicing.cutting
        self._reports = Reports()
        self._hooks: list[Any] = []
        self._judged = False

    def begin(self, call: Call | None) -> None:
        super().begin(call)
        while self._hooks:
            self._hooks.pop().remove()
        self._reports.clear()
        self._slicing.clear()
        if call is None:
            return
        if call.collect_non_loss_data:
            raise ValueError(
                "data that is no loss is of a whole sequence, and each forward is of a slice: train without "
                "--bpipe-slices"
            )
        call.data = [None if data is None else RepeatedRows(data, self._cutting) for data in call.data]
        if not self._judged:
            judge(call.models)
            self._judged = True
        for stage, chunk in self.chunks.items():
            model = call.models[chunk]
            self._hooks.append(model.register_forward_pre_hook(self._give, with_kwargs=True))
            if stage == self.last_stage:
                self._hooks.append(model.register_forward_hook(self._take))

    def forward(self, action: Action, received: Tensors) -> Tensors:
        call, _ = self._of(action)
        is_last_stage = action.stage == self.last_stage
        losses: list[Any] = []
        with self._cutting.at(action.microbatch, action.stage) as now:
            given, made = self.step(action, received, call.forward_step_func, losses, is_last_stage)
        is_last_slice = now.number == self._cutting.slices - 1
        if is_last_stage:
            call.losses += self._reports.add(losses[0], is_last_slice)
        if is_last_slice and call.forward_only:
            self._slicing.free(now.stage, now.microbatch)
        self.hold(action, given, made)
        return (made,)

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        with self._cutting.at(action.microbatch, action.stage) as now:
            made = super().backward(action, gradients)
        if now.number == 0:
            self._slicing.free(now.stage, now.microbatch)
        return made

    def count(self, action: Action, num_tokens: torch.Tensor) -> None:
        """Count the whole micro-batch's tokens once: each slice's loss function counts them."""
        if action.microbatch % self._cutting.slices == 0:
            super().count(action, num_tokens)

    def _give(self, _: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """A forward pre-hook of a model: it is given whole rows, and computes a slice of them."""
        cut = self._cutting.cut
        return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}

    def _take(self, _: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """A forward hook of the last stage's model."""
        return self._cutting.pad(output)
