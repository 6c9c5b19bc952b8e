"""Note what this rank holds, from its first forward on, so that an out-of-memory in the first iteration leaves more
than a traceback.

In: the meter, and what the model and its optimizer hold. Out: this rank's file of its memory, as `bpipe.record.format`
defines it: a line whenever more was held than ever before, which is once a forward of the first warm-up and hardly ever
after, and a line for the error that ended the training. Looks at the device's own counters and waits for nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bpipe.build import ScheduleConfig
from bpipe.record.format import MEMORY, MemoryHeader, MemoryMark
from bpipe.record.write import append, begin
from bpipe.runtime.engine import Engine
from bpipe.runtime.failures import cause_of
from bpipe.runtime.meter import Meter
from bpipe.schedule.action import Action
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.record.guard import Guard

# An Adam keeps two moments of each parameter, in 32 bit; SGD one if it has a momentum.
_MOMENTS = {"Adam": 2, "AdamW": 2, "FusedAdam": 2, "CPUAdam": 2}
_MOMENT_BYTES = 4
# The loss keeps logits in 32 bit, or in the 16 bit they came in.
_LOGIT_BYTES = (4, 2)


@dataclass(frozen=True)
class Besides:
    """Bytes besides activations.

    `optimizer_to_come_bytes`: what the optimizer allocates at its first step; None where nobody knows.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    optimizer_to_come_bytes: int | None

    @property
    def now_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def held(model: Iterable[torch.nn.Module], optimizer: Any) -> Besides:
    """Return the weights and buffers, gradients, optimizer state of this rank, each storage once."""
    chunks, parts = list(model), _parts(optimizer)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    weights = _storages([*parameters, *(buffer for chunk in chunks for _, buffer in chunk.named_buffers())])
    gradients = _storages(
        one for parameter in parameters for one in (parameter.grad, getattr(parameter, "main_grad", None))
    )
    state = _storages(one for part in parts for one in _state(part))
    gradients_alone = gradients.keys() - weights.keys()
    state_alone = state.keys() - weights.keys() - gradients.keys()
    return Besides(
        sum(weights.values()),
        sum(gradients[key] for key in gradients_alone),
        sum(state[key] for key in state_alone),
        _to_come(parts),
    )


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of each storage, by its address; what is no tensor has none."""
    storages = (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


def _parts(optimizer: Any) -> list[Any]:
    """Return the torch optimizers that Megatron's, or a chain of these, wraps."""
    return [getattr(part, "optimizer", part) for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]]


def _parameters(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Return each parameter with its group."""
    return ((group, parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])


def _state(optimizer: Any) -> Iterator[Any]:
    yield from (parameter for _, parameter in _parameters(optimizer))
    for values in getattr(optimizer, "state", {}).values():
        yield from values.values()


def _to_come(optimizers: Iterable[Any]) -> int | None:
    """Return the bytes of the moments that the first update makes; None where that is not known."""
    total = 0
    for optimizer in optimizers:
        for group, parameter in _parameters(optimizer):
            moments = 0 if optimizer.state.get(parameter) else _moments(optimizer, group)
            if moments is None:
                return None
            total += moments * _MOMENT_BYTES * parameter.numel()
    return total


def _moments(inner: Any, group: Mapping[str, Any]) -> int | None:
    if "momentum" in group:
        return int(bool(group["momentum"]))
    return _MOMENTS.get(type(inner).__name__)


class Watermark:
    """This rank's file. Each line is written at once."""

    def __init__(self, folder: Path, config: SchedulingConfig) -> None:
        self.folder = self._path = folder
        self._config = config
        # Whoever else writes to this folder stops where this does.
        self.guard = Guard("recording")
        self._most = -1

    def begin(self, run: str, pipeline: int, device: str, limit_bytes: int | None, besides: Besides) -> None:
        """Begin the file before the first iteration, in place of what another run left."""
        self._path = MEMORY.path(self.folder, dist.get_rank())
        header = MemoryHeader(
            run=run,
            rank=dist.get_rank(),
            pipeline=pipeline,
            place=self._config.positions.here(),
            host=socket.gethostname(),
            device=device,
            limit_bytes=limit_bytes,
            micro_batch=self._config.micro_batch_size,
            **asdict(besides),
        )
        self.guard.run(lambda: begin(self._path, header), self._path)

    def saw(self, iteration: int, action: Action, meter: Meter, engine: Engine, program: ScheduleConfig) -> None:
        """Note that a forward, or a shard's, has run. Costs a comparison, unless more was held than ever before."""
        if meter.peak_bytes > self._most:
            self._most = meter.peak_bytes
            self._append(meter, engine, program, iteration=iteration, action=str(action))

    def failed(
        self,
        iteration: int,
        error: BaseException,
        at: Action | None,
        meter: Meter,
        engine: Engine | None,
        program: ScheduleConfig | None,
    ) -> None:
        """Note that the training ends here. `at` was running, or None outside of the pipelined loop."""
        self._append(
            meter,
            engine,
            program,
            iteration=iteration,
            action=None if at is None else str(at),
            error=cause_of(error),
            out_of_memory=isinstance(error, torch.OutOfMemoryError),
        )

    def _append(self, meter: Meter, engine: Engine | None, program: ScheduleConfig | None, **what: Any) -> None:
        mark = MemoryMark(
            **what,
            program=program,
            microbatches=tuple(
                (stage, microbatch, num_bytes) for (stage, microbatch), num_bytes in sorted(meter.held().items())
            ),
            saved_bytes=meter.saved_bytes,
            after_input_bytes=meter.after_input_bytes,
            moved_bytes={} if engine is None else engine.moved_bytes,
            received_bytes=meter.received_bytes,
            host_bytes=0 if engine is None else engine.host_bytes,
            logits_bytes=self._logits_bytes(meter),
            shard_bytes=meter.shard_bytes,
            in_shards_bytes=meter.in_shards_bytes,
            # The CPU's stand-in has no counters and says 0.
            allocated_bytes=torch.cuda.memory_allocated() or None,
            reserved_bytes=torch.cuda.memory_reserved() or None,
        )
        self.guard.run(lambda: append(self._path, mark), self._path)

    def _logits_bytes(self, meter: Meter) -> int:
        """Of one micro-batch, on the last stage; known by their size."""
        count = self._config.logits_per_microbatch
        if count is None or not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return 0
        return next((count * each for each in _LOGIT_BYTES if meter.has_of_size(count * each)), 0)
