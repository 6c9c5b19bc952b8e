"""Run a rank's program: start every transfer where the schedule says, and check every operation against it.

Whoever drives the pipeline loop calls `before(op)`, `after(op)` and, once the outputs are on their way, `sent(op)`
around each computation, or around two that overlap and run at once.
"""

from collections.abc import Mapping, Sequence

import torch

from bpipe.runtime import RuntimeFault, TransferError
from bpipe.runtime.capture import find
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.evictor import Sizing
from bpipe.runtime.graph import Pieces
from bpipe.runtime.meter import Meter
from bpipe.runtime.partners import LendingAcceptor, Partners
from bpipe.runtime.recorder import Ranges, Recorder
from bpipe.runtime.retention import Kept, Share
from bpipe.schedule.action import READING, Action, Kind
from bpipe.schedule.host_buffers import Residencies
from bpipe.schedule.program import Step, one_by_one, steps
from bpipe.schedule.schedule import Schedule, computed_together
from bpipe.transport.cuda_runtime import is_capturing
from bpipe.transport.one_sided import Transport
from bpipe.transport.streams import Pending, Streams, allocated_on, synchronize


class Engine:
    """One rank's program over real tensors, iteration after iteration.

    Args:
        schedule: A checked schedule.
        rank: This rank in it.
        transport: To the rank's partner, or by rank to each one that it evicts to or hosts for; under its own rank into
            its own node's memory.
        config: Settings.
        meter: Measures what is held.
        streams: Those of other programs of this process, which never run at the same time; by default its own.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport | Mapping[int, Transport] | None,
        config: EngineConfig,
        meter: Meter | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.schedule = schedule
        self._rank = rank
        self._config = config
        # The meter, and that of this iteration: none while it is captured.
        self._own_meter = self._meter = meter
        self.recorder: Recorder | None = None
        # Whether this iteration is captured into a CUDA graph. It runs as often as that is replayed, without this engine.
        self.is_captured = False
        program = tuple(steps(schedule, rank))
        self._steps: tuple[Step, ...] = program if config.at_once else one_by_one(program)
        self._position = 0
        # The computation that has run and for which `sent` was not called yet.
        self._unsent: Action | None = None
        # Whether the last iteration, if there was one, came to its end.
        self.ended_well = True
        self._residencies = Residencies()
        self._ranges = Ranges(schedule.layout.slices)
        self._kept = Kept(config.transfers.minimum_bytes, allocated_on(config.device), config.shared)
        # By stage that is evicted, what part of it leaves; known from the first iteration on.
        self.shares: Mapping[int, Share] = {}
        self._first_iteration = True
        self._streams = (streams or Streams(config.device)) if transport else None
        self._partners = Partners(schedule, rank, transport, config, self._streams, wait=self._wait, kept=self._kept)
        self._evictor = self._partners.evictor

    @property
    def moved_bytes(self) -> dict[int, int]:
        """Bytes that leave of the largest micro-batch, by stage; only stages that are evicted, once measured."""
        return dict(self._evictor.sizing.moved_bytes)

    @property
    def most_bytes(self) -> dict[int, int]:
        """Bytes that would leave if there were room for them, by stage."""
        return dict(self._evictor.sizing.most_bytes)

    @property
    def sizing(self) -> Sizing | None:
        """Sizes of what leaves, and what of the present or last iteration exceeded its buffers; None if nothing moves."""
        return self._evictor.sizing if self._streams else None

    @property
    def hosted_bytes(self) -> Mapping[int, int]:
        """Bytes of one micro-batch that come here, by stage of other ranks; without those that other ranks move by
        themselves."""
        return {stage: n for acceptor in self._partners.acceptors.values() for stage, n in acceptor.moved_bytes.items()}

    @property
    def num_host_buffers(self) -> int:
        """Number of host buffers preallocated here for others."""
        return sum(acceptor.num_host_buffers for acceptor in self._partners.acceptors.values())

    @property
    def host_bytes(self) -> int:
        """Bytes preallocated for others."""
        return sum(acceptor.host_buffer_bytes for acceptor in self._partners.acceptors.values())

    @property
    def lent_bytes(self) -> int:
        """Bytes of host buffers that other ranks reach into by themselves; a part of `host_bytes` that a device's
        allocator does not count."""
        lending = [acceptor for acceptor in self._partners.acceptors.values() if isinstance(acceptor, LendingAcceptor)]
        return sum(acceptor.host_buffer_bytes for acceptor in lending)

    @property
    def own_memory(self) -> tuple[int, int]:
        """Number of host buffers preallocated in its own node's memory, and their bytes."""
        return self._evictor.host_buffers(self._rank)

    # -- the calls
    # -----------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an iteration, before its first communication."""
        if self._position:
            raise RuntimeFault(
                f"{self._config.name}: a new iteration starts, but the previous one has not finished ({self._where()})"
            )
        self.ended_well = False
        self.is_captured = is_capturing(self._config.device)
        if self.is_captured:
            self._begin_capture()
        else:
            self._partners.gather(next(step.compute for step in self._steps if step.compute))
        self._meter = None if self.is_captured else self._own_meter
        if self._config.verifier is not None:
            self._config.verifier.is_captured = self.is_captured
        self._residencies = Residencies()
        if self._meter:
            self._meter.begin()
        if self.recorder:
            self.recorder.begin()
        if self._streams:
            self._streams.timed = self.recorder is not None
        self._evictor.begin()
        self._start_after(self._steps[0])

    def _begin_capture(self) -> None:
        """Leave out whatever needs the host while a graph runs: sizes and host buffers are known from an iteration before,
        and nothing is measured. Raises RuntimeFault if they are not."""
        if self._first_iteration or self._config.transfers.differing:
            why = (
                "micro-batches may differ in size, so their sizes are told in every iteration (--bpipe-differing-sizes)"
                if self._config.transfers.differing
                else "sizes of activations are learned in an iteration that is not captured: use "
                "--cuda-graph-warmup-steps 1 or more"
            )
            raise RuntimeFault(f"{self._config.name}: an iteration is captured into a CUDA graph, but {why}")
        self.recorder = None
        self._partners.forget_order()

    def before(self, op: Action, beside: Action | None = None) -> None:
        """Prepare for `op`, a computation that is about to run. Its inputs from neighbours are there, or the loop waits
        for them next. `beside`: the backward that runs together with it."""
        step = self._expected(op, beside)
        # What is evicted during a computation or in a bubble is gone before the next computation, which takes its
        # memory; and not earlier: the loop has sent the last one's output since, and that would have waited too.
        self._evictor.finish_evictions()
        self._transfers(step.before)
        for computation in step.computations:
            if computation.kind in READING:
                self._evictor.finish_load(computation)
        if self._config.transfers.differing:
            self._evictor.sizing.computes()
        held_bytes = self._sample()
        if self.recorder:
            for computation in step.computations:
                self.recorder.started(computation, live_bytes=held_bytes)
        if self._streams and step.overlapped is None and op.kind is Kind.FORWARD:
            # During a backward the allocator would count what that frees, too.
            self._kept.starts()
        self._ranges.begin(op, beside)

    def _expected(self, op: Action, beside: Action | None) -> Step:
        """Return the next step. Raises RuntimeFault if another one runs."""
        step = self._steps[self._position] if self._position < len(self._steps) else Step(None)
        if self._unsent is not None:
            raise RuntimeFault(
                f"{self._config.name}: {op} is about to run, but sent() was not called for the outputs of "
                f"{self._unsent}"
            )
        if step.compute != op or step.overlapped != beside:
            raise RuntimeFault(
                f"{self._config.name}: the program expects "
                f"{_together(step.computations) or 'the end of the iteration'}, but the pipeline loop runs "
                f"{_together(computed_together(op, beside))} ({self._where()}). The schedule {self.schedule.name} is "
                "not the one this loop runs"
            )
        return step

    def after(
        self,
        op: Action,
        outputs: Sequence[torch.Tensor | None] = (),
        inputs: Sequence[torch.Tensor | None] = (),
        pieces: Pieces | None = None,
    ) -> None:
        """Continue after `op`, and what ran together with it, before anything else runs.

        Args:
            op: The computation that has run.
            outputs: Of a forward, those of the stage.
            inputs: Of a forward, what the loop received for it.
            pieces: Of a forward, its graph if that is not connected to the outputs.
        """
        self._ranges.end()
        step = self._steps[self._position]
        assert step.compute == op, f"after({op}) follows before({step.compute})"
        if op.kind is Kind.FORWARD:
            if self._streams and step.overlapped is None:
                self._kept.ran(op.stage, op.microbatch, outputs, inputs)
            graph = pieces or Pieces([output.grad_fn for output in outputs if output is not None])
            if self._meter:
                self._meter.saved(op, find(graph.roots, inputs, self._config.device, graph.held), inputs)
            self._evictor.remember(op, graph, inputs, outputs)
        # Nothing is measured while two run at once: by the rule of memory both are held until they are over.
        most_bytes = None if step.overlapped is None else self._sample(look=False)
        if self._meter:
            for computation in step.computations:
                self._measured(self._meter, computation)
        held_bytes = self._sample()
        if self.recorder:
            self.recorder.computed(held_bytes, most_bytes)
        self._unsent = op

    def _measured(self, meter: Meter, op: Action) -> None:
        """Tell the meter what has run, except for a forward, whose storages it knows."""
        if op.kind in READING:
            if op.kind is Kind.BACKWARD_INPUT:
                meter.waiting(op, self._config.waiting(op))
            meter.touched(op)
        elif op.kind is Kind.SHARD_FORWARD:
            meter.shard_saved(op, self._config.between(op))
        elif op.kind is Kind.SHARD_BACKWARD:
            meter.shard_over(op)

    def sent(self, op: Action) -> None:
        """Start the transfers after `op`, whose outputs are on their way.

        One of these may wait for an eviction, and that for the partner, which may wait for outputs of `op`. A loop that
        sends only when this returns (Megatron's) calls it at once: the deadlock check of its schedules assumes that.
        """
        assert self._unsent == op, f"sent({op}) follows after({self._unsent})"
        self._unsent = None
        if op.kind is Kind.FORWARD:
            self._evictor.measure(op)
        self._start_after(self._steps[self._position])

    def communicated(self) -> None:
        """Start the last transfers: the loop has sent its last message, and no collective of all ranks has begun.

        The partner's ends come after that message, so these transfers wait until here. The partner needs its
        activations back before it can join what all ranks do, such as reducing gradients, so they do not wait longer. A
        loop without such a step leaves this to `end`.
        """
        left = len(self._steps) - 1 - self._position
        if left > 0:
            raise RuntimeFault(
                f"{self._config.name}: the pipeline loop ended before {self._steps[self._position].compute} "
                f"({self._where()})"
            )
        if left == 0:
            self._start_after(self._steps[-1])

    def end(self) -> None:
        """End the iteration."""
        self.communicated()
        self._partners.end()
        if self._config.verifier is not None:
            self._config.verifier.end()
        if self.is_captured:
            self._partners.forget_order()
        if self._first_iteration:
            self._first_iteration = False
            self.shares = self._kept.shares(self.moved_bytes)
        self._position = 0
        self.ended_well = True

    def stop_measuring(self) -> None:
        """Stop measuring, between two iterations."""
        self._own_meter = self._meter = None

    def release(self) -> None:
        """Wait for the device and give the host buffers back, because another program takes over or the run is over.

        Both ends of a transfer call this, and each waits for the other, no longer than the transports' time-out. The
        next `begin` measures anew.
        """
        synchronize(self._config.device)
        self._partners.release()

    def abandon(self) -> None:
        """Drop every reference after an error; the run is over."""
        self.ended_well = False
        self._ranges.end()
        self._partners.abandon()

    def where(self) -> str:
        """Return this process and how far it got, for an error that came from elsewhere."""
        return f"{self._config.name}, {self._where()}"

    # -- inside
    # ------------------------------------------------------------------------------------------------------------------

    def _where(self) -> str:
        last = next((step.compute for step in reversed(self._steps[: self._position]) if step.compute), None)
        current = self._steps[self._position].compute if self._position < len(self._steps) else None
        return f"stage {self._rank}, after {last or 'the start'}" + (f", at {current}" if current else "")

    def _start_after(self, step: Step) -> None:
        self._transfers(step.after, in_bubbles=True)
        self._position += 1

    def _transfers(self, actions: Sequence[Action], in_bubbles: bool = False) -> None:
        for action in actions:
            if in_bubbles and action.kind is Kind.LOAD:
                # It takes the memory of what left during the computation, or in a bubble before, and no computation
                # comes first.
                self._evictor.finish_evictions()
            residency = self._residencies.of(action)
            if self.recorder and self._partners.sees(action):
                self.recorder.started(action, self._partners.buffer_of[residency])
            try:
                with self._ranges.of(action):
                    self._partners.start(action, residency)
            except (RuntimeFault, TransferError):
                raise
            except Exception as error:
                raise self._failure(action, "did not start", error) from error
            if self._meter and action.kind in (Kind.EVICT, Kind.LOAD):
                self._meter.touched(action)
        if self._config.transfers.synchronous:
            self._evictor.finish_all()

    def _sample(self, look: bool = True) -> int | None:
        if self._meter is None:
            return None
        return self._meter.sample(self.num_host_buffers, self.host_bytes, look)

    def _wait(self, pending: Pending, action: Action, state: str) -> None:
        since = self.recorder.mark() if self.recorder else None
        try:
            pending.wait()
        except Exception as error:
            raise self._failure(action, f"did not end (it was {state})", error) from error
        if self.recorder and since is not None:
            self.recorder.waited(action, since, pending)

    def _failure(self, action: Action, outcome: str, error: Exception) -> TransferError:
        return TransferError(
            f"{self._config.name}, stage {self._rank}: {action} with {self._partners.named(action)} {outcome}; the "
            f"time-out is {self._config.transfers.timeout_s:g} s, --bpipe-timeout: {error}"
        )


def _together(computations: Sequence[Action]) -> str:
    return " with ".join(map(str, computations))
