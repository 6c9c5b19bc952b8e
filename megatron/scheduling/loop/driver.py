"""Own an iteration: the engine of its program, the connections to whom it sends or hosts for, what is measured, and
what is written of it.

In: a configuration; for each iteration its program, and `begin`, `before`, `after`, `sent`, `communicated` and `end` as
an engine has them, from whoever runs the pipelined loop. Out: the same calls, made on the program's engine; lines in
the log, and measurements for a report. Knows neither who runs the loop nor how its operations are found out.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, built
from bpipe.config.features.queries import guarded
from bpipe.record.format import Iteration, RankSummary
from bpipe.record.report.memory import kept_peak, rule_by_slice
from bpipe.runtime.checksums import Certificate, Verifier
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import TIMERS, Engine
from bpipe.runtime.graph import Pieces
from bpipe.runtime.links import Closable, connect_pairs, disconnect
from bpipe.runtime.measurements import KeptBySlices, iteration_of, summary_of
from bpipe.runtime.meter import Meter
from bpipe.runtime.recorder import Recorder
from bpipe.runtime.retention import Share
from bpipe.runtime.streams import Clock, Streams, allocated_on
from bpipe.schedule.action import Action, Key, Kind
from bpipe.schedule.families.family import Family
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.memory import KeptMemory, Memory, moves_anything
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.transport.connect import Connection, MeasuredLink, OwnMemory
from bpipe.transport.one_sided import Transport
from megatron.scheduling.hooks import upstream
from megatron.scheduling.hooks.loop_config import OwnTime, streams_of_layers
from megatron.scheduling.loop.halves import Halves, Keep
from megatron.scheduling.loop.measurements import FirstMeasured
from megatron.scheduling.loop.pipelines import pipelines
from megatron.scheduling.loop.transfer_waits import refuse_standstill, without_p2p_sync
from megatron.scheduling.memory.slice_sizes import kept_at_peak, latest_by_place, most_by_place, moved_by_place
from megatron.scheduling.memory.split_backward import Waiting, Weighing
from megatron.scheduling.memory.varying_sizes import Differing
from megatron.scheduling.memory.watermark import Watermark
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.record.log import FirstIterations, pipeline_begins_with_rank_0, say, verified
from megatron.scheduling.record.schedule_lines import describe, grouped
from megatron.scheduling.slices.state import Slicing
from megatron.scheduling.start.refusals import differ, refuse

# In so many first iterations what moves is checked where anything is guarded, unless a flag says otherwise.
GUARDED_ITERATIONS = 2
Tensors = Sequence[torch.Tensor | None]
# Computations behind which a rank holds more.
_GROWING = (Kind.FORWARD, Kind.SHARD_FORWARD)


def _nothing(action: Action) -> Sequence[torch.UntypedStorage]:
    return ()


class Driver:
    """One rank's iterations, one after the other: an engine for each program, and the pairs' groups."""

    def __init__(self, config: SchedulingConfig, watermark: Watermark | None = None) -> None:
        """`watermark` is told whenever more is held than before, if a record is written."""
        self._config, self._transfers, self._watermark = config, config.transfers, watermark
        # What our own loop keeps of micro-batches besides their graphs.
        self.halves = Halves(Keep(config.keep_weights_halves))
        own = config.own
        self.slicing = None if own is None or own.slices == 1 else Slicing(own.slices, config.slice_lengths)
        self._between: Waiting = _nothing
        # How what runs is balanced; a budget that is learned changes it.
        self.balance = config.balance
        self._engines: dict[ScheduleConfig, Engine] = {}
        self._streams: Streams | None = None
        self._verifier: Verifier | None = None
        self._program: ScheduleConfig | None = None
        self._active: Engine | None = None
        self._at: Action | None = None
        # By the place of the other rank.
        self._connections: dict[int, Connection | OwnMemory] = {}
        self._further: list[Closable] = []
        self.links: list[MeasuredLink] = []
        self._learns = config.memory is not None and config.memory.learns
        # What is held is measured for whoever reads it: a report, Megatron's writers, or a budget to be learned.
        self._tells = config.report is not None or config.metrics_interval is not None
        self._meter = Meter(keeps_inputs=own is None) if self._tells or self._learns else None
        self._peaks: list[tuple[int, int]] = []
        self._most = 0, 0
        self._first_iterations = FirstIterations(config.transfers.minimum_bytes)
        self._differing = Differing()
        self._own_time = OwnTime()
        self._weighing: Weighing | None = None
        self._num_iterations = 0
        # Whether this iteration is the first of its program since another one's, as it is on every rank then.
        self.changed_over = False
        # The iteration under way, as Megatron counts them, and whether it is to be noted; the note of the last one.
        self._number, self._recording = 0, False
        self.recorded: Iteration | None = None

    # -- an iteration
    # --------------------------------------------------------------------------------------------------------------

    def program(
        self, family: Family, num_microbatches: int, group_size: int | None = None, exchange: Exchange | None = None
    ) -> ScheduleConfig:
        """Return this family's schedule over this run's ranks and chunks, balanced if the run is."""
        return ScheduleConfig(
            schedule=family.name,
            num_ranks=self._config.num_ranks,
            num_microbatches=num_microbatches,
            num_chunks=self._config.num_chunks,
            balance=self.balance,
            group_size=group_size,
            exchange=exchange,
        )

    @contextlib.contextmanager
    def iteration(self, program: ScheduleConfig, config: Any) -> Iterator[Schedule]:
        """Enter around one iteration's loop, which runs this schedule: it calls `begin` before its first communication
        and `end` after its last.

        `config` is Megatron's, of the model. Raises ValueError for what it says that cannot be balanced. Collective
        over the world in a program's first iteration, and wherever timers are printed.
        """
        if not self._engines:
            # What only the model's configuration says; the arguments were judged at the start, if there were any.
            upstream.require(config, "driver")
            upstream.say_absent(config, configuration=True)
        refuse(config, self._config.balance is not None, self._config.own is not None, self._config.strict)
        first = not self._engines
        engine = self._active = self._engine(program, config)
        if first and any(
            action.kind is Kind.BACKWARD_WEIGHT
            for slot in engine.schedule.ranks[self.rank]
            for action in slot.computations
        ):
            self._weighing = Weighing(self._waiting, self.device)
        recorder = engine.recorder = Recorder(Clock(self.device)) if self._recording else None
        begin_s = time.time()
        try:
            yield engine.schedule
        except Exception as error:
            error.add_note(f"bpipe: {engine.where()}")
            engine.abandon()
            raise
        finally:
            self._active = None
        self._ended(engine)
        self._print_timers(config.timers)
        if recorder is not None:
            self._keep(program, engine, recorder, begin_s)

    def _ended(self, engine: Engine) -> None:
        """Note what the iteration reached, and say what only its end shows."""
        if self._learns:
            # The CPU's stand-in has no counters and says 0.
            self._most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        if self._meter is not None:
            self._peaks.append((self._meter.peak_microbatches, self._meter.peak_bytes))
        self._differing.ended(engine, self.rank)
        self._first_iterations.ended(
            engine, self.rank, {place: one.link for place, one in self._connections.items() if one.link}
        )
        if self._verifier is not None and self._verifier.first_over and pipeline_begins_with_rank_0():
            for line in verified(self._verifier.certificate, engine, self.rank):
                say(line, everywhere=True)
        if self._weighing is not None and pipeline_begins_with_rank_0():
            for line in self._weighing.lines():
                say(line, everywhere=True)
        self._weighing = None

    @property
    def running(self) -> bool:
        """Whether an iteration is under way. Outside of one, as in evaluation, no call is for an engine."""
        return self._active is not None

    def begin(self, between: Waiting = _nothing) -> None:
        """Begin the engine's iteration. This and the other calls pass on to `Engine`.

        `between`: what whoever computes keeps of a shard of the vocabulary from S to T, by S.
        """
        self._between = between
        self._engine_now.begin()

    def before(self, op: Action, beside: Action | None = None) -> None:
        self._engine_now.before(op, beside)
        self._at = op

    def after(self, op: Action, outputs: Tensors = (), inputs: Tensors = (), pieces: Pieces | None = None) -> None:
        engine, self._at = self._engine_now, None
        engine.after(op, outputs, inputs, pieces)
        if self._weighing is not None:
            self._weighing.after(op, outputs, inputs)
        if op.kind in _GROWING and self._watermark is not None and self._meter is not None:
            self._watermark.saw(self._number, op, self._meter, engine, self.program_now)

    def sent(self, op: Action) -> None:
        self._engine_now.sent(op)

    def communicated(self) -> None:
        self._engine_now.communicated()

    def end(self) -> None:
        self._engine_now.end()

    @property
    def _engine_now(self) -> Engine:
        assert self._active is not None, "no iteration is under way"
        return self._active

    # -- set-up
    # ------------------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank in its schedule."""
        return self._config.positions.here()

    @property
    def differing(self) -> bool:
        """Whether micro-batches may differ in size; known from the first iteration on."""
        return self._transfers.differing

    @property
    def device(self) -> torch.device:
        return torch.device(torch.cuda.current_device())

    def _engine(self, program: ScheduleConfig, config: Any) -> Engine:
        """Return this program's engine, made at the first iteration that has it."""
        self.changed_over = self._program != program
        if self._program is not None and self.changed_over:
            # Every rank changes over at once, so the host buffers of one program are enough.
            self._engines[self._program].release()
        self._program = program
        engine = self._engines.get(program)
        if engine is None:
            schedule = built(program)
            for line in grouped(program, schedule):
                say(line)
            if self._config.balance:
                for line in () if self._engines else self._config.plan:
                    say(line)
                say(describe(schedule))
            differing = self._transfers.differing or differ(config)
            transfers = self._transfers = replace(self._transfers, differing=differing)
            transports = self._transports(schedule, config)
            refuse_standstill(schedule, program.passing, transfers, self.device, self.links)
            self._streams = self._streams or Streams(self.device)
            engine_config = self._engine_config(config, program)
            engine = Engine(schedule, self.rank, transports, engine_config, self._meter, self._streams)
            self._engines[program] = engine
        return engine

    def _engine_config(self, config: Any, program: ScheduleConfig) -> EngineConfig:
        name = f"rank {dist.get_rank()}"
        if self._verifier is None:
            self._verifier = self._make_verifier(name, config)
        return EngineConfig(
            name=name,
            device=self.device,
            transfers=self._transfers,
            parts={} if program.balance is None else program.balance.part_bytes,
            at_once=program.passing.is_megatron,
            allocated=allocated_on(self.device),
            waiting=self._waiting,
            between=lambda shard: self._between(shard),
            timed=self._own_time.of,
            shared=lambda storage: self.slicing is not None and self.slicing.keeps(storage),
            verifier=self._verifier,
            beside=functools.partial(streams_of_layers, config),
            links={place: one.link.transport for place, one in self._connections.items() if one.link},
        )

    def _make_verifier(self, name: str, config: Any) -> Verifier | None:
        """Return what checks the first iterations, where it was asked for or anything is guarded, which is said."""
        found = guarded(config, self._config.balance is not None, self._config.own is not None)
        names = dict.fromkeys([*self._config.guarded, *(one.name for one in found)])
        iterations = self._config.transfers.verify
        if iterations is None:
            iterations = GUARDED_ITERATIONS if names else 0
        if names:
            checked = f"in the first {iterations:g} iterations" if math.isfinite(iterations) else "in all iterations"
            say(
                f"guarded (see docs/supported.md): {', '.join(names)}. Moved activations are checked {checked} "
                "(--bpipe-verify); --bpipe-strict refuses such a run"
            )
        return Verifier(name, self.device, iterations) if iterations else None

    def _transports(self, schedule: Schedule, config: Any) -> dict[int, Transport]:
        """By place, to all with whom this program moves anything; who was connected for another program stays so."""
        if not moves_anything(schedule):
            return {}
        known = {link.ranks for link in self.links}
        ways = pipelines(self._config.positions)
        connections, found, table = connect_pairs(schedule, ways, self._transfers, self.device, known)
        self._connections |= connections
        if found:
            say(table)
        if not self.links:
            say(without_p2p_sync(config))
        self.links += found
        used = {frozenset(pair) for pair in links_of(schedule)}
        mine = {place: one for place, one in self._connections.items() if frozenset((self.rank, place)) in used}
        return {place: one.transport(differing=self.differing) for place, one in mine.items()}

    def add_connections(self, connections: Iterable[Closable]) -> None:
        """Close these too at the end of the training, after all that there were before."""
        self._further += connections

    def close(self, failed: bool) -> None:
        """End the training: give back what it has on this rank and on others."""
        engine = None if self._program is None else self._engines.get(self._program)
        reason = disconnect(engine, [*self._connections.values(), *self._further], failed)
        if reason is not None and not failed:
            say(f"memory that ranks lend to each other stays until this process ends: {reason}", everywhere=True)

    def _waiting(self, backward: Action) -> Sequence[torch.UntypedStorage]:
        return self.halves.storages(backward.key)

    # -- measuring
    # -----------------------------------------------------------------------------------------------------------------

    def _print_timers(self, timers: Any) -> None:
        """Megatron prints a fixed list of its own timers; ours come after the loop, as often.

        Collective over the world.
        """
        self._num_iterations += 1
        if timers is not None:
            self._own_time.tell(timers)
        interval = self._config.timers_interval
        if interval is not None and timers is not None and self._num_iterations % interval == 0:
            timers.log(list(TIMERS), normalizer=interval)

    def _keep(self, program: ScheduleConfig, engine: Engine, recorder: Recorder, begin_s: float) -> None:
        assert self._meter is not None
        noted = iteration_of(engine, self._meter, recorder, program, self._number, begin_s)
        # The CPU's stand-in has no counter and says 0.
        self.recorded = replace(noted, device_peak_bytes=torch.cuda.max_memory_allocated() or None)

    @property
    def reached(self) -> tuple[int, tuple[Share, ...]]:
        """Return the most bytes that the last iteration held, and the share of each stage that leaves."""
        assert self._meter is not None, "nobody measures"
        return self._meter.peak_bytes, tuple(self._engines[self.program_now].shares.values())

    @property
    def program_now(self) -> ScheduleConfig:
        """Configuration that ran last."""
        assert self._program is not None, "no iteration was run"
        return self._program

    @property
    def schedule(self) -> Schedule:
        """Schedule that ran last."""
        return self._engines[self.program_now].schedule

    def measured(self) -> FirstMeasured:
        """Return what the last iteration showed."""
        assert self._meter is not None, "nobody measures"
        meter, engine = self._meter, self._engines[self.program_now]
        # Of sizes that differ the most there was: rooms have to be that large.
        saved, moved = (
            (meter.saved_bytes, engine.most_bytes) if self.differing else (meter.latest_bytes, engine.moved_bytes)
        )
        kept: Mapping[int, KeptMemory] = {}
        peak, sizing, slicing = meter.peak_bytes, engine.sizing, self.slicing
        if slicing is not None:
            k, kept = slicing.number, slicing.kept_memory
            saved = (most_by_place if self.differing else latest_by_place)(meter.each_bytes, k)
            each = {} if sizing is None else sizing.moved_each
            moved = moved_by_place(moved, each, saved, k, self.differing)
            peak += kept_at_peak(engine.schedule, self.rank, saved, kept)
        sizes = (saved, moved, meter.after_input_bytes, meter.shard_bytes)
        parts = sizing.parts() if sizing is not None else {}
        return FirstMeasured(*sizes, meter.received_bytes, peak, *self._most, engine.lent_bytes, parts, kept)

    def learned(self, balance: BalanceConfig | None) -> None:
        """End measuring. From the next iteration on balance so, on every rank; None: as before."""
        self.balance, self._learns = balance or self.balance, False
        if not self._tells:
            self._meter = None
            for engine in self._engines.values():
                engine.stop_measuring()

    def note(self, iteration: int, recording: bool) -> None:
        """Say which iteration comes next, as Megatron counts them, and whether it is to be noted."""
        self._number, self._recording = iteration, recording

    def tell_nobody(self) -> None:
        """Measure, from the first iteration on, only what a budget is learned from: there are no writers to tell."""
        self._tells = False
        if not self._learns:
            self._meter = None

    def failed(self, error: Exception) -> None:
        """Write down what was held when a training step ended with this error."""
        if self._watermark is not None and self._meter is not None:
            engine = None if self._program is None else self._engines.get(self._program)
            self._watermark.failed(self._number, error, self._at, self._meter, engine, self._program)

    def stage_report(self, pipeline: int) -> RankSummary | None:
        """Return what this rank of this pipeline measured, beside the prediction; None where no iteration was
        trained."""
        if self._meter is None or self._program is None or not self._peaks:
            return None
        engine = self._engines[self._program]
        return summary_of(
            engine,
            self._meter,
            self.rank,
            rank=dist.get_rank(),
            pipeline=pipeline,
            balanced=self._config.balance is not None,
            peaks=self._peaks,
            differing=self._differing.sums,
            certificate=Certificate() if self._verifier is None else self._verifier.certificate,
            slices=None if self.slicing is None else self._kept_by_slices(engine, self.slicing),
        )

    def _kept_by_slices(self, engine: Engine, slicing: Slicing) -> KeptBySlices:
        predicted_bytes = kept_peak(engine.schedule, self.rank, slicing.kept_memory)
        return KeptBySlices(
            peak_bytes=slicing.peak_kept_bytes, predicted_bytes=predicted_bytes, memory=self._by_slice(engine)
        )

    def _by_slice(self, engine: Engine) -> Memory:
        """Return the rule for the slices of the last iteration, which may differ in size."""
        assert self._meter is not None
        saved = self._meter.each_bytes
        if engine.sizing is not None and engine.sizing.differing:
            moved: Mapping[Key, int] = engine.sizing.moved_each
        else:
            moved = {key: engine.moved_bytes.get(key[0], 0) for key in saved}
        shard = self._meter.shard_bytes
        return rule_by_slice(engine.schedule, saved, moved, self._meter.after_each_bytes, shard)
