"""Report what a CUDA graph of Megatron's own stages would freeze, lose or break on: `--terra-audit N`.

Of every chunk of this rank's model N micro-batches are audited, and nothing is changed. A micro-batch's forward and backward
are one step of terra's in two parts, as several micro-batches are in flight. The log says that what comes from the neighbours
has other memory each time. No other module imports terra.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bpipe.schedule.action import Key
from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.log import say
from megatron.scheduling.loop.megatron_loops import as_list
from terra.audit.compare import compare
from terra.audit.record import Recorder
from terra.audit.report import text
from terra.audit.run import unseen

# Without a GPU its functions replace torch's. It is not imported, because importing it means that there is no GPU.
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
        # By the id of a forward's output: the output, so that its id stays its own, and the micro-batch.
        self._under_way: dict[int, tuple[object, Key]] = {}

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        return {
            patches.TRAIN_STEP: patches.by_name(self._count),
            patches.FORWARD_STEP: patches.by_name(self._forward),
            patches.BACKWARD_STEP: patches.by_name(self._backward),
        }

    def finish(self) -> None:
        """Print, after training, which chunks had too few micro-batches."""
        for chunk, begun in self._begun.items():
            if self._ended.get(chunk, 0) < self._num_microbatches:
                say(
                    f"{_name(chunk)}: {begun} micro-batches were trained after the first iteration, too few to compare",
                    everywhere=True,
                )
        if self._num_iterations <= _WARM_UP_ITERATIONS:
            say("--terra-audit compares micro-batches of the second iteration, but there was none")

    def _count(self, _: Mapping[str, Any], step: Callable[[], Any]) -> Any:
        self._num_iterations += 1
        return step()

    def _forward(self, arguments: Mapping[str, Any], step: Callable[[], Any]) -> Any:
        chunk = arguments.get("vp_stage") or 0
        number = self._begun.get(chunk, 0)
        due = self._num_iterations > _WARM_UP_ITERATIONS and number < self._num_microbatches
        # Evaluation has no gradients.
        if not due or not torch.is_grad_enabled() or not arguments["model"].training:
            return step()
        self._begun[chunk] = number + 1
        with self._recorder.running(), self._recorder.step((chunk, number), _tensors(arguments["input_tensor"])):
            result = step()
        for tensor in _tensors(result[0]):
            self._under_way[id(tensor)] = tensor, (chunk, number)
        return result

    def _backward(self, arguments: Mapping[str, Any], step: Callable[[], Any]) -> Any:
        keys = {
            self._under_way.pop(id(tensor))[1]
            for tensor in _tensors(arguments["output_tensor"])
            if id(tensor) in self._under_way
        }
        if not keys:
            return step()
        ((chunk, number),) = keys
        with self._recorder.running(), self._recorder.step((chunk, number), _tensors(arguments["output_tensor_grad"])):
            gradients = step()
        self._ended[chunk] = self._ended.get(chunk, 0) + 1
        if self._ended[chunk] == self._num_microbatches:
            self._tell(chunk)
        return gradients

    def _tell(self, chunk: int) -> None:
        steps = [self._recorder.steps.pop((chunk, number)) for number in range(self._num_microbatches)]
        for line in text(compare(steps, unseen()), "micro-batches").splitlines():
            say(f"{_name(chunk)}: {line}" if line else _name(chunk), everywhere=True)


def _name(chunk: int) -> str:
    return f"terra: rank {dist.get_rank()}, chunk {chunk}"


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return a list of what Megatron passes as one tensor, a list of them, or None."""
    return [tensor for tensor in as_list(value) if isinstance(tensor, torch.Tensor)]
