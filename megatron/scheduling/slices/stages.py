"""Compute a rank's stages slice by slice.

A script's forward step is called once per slice, with the whole row. Hooks of each model cut its inputs and pad its output.
The number of micro-batches stays the call's, and tokens and reports are counted once per micro-batch.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from bpipe.runtime.stage import Tensors
from bpipe.schedule.action import Action
from megatron.scheduling.loop.chunks import Call, ChunkStages
from megatron.scheduling.slices.cuts import RepeatedRows, SequenceSlice, joined
from megatron.scheduling.slices.state import Slicing
from megatron.scheduling.vocabulary.sharded_stages import ShardedStages


class SlicedStages(ChunkStages):
    """The stages of one rank, whose actions' micro-batches are numbers of slices."""

    def __init__(self, slicing: Slicing, *of_class: Any) -> None:
        super().__init__(*of_class)
        self.slicing, self._cutting = slicing, slicing.cutting
        # Of the slices of a micro-batch, until its last one's.
        self._reports: list[Any] = []
        # Of the models of the current call.
        self._hooks: list[Any] = []

    def begin(self, call: Call | None) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._reports.clear()
        self.slicing.clear()
        if call is not None:
            self._enter(call)
        super().begin(call)

    def forward(self, action: Action, received: Tensors) -> Tensors:
        call, _ = self._of(action)
        with self._cutting.at(action.microbatch, action.stage) as now, self._reporting(call, now):
            outputs = super().forward(action, received)
        if call.forward_only and self._is_last(now):
            self.slicing.free(now.stage, now.microbatch)
        return outputs

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        with self._cutting.at(action.microbatch, action.stage) as now:
            sent = super().backward(action, gradients)
        if now.number == 0:
            self.slicing.free(now.stage, now.microbatch)
        return sent

    def count(self, action: Action, num_tokens: torch.Tensor) -> None:
        """Count the whole micro-batch's tokens once: each slice's loss function counts them."""
        if action.microbatch % self._cutting.slices == 0:
            super().count(action, num_tokens)

    def _enter(self, call: Call) -> None:
        if call.collect_non_loss_data:
            raise ValueError(
                "non-loss data is for a whole sequence, but each forward computes one slice: train without "
                "--bpipe-slices"
            )
        call.data = [None if data is None else RepeatedRows(data, self._cutting) for data in call.data]
        self.slicing.judge(call.models)
        cut, pad = self._cutting.cut, self._cutting.pad

        def cut_inputs(_: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}

        for stage, chunk in self.chunks.items():
            model = call.models[chunk]
            self._hooks.append(model.register_forward_pre_hook(cut_inputs, with_kwargs=True))
            if stage == self.last_stage:
                self._hooks.append(model.register_forward_hook(lambda _, args, output: pad(output)))

    @contextlib.contextmanager
    def _reporting(self, call: Call, now: SequenceSlice) -> Iterator[None]:
        """Join the reports of a micro-batch's slices."""
        before = len(call.losses)
        yield
        reported = call.losses[before:]
        del call.losses[before:]
        self._reports += reported
        # With shards a later slice's forward, which reports nothing, is between the reports of a micro-batch.
        if reported and self._is_last(now):
            call.losses.append(joined(self._reports))
            self._reports = []

    def _is_last(self, now: SequenceSlice) -> bool:
        return now.number == self._cutting.slices - 1


class SlicedShardedStages(SlicedStages, ShardedStages):
    """The stages of one rank whose pipeline shares the output layer: a shard computes one slice's logits at a time."""

    def _tell(self, microbatch: int, values: torch.Tensor, largest: torch.Tensor) -> None:
        assert self._call is not None, "a shard computes for a call of the loop"
        with self._cutting.at(microbatch, self.last_stage) as now, self._reporting(self._call, now):
            super()._tell(microbatch, values, largest)

    def _row(self, losses: torch.Tensor) -> torch.Tensor:
        return self._cutting.pad(losses)
