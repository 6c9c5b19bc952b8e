"""Compute a rank's stages slice by slice, as our executor asks for them.

In and out as `chunks.ChunkStages`, whose steps are Megatron's, or as `vocabulary.sharded_stages`.

A script's forward step is called once a slice, with the whole row. Hooks of each model cut what it is given and pad
what it gives back; the number of micro-batches stays the call's, and tokens and reports are counted once a micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from bpipe.runtime.stage import Tensors
from bpipe.schedule.action import Action
from megatron.scheduling.loop.chunks import Call, ChunkStages
from megatron.scheduling.slices.cuts import Cutting, SequenceSlice
from megatron.scheduling.slices.rows import RepeatedRows, Reports
from megatron.scheduling.slices.state import Slicing
from megatron.scheduling.vocabulary.sharded_stages import ShardedStages


class Sliced(ChunkStages):
    """Stages whose micro-batches are numbers of slices, in front of a class that computes them: that knows of no
    slices but the one that is computed."""

    def __init__(self, slicing: Slicing, *of_class: Any) -> None:
        super().__init__(*of_class)
        self.slicing = slicing

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
            made = super().forward(action, received)
        if call.forward_only and self._is_last(now):
            self.slicing.free(now.stage, now.microbatch)
        return made

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        with self._cutting.at(action.microbatch, action.stage) as now:
            made = super().backward(action, gradients)
        if now.number == 0:
            self.slicing.free(now.stage, now.microbatch)
        return made

    def count(self, action: Action, num_tokens: torch.Tensor) -> None:
        """Count the whole micro-batch's tokens once: each slice's loss function counts them."""
        if action.microbatch % self._cutting.slices == 0:
            super().count(action, num_tokens)

    @property
    def _cutting(self) -> Cutting:
        return self.slicing.cutting

    @functools.cached_property
    def _reports(self) -> Reports:
        return Reports()

    @functools.cached_property
    def _hooks(self) -> list[Any]:
        """Hooks of the models of the present call."""
        return []

    def _enter(self, call: Call) -> None:
        if call.collect_non_loss_data:
            raise ValueError(
                "non-loss data is for a whole sequence, but each forward computes one slice: train without "
                "--bpipe-slices"
            )
        call.data = [None if data is None else RepeatedRows(data, self._cutting) for data in call.data]
        self.slicing.judge(call.models)
        for stage, chunk in self.chunks.items():
            model = call.models[chunk]
            self._hooks.append(model.register_forward_pre_hook(self._give, with_kwargs=True))
            if stage == self.last_stage:
                self._hooks.append(model.register_forward_hook(self._take))

    @contextlib.contextmanager
    def _reporting(self, call: Call, now: SequenceSlice) -> Iterator[None]:
        """Make one report of a micro-batch of what its slices report inside."""
        before = len(call.losses)
        yield
        reports = call.losses[before:]
        del call.losses[before:]
        for report in reports:
            call.losses += self._reports.add(report, self._is_last(now))

    def _is_last(self, now: SequenceSlice) -> bool:
        return now.number == self._cutting.slices - 1

    def _give(self, _: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """A forward pre-hook of a model: it is given whole rows, and computes a slice of them."""
        cut = self._cutting.cut
        return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}

    def _take(self, _: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """A forward hook of the last stage's model."""
        return self._cutting.pad(output)


class SlicedStages(Sliced, ChunkStages):
    """The stages of one rank that has the output layer whole, or none of it."""


class SlicedShardedStages(Sliced, ShardedStages):
    """The stages of one rank whose pipeline shares the output layer: a shard computes one slice's logits at a time."""

    def _tell(self, microbatch: int, found: torch.Tensor, largest: torch.Tensor) -> None:
        assert self._call is not None, "a shard computes for a call of the loop"
        with self._cutting.at(microbatch, self.last_stage) as now, self._reporting(self._call, now):
            super()._tell(microbatch, found, largest)

    def _row(self, losses: torch.Tensor) -> torch.Tensor:
        return self._cutting.pad(losses)
