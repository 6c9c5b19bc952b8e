"""What a rank measures of its memory in the first iteration, and a record of what it holds, written at once, so that
running out of memory in the first iteration leaves more than a traceback.

The record gets a line whenever more is held than ever before, which is once per forward of the first warm-up and rarely
later, and a line for the error that ends the training. It reads only the device's counters and waits for nothing.

Bytes by place are those of `bpipe.schedule.memory.Memory`: slice j of a stage of k slices is at place stage * k + j.
Without slices a place is a stage.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bpipe.balance.pairs import own_bytes
from bpipe.build import ScheduleConfig
from bpipe.record.format import MEMORY, MemoryHeader, MemoryMark, append, begin
from bpipe.runtime.engine import Engine
from bpipe.runtime.failures import cause_of, first_to_say
from bpipe.runtime.meter import Meter, largest_by
from bpipe.schedule.action import Action, Key
from bpipe.schedule.memory import KeptMemory, Memory, StageMemory
from bpipe.schedule.schedule import Schedule
from megatron.scheduling.options.arguments import SchedulingConfig

# By stage and number, which is a micro-batch's or a slice's.
ByNumber = Mapping[Key, int]
# The storages that whoever computes keeps from the first half of a backward to the second.
Waiting = Callable[[Action], Sequence[torch.UntypedStorage]]


@dataclass(frozen=True)
class FirstMeasured:
    """Measured memory of one rank in its first iteration.

    Attributes:
        saved_bytes: Saved by the forward of one micro-batch, by stage, or by place if micro-batches are cut into
            slices.
        moved_bytes: Moved of one micro-batch, likewise, of the stages that evicted.
        after_input_bytes: Held of one micro-batch between the halves of its backward, by stage.
        shard_bytes: Held of one micro-batch between S and T.
        received_bytes: Received for one micro-batch.
        peak_bytes: Held at most, host buffers included.
        allocated_bytes: Peak of the device's allocator until the loop's end, before weights were updated; 0 on a CPU.
        reserved_bytes: Peak of what the allocator reserved until then, likewise.
        lent_bytes: Host buffers outside of that allocator.
        parts: Parts that could move in place of all, by stage: `Sizing.parts`.
        kept: What each stage keeps of a micro-batch that is cut into slices.
    """

    saved_bytes: Mapping[int, int]
    moved_bytes: Mapping[int, int]
    after_input_bytes: Mapping[int, int]
    shard_bytes: int
    received_bytes: int
    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    lent_bytes: int = 0
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    kept: Mapping[int, KeptMemory] = field(default_factory=dict)


def latest_by_place(sizes: ByNumber, slices: int) -> dict[int, int]:
    """Return the bytes of the last of each place: the first may include storages that all share."""
    return {stage * slices + number % slices: nbytes for (stage, number), nbytes in sizes.items()}


def most_by_place(sizes: ByNumber, slices: int) -> dict[int, int]:
    """Return the most bytes of each place."""
    return largest_by((stage * slices + number % slices, nbytes) for (stage, number), nbytes in sizes.items())


def moved_by_place(
    by_stage: Mapping[int, int], sizes: ByNumber, saved: Mapping[int, int], slices: int, differing: bool
) -> dict[int, int]:
    """Return the moved bytes of each place of the stages that evicted.

    If slices differ, one that was not evicted is assumed to move the smallest share that another one of its stage did.
    """
    if not differing:
        return {stage * slices + part: nbytes for stage, nbytes in by_stage.items() for part in range(slices)}
    moved = most_by_place({key: nbytes for key, nbytes in sizes.items() if nbytes}, slices)
    for stage in by_stage:
        places = range(stage * slices, (stage + 1) * slices)
        shares = [moved[place] / saved[place] for place in places if place in moved and saved.get(place)]
        if shares:
            moved |= {
                place: int(min(shares) * saved[place]) for place in places if place in saved.keys() - moved.keys()
            }
    return moved


def kept_at_peak(schedule: Schedule, rank: int, saved: Mapping[int, int], kept: Mapping[int, KeptMemory]) -> int:
    """Return how many bytes of keys, values and gradients a rank holds when it holds most."""
    slices, nothing = schedule.layout.slices, KeptMemory(0, 0)
    places = range(schedule.num_stages * slices)
    sizes = tuple(StageMemory(saved.get(place, 0), saved.get(place, 0), saved.get(place, 0)) for place in places)
    of_stages = tuple(kept.get(stage, nothing) for stage in range(schedule.num_stages))
    alone, together = (
        max(own_bytes(schedule, rank, Memory(sizes, slices=slices, kept=keys)), default=0) for keys in ((), of_stages)
    )
    return together - alone


# An Adam keeps two moments of each parameter, in 32 bit; SGD one if it has a momentum.
_MOMENTS = {"Adam": 2, "AdamW": 2, "FusedAdam": 2, "CPUAdam": 2}
_MOMENT_BYTES = 4
# The loss keeps logits in 32 bit, or in the 16 bit they came in.
_LOGIT_BYTES = (4, 2)


@dataclass(frozen=True)
class Besides:
    """Bytes of one rank other than activations."""

    weights_bytes: int
    """Weights and buffers."""

    gradients_bytes: int
    """Gradients."""

    optimizer_bytes: int
    """State of the optimizer."""

    optimizer_to_come_bytes: int | None
    """What the optimizer allocates at its first step; None if unknown."""

    @property
    def now_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def held(model: Iterable[torch.nn.Module], optimizer: Any) -> Besides:
    """Return the weights and buffers, gradients, and optimizer state of this rank, each storage counted once."""
    chunks = list(model)
    # The torch optimizers that Megatron's, or a chain of these, wraps.
    chain = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    optimizers = [getattr(part, "optimizer", part) for part in chain]
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    weights = _storages([*parameters, *(buffer for chunk in chunks for _, buffer in chunk.named_buffers())])
    gradients = _storages(
        gradient for parameter in parameters for gradient in (parameter.grad, getattr(parameter, "main_grad", None))
    )
    state = _storages(tensor for part in optimizers for tensor in _state(part))
    return Besides(
        sum(weights.values()),
        sum(gradients[key] for key in gradients.keys() - weights.keys()),
        sum(state[key] for key in state.keys() - weights.keys() - gradients.keys()),
        _to_come(optimizers),
    )


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of each storage of those that are tensors, by its address."""
    storages = (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


def _parameters(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Return each parameter with its group."""
    return ((group, parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])


def _state(optimizer: Any) -> Iterator[Any]:
    yield from (parameter for _, parameter in _parameters(optimizer))
    for values in getattr(optimizer, "state", {}).values():
        yield from values.values()


def _to_come(optimizers: Iterable[Any]) -> int | None:
    """Return the bytes of the moments that the first update makes; None if unknown."""
    total = 0
    for optimizer in optimizers:
        for group, parameter in _parameters(optimizer):
            if optimizer.state.get(parameter):
                continue
            of_kind = _MOMENTS.get(type(optimizer).__name__)
            moments = int(bool(group["momentum"])) if "momentum" in group else of_kind
            if moments is None:
                return None
            total += moments * _MOMENT_BYTES * parameter.numel()
    return total


class Guard:
    """Writes the record, whose first error stops the recording instead of the training.

    Only a rank's own work may run here: if one rank stops, the others do not.
    """

    def __init__(self) -> None:
        self.open = True

    def run(self, act: Callable[[], None], place: Path | str) -> None:
        """Act, unless something failed before."""
        if not self.open:
            return
        try:
            act()
        except Exception as error:
            self.open = False
            # If a disk is full, it is full for many ranks: the first speaks for all.
            if first_to_say("recording"):
                os_error = error.strerror if isinstance(error, OSError) else None
                reason = os_error or f"{type(error).__name__}: {error}"
                print(
                    f"bpipe: rank {dist.get_rank()}: {place}: {reason}; recording stops on ranks with this error, "
                    "training continues",
                    flush=True,
                )


class Watermark:
    """This rank's file of its memory; each line is written at once."""

    def __init__(self, folder: Path, config: SchedulingConfig) -> None:
        self.folder = self._path = folder
        self._config = config
        # All that is written to this folder stops together.
        self.guard = Guard()
        self._most = -1

    def begin(self, run: str, pipeline: int, device: str, limit_bytes: int | None, besides: Besides) -> None:
        """Begin the file before the first iteration; what another run left is replaced."""
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
        """Note that a forward, or a shard's, has run."""
        if meter.peak_bytes > self._most:
            self._most = meter.peak_bytes
            self._append(meter, engine, program, iteration=iteration, action=str(action))

    def failed(
        self,
        iteration: int,
        error: BaseException,
        running: Action | None,
        meter: Meter,
        engine: Engine | None,
        program: ScheduleConfig | None,
    ) -> None:
        """Note that the training ends. `running` is None outside of the pipelined loop."""
        self._append(
            meter,
            engine,
            program,
            iteration=iteration,
            action=None if running is None else str(running),
            error=cause_of(error),
            out_of_memory=isinstance(error, torch.OutOfMemoryError),
        )

    def _append(self, meter: Meter, engine: Engine | None, program: ScheduleConfig | None, **event: Any) -> None:
        mark = MemoryMark(
            **event,
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
            # The CPU's stand-in has no counters and returns 0.
            allocated_bytes=torch.cuda.memory_allocated() or None,
            reserved_bytes=torch.cuda.memory_reserved() or None,
        )
        self.guard.run(lambda: append(self._path, mark), self._path)

    def _logits_bytes(self, meter: Meter) -> int:
        """Return the bytes of one micro-batch's logits on the last stage, which are recognised by their size."""
        count = self._config.logits_per_microbatch
        if count is None or not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return 0
        return next((count * width for width in _LOGIT_BYTES if meter.has_of_size(count * width)), 0)
