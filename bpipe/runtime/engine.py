"""Run a rank's program: start every transfer where the schedule says, and check every operation against it.

In: a checked Schedule, this rank, a transport, and around each computation, or two that overlap and run at once, the
calls `before(op)`, `after(op)` and, once what it made is on its way, `sent(op)`. Out: the same computations, with
activations away in between. Knows no Megatron; whoever drives the pipeline loop makes the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from bpipe.runtime.capture import find
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.errors import RuntimeFault, TransferError
from bpipe.runtime.evictor import Evictor
from bpipe.runtime.graph_pieces import Pieces
from bpipe.runtime.meter import Meter
from bpipe.runtime.multi_host import SeveralHosts
from bpipe.runtime.partners import Partners
from bpipe.runtime.ranges import Ranges
from bpipe.runtime.recorder import Recorder
from bpipe.runtime.retention import Kept, Share
from bpipe.runtime.sizing import Sizing
from bpipe.runtime.streams import Streams, synchronize
from bpipe.schedule.action import READING, TRANSFER, Action, Kind
from bpipe.schedule.host_buffers import Residencies, Residency
from bpipe.schedule.schedule import Schedule, computed_together
from bpipe.schedule.steps import Step, one_by_one, steps
from bpipe.transport.base import Pending, Transport

# The names under which an engine's own time is taken: issuing each kind of transfer, and waiting for one.
WAITING = "bpipe-wait"
ISSUING = {kind: f"bpipe-{kind.name.lower()}" for kind in (Kind.EVICT, Kind.HOST, Kind.RETURN, Kind.LOAD)}
TIMERS = (*ISSUING.values(), WAITING)


class Engine:
    """One rank's program over real tensors, iteration after iteration."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport | Mapping[int, Transport] | None,
        config: EngineConfig,
        meter: Meter | None = None,
        streams: Streams | None = None,
    ) -> None:
        """`transport` is that to the rank's partner, or one to each rank that it sends to or hosts for, by rank;
        under its own rank one into its own node's memory. `streams` are those of other programs of this process,
        which never run beside this one; by default its own."""
        self.schedule = schedule
        self._rank = rank
        self._config = config
        self._meter = meter
        self.recorder: Recorder | None = None
        found = steps(schedule, rank)
        self._steps: tuple[Step, ...] = found if config.at_once else one_by_one(found)
        self._position = 0
        # The computation that has run and whose output nobody has said to be sent.
        self._unsent: Action | None = None
        # Whether the last iteration came to its end, if there was one.
        self.ended_well = True
        self._residencies = Residencies()
        self._leaving = {a.key for a in self._all_transfers() if a.kind is Kind.EVICT}
        self._unmeasured: Action | None = None
        self._ranges = Ranges(schedule.layout.slices)
        self._kept = Kept(config.transfers.minimum_bytes, config.allocated, config.shared)
        # By stage that leaves, what part of it does; known from the first iteration on.
        self.shares: Mapping[int, Share] = {}
        self._first_iteration = True
        self._streams = (streams or Streams(config.device)) if transport else None
        self._partners = Partners(schedule, rank, transport, config, self._streams, wait=self._wait, kept=self._kept)
        self._evictor, self._acceptor = self._partners.evictor, self._partners.acceptor
        # Dispatch by table, and the table is complete or the program does not start.
        self._start: dict[Kind, Callable[[Action, int], None]] = {}
        if self._evictor and self._acceptor:
            self._start = {
                Kind.EVICT: self._evictor.evict,
                Kind.LOAD: self._evictor.load,
                Kind.HOST: self._acceptor.host,
                Kind.RETURN: self._acceptor.give_back,
            }
            assert set(self._start) == TRANSFER

    def _all_transfers(self) -> Iterable[Action]:
        for step in self._steps:
            yield from step.before
            yield from step.after

    @property
    def moved_bytes(self) -> dict[int, int]:
        """Bytes of one micro-batch that leave, the largest, by stage; only stages that leave, once measured."""
        return dict(self._evictor.sizing.moved_bytes) if self._evictor else {}

    @property
    def most_bytes(self) -> dict[int, int]:
        """Bytes that would leave if there were room for them, by stage."""
        return dict(self._evictor.sizing.most_bytes) if self._evictor else {}

    @property
    def sizing(self) -> Sizing | None:
        """Sizes of what leaves, and what of the present or last iteration exceeded its buffers."""
        return self._evictor.sizing if self._evictor else None

    @property
    def hosted_bytes(self) -> Mapping[int, int]:
        """Bytes of one micro-batch that come here, by stage of other ranks; without those that other ranks move by
        themselves."""
        return self._acceptor.moved_bytes if self._acceptor else {}

    @property
    def num_host_buffers(self) -> int:
        """Number of host buffers preallocated here for others."""
        return self._acceptor.num_host_buffers if self._acceptor else 0

    @property
    def host_bytes(self) -> int:
        """Bytes preallocated for others."""
        return self._acceptor.host_buffer_bytes if self._acceptor else 0

    @property
    def lent_bytes(self) -> int:
        """Bytes of host buffers that other ranks reach into by themselves; a part of `host_bytes`."""
        return self._partners.lent_bytes

    @property
    def own_memory(self) -> tuple[int, int]:
        """How many host buffers are preallocated in its own node's memory, and their bytes."""
        return self._partners.own_memory

    # -- the calls
    # -----------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an iteration, before its first communication."""
        if self._position:
            raise RuntimeFault(
                f"{self._config.name}: a new iteration starts, but the previous one has not finished ({self._where()})"
            )
        self.ended_well = False
        self._partners.gather(next(step.compute for step in self._steps if step.compute))
        self._residencies = Residencies()
        if self._meter:
            self._meter.begin()
        if self.recorder:
            self.recorder.begin()
        if self._streams:
            self._streams.timed = self.recorder is not None
        if self._evictor:
            self._evictor.begin()
        self._start_after(self._steps[0])

    def before(self, op: Action, beside: Action | None = None) -> None:
        """Prepare for `op`, a computation that is about to run; its inputs from neighbours are there, or the loop waits
        for them next. `beside`: the backward that runs together with it."""
        step = self._expected(op, beside)
        if self._evictor:
            # What is evicted beside a computation or in a bubble is gone before the next computation, which takes its
            # memory; and not earlier: the loop has sent the last one's output meanwhile, and that would have waited
            # too.
            self._evictor.finish_evictions()
        self._transfers(step.before)
        if self._evictor:
            self._finish_loads(self._evictor, step)
        held = self._sample()
        if self.recorder:
            for each in step.computations:
                self.recorder.started(each, live_bytes=held)
        if self._evictor and step.overlapped is None and op.kind is Kind.FORWARD:
            # Beside a backward the allocator would count what that frees, too.
            self._kept.starts()
        self._ranges.begin(op, beside)

    def _expected(self, op: Action, beside: Action | None) -> Step:
        """Return the step that is next. Raises RuntimeFault where it is another one that runs."""
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

    def _finish_loads(self, evictor: Evictor | SeveralHosts, step: Step) -> None:
        for each in step.computations:
            if each.kind in READING:
                evictor.finish_load(each)
        if self._config.transfers.differing:
            evictor.computes()

    def after(
        self,
        op: Action,
        outputs: Sequence[torch.Tensor | None] = (),
        inputs: Sequence[torch.Tensor | None] = (),
        pieces: Pieces | None = None,
    ) -> None:
        """Continue after `op`, and what ran together with it, before anything else runs.

        For a forward, `outputs` are the stage's and `inputs` what the loop received; `pieces` is its graph, where that
        does not hang together behind the outputs.
        """
        self._ranges.end()
        step = self._steps[self._position]
        assert step.compute == op, f"after({op}) follows before({step.compute})"
        if op.kind is Kind.FORWARD:
            if self._evictor and step.overlapped is None:
                self._kept.ran(op.stage, op.microbatch, outputs, inputs)
            self._saved(op, outputs, inputs, pieces or Pieces(_roots_of(outputs)))
        # Nobody looks while two run at once: by the rule of memory both are held until they are over.
        most = None if step.overlapped is None else self._sample(look=False)
        if self._meter:
            for each in step.computations:
                self._measured(self._meter, each)
        held = self._sample()
        if self.recorder:
            self.recorder.computed(held, most)
        self._unsent = op

    def _measured(self, meter: Meter, op: Action) -> None:
        """Tell the meter what has run, but for a forward, of which it was told what that saved."""
        if op.kind in READING:
            if op.kind is Kind.BACKWARD_INPUT:
                meter.waiting(op, self._config.waiting(op))
            meter.touched(op)
        elif op.kind is Kind.SHARD_FORWARD:
            meter.shard_saved(op, self._config.between(op))
        elif op.kind is Kind.SHARD_BACKWARD:
            meter.shard_over(op)

    def sent(self, op: Action) -> None:
        """Start the transfers behind `op`, whose outputs are on their way.

        One of these may wait for an eviction, and that for the partner, who may wait for outputs of `op`. A loop that
        sends only when this returns (Megatron's) calls it at once: its schedules are judged by that.
        """
        assert self._unsent == op, f"sent({op}) follows after({self._unsent})"
        self._unsent = None
        step = self._steps[self._position]
        self._measure()
        self._start_after(step)

    def communicated(self) -> None:
        """Start the last transfers: the loop has sent its last message, and nothing has been asked of all ranks yet.

        The partner's ends come behind that message, so they wait until here. The partner needs its activations back
        before it can join what all ranks do, such as reducing gradients, so they do not wait longer. A loop without
        such a step leaves this to `end`.
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
        for role in (self._evictor, self._acceptor):
            if role is not None:
                role.end()
        if self._config.verifier is not None:
            self._config.verifier.end()
        if self._first_iteration:
            self._first_iteration = False
            self.shares = self._kept.shares(self.moved_bytes)
        self._position = 0
        self.ended_well = True

    def stop_measuring(self) -> None:
        """Stop measuring between two iterations: what the meter showed is enough."""
        self._meter = None

    def release(self) -> None:
        """Wait for the device and give the host buffers back: another program takes over, or the run is over.

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
        """Return this process and how far it is, for an error that came from elsewhere."""
        return f"{self._config.name}, {self._where()}"

    # -- inside
    # ------------------------------------------------------------------------------------------------------------------

    def _where(self) -> str:
        last = next((step.compute for step in reversed(self._steps[: self._position]) if step.compute), None)
        ahead = self._steps[self._position].compute if self._position < len(self._steps) else None
        return f"stage {self._rank}, after {last or 'the start'}" + (f", at {ahead}" if ahead else "")

    def _saved(
        self,
        op: Action,
        outputs: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor | None],
        pieces: Pieces,
    ) -> None:
        if self._meter:
            self._meter.saved(op, find(pieces.roots, inputs, self._config.device, pieces.held), inputs)
        if self._evictor is None:
            return
        if self._evictor.unmeasured(op.stage):
            self._unmeasured = op
        if self._unmeasured is op or op.key in self._leaving:
            self._evictor.remember(op, pieces.roots, inputs, outputs, pieces.held)

    def _measure(self) -> None:
        """Measure a stage's first forward at once: the partner may wait to hear of it, and this rank then waits for
        the partner."""
        forward, self._unmeasured = self._unmeasured, None
        if forward is not None and self._evictor is not None:
            self._evictor.measure(forward)
            if forward.key not in self._leaving:
                self._evictor.forget(forward)

    def _start_after(self, step: Step) -> None:
        self._transfers(step.after, in_bubbles=True)
        self._position += 1

    def _transfers(self, actions: Sequence[Action], in_bubbles: bool = False) -> None:
        for action in actions:
            if in_bubbles and action.kind is Kind.LOAD and self._evictor:
                # It takes the memory of what left beside the computation, or in a bubble before, and no computation
                # comes first.
                self._evictor.finish_evictions()
            residency = self._residencies.of(action)
            if self.recorder and self._partners.sees(action):
                self.recorder.started(action, self._partners.buffer_of[residency])
            self._begin_transfer(action, residency)
            if self._meter and action.kind in (Kind.EVICT, Kind.LOAD):
                self._meter.touched(action)
        if self._config.transfers.synchronous and self._evictor:
            self._evictor.finish_all()

    def _begin_transfer(self, action: Action, residency: Residency) -> None:
        try:
            with self._config.timed(ISSUING[action.kind]), self._ranges.of(action):
                if action.kind is Kind.HOST and self._acceptor:
                    self._acceptor.hear(action, self._partners.told_by[residency])
                self._start[action.kind](action, self._partners.buffer_of[residency])
        except (RuntimeFault, TransferError):
            raise
        except Exception as error:
            raise self._failure(action, "did not start", error) from error

    def _sample(self, look: bool = True) -> int | None:
        if self._meter is None:
            return None
        return self._meter.sample(self.num_host_buffers, self.host_bytes, look)

    def _wait(self, pending: Pending, action: Action, state: str) -> None:
        since = self.recorder.mark() if self.recorder else None
        try:
            with self._config.timed(WAITING):
                pending.wait()
        except Exception as error:
            raise self._failure(action, f"did not end (it was {state})", error) from error
        if self.recorder and since is not None:
            self.recorder.waited(action, since, pending)

    def _failure(self, action: Action, what: str, error: Exception) -> TransferError:
        return TransferError(
            f"{self._config.name}, stage {self._rank}: {action} with {self._partners.named(action)} {what}; the "
            f"time-out is {self._config.transfers.timeout_s:g} s, --bpipe-timeout: {error}"
        )


def _roots_of(outputs: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return where the graph behind a stage's outputs ends."""
    return [output.grad_fn for output in outputs if output is not None]


def _together(computations: Sequence[Action]) -> str:
    return " with ".join(map(str, computations))
