"""Say of Megatron's own stages what a CUDA graph would freeze, lose or break on: `--terra-audit N`.

The one place that knows terra.

In: Megatron's forward and backward steps, as its own loops call them. Out: of every chunk of this rank's model an audit
of N micro-batches in the log. A micro-batch's forward and backward are one step of terra's, in two parts, as several
micro-batches are under way at a time. What comes from the neighbours is known to be other memory each time. Changes
nothing, and only looks on until it has seen enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bpipe.schedule.action import Key
from megatron.scheduling.hooks import patches
from megatron.scheduling.hooks.loops import as_list
from megatron.scheduling.record.log import say
from terra.audit.compare import compare
from terra.audit.record import Recorder
from terra.audit.report import text
from terra.audit.run import unseen

# Without a GPU its functions stand in for torch's. By its name: whoever imports it says that there is no GPU.
_STAND_IN = str(Path(__file__).parents[1] / "cpu.py")
# Optimizers make their state in the first iteration, and modules their buffers.
_WARM_UP_ITERATIONS = 1


class StageAudit:
    """Audit of one rank: `num_microbatches` of each chunk are compared, the first after the warm-up."""

    def __init__(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._recorder = Recorder(through=(_STAND_IN,))
        self._num_iterations = 0
        # By chunk: how many forwards were looked at, and how many backwards.
        self._begun: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        # By what a forward made, as an object: the micro-batch that it belongs to. The object is kept, so that no other
        # has its number.
        self._under_way: dict[int, tuple[object, Key]] = {}

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        return {
            patches.TRAIN_STEP: self._count,
            patches.FORWARD_STEP: patches.by_name(self._forward),
            patches.BACKWARD_STEP: patches.by_name(self._backward),
        }

    def finish(self) -> None:
        """Say, when training is over, what was not seen often enough."""
        for chunk, begun in self._begun.items():
            if self._ended.get(chunk, 0) < self._num_microbatches:
                say(
                    f"{_name(chunk)}: {begun} micro-batches were trained after the first iteration, too few to compare",
                    everywhere=True,
                )
        if self._num_iterations <= _WARM_UP_ITERATIONS:
            say("--terra-audit compares micro-batches of the second iteration, but there was none")

    def _count(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train_step)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._num_iterations += 1
            return train_step(*args, **kwargs)

        return run

    def _forward(self, given: Mapping[str, Any], step: Callable[[], Any]) -> Any:
        chunk = given.get("vp_stage") or 0
        number = self._begun.get(chunk, 0)
        # Evaluation has no gradients.
        wanted = (
            self._num_iterations > _WARM_UP_ITERATIONS and number < self._num_microbatches and torch.is_grad_enabled()
        )
        if not wanted or not given["model"].training:
            return step()
        self._begun[chunk] = number + 1
        with self._recorder.running(), self._recorder.step((chunk, number), _tensors(given["input_tensor"])):
            made = step()
        for tensor in _tensors(made[0]):
            self._under_way[id(tensor)] = tensor, (chunk, number)
        return made

    def _backward(self, given: Mapping[str, Any], step: Callable[[], Any]) -> Any:
        keys = {
            self._under_way.pop(id(tensor))[1]
            for tensor in _tensors(given["output_tensor"])
            if id(tensor) in self._under_way
        }
        if not keys:
            return step()
        ((chunk, number),) = keys
        with self._recorder.running(), self._recorder.step((chunk, number), _tensors(given["output_tensor_grad"])):
            made = step()
        self._ended[chunk] = self._ended.get(chunk, 0) + 1
        if self._ended[chunk] == self._num_microbatches:
            self._tell(chunk)
        return made

    def _tell(self, chunk: int) -> None:
        steps = [self._recorder.steps.pop((chunk, number)) for number in range(self._num_microbatches)]
        for line in text(compare(steps, unseen()), "micro-batches").splitlines():
            say(f"{_name(chunk)}: {line}" if line else _name(chunk), everywhere=True)


def _name(chunk: int) -> str:
    return f"terra: rank {dist.get_rank()}, chunk {chunk}"


def _tensors(given: Any) -> list[torch.Tensor]:
    """Megatron passes one tensor, a list of them, or None."""
    return [each for each in as_list(given) if isinstance(each, torch.Tensor)]
