"""One rank's iterations: the engine of each program, the connections to other ranks, measurements, and lines in the log.

Whoever runs the pipelined loop calls `begin`, `before`, `after`, `sent`, `communicated` and `end`, as an engine has them;
the driver passes the calls on to the program's engine. It does not know who runs the loop.
"""

import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.utils import get_comm_stream

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, built
from bpipe.config.features.queries import guarded
from bpipe.config.features.table import Settings
from bpipe.record.format import Iteration, RankSummary
from bpipe.record.report.memory import kept_peak, rule_by_slice
from bpipe.runtime import RuntimeFault
from bpipe.runtime.checksums import Certificate, Verifier
from bpipe.runtime.config import EngineConfig, refuse_standstill
from bpipe.runtime.engine import Engine
from bpipe.runtime.graph import Pieces
from bpipe.runtime.links import Closable, connect_pairs, disconnect
from bpipe.runtime.meter import Meter
from bpipe.runtime.recorder import Recorder
from bpipe.runtime.run_record import iteration_of, summary_of
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.family import Family
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.memory import KeptMemory, moves_anything
from bpipe.schedule.schedule import Schedule
from bpipe.transport.connect import Connection, MeasuredLink, OwnMemory
from bpipe.transport.cuda_runtime import is_capturing
from bpipe.transport.one_sided import Transport
from bpipe.transport.streams import Clock, Streams
from megatron.scheduling.hooks import upstream
from megatron.scheduling.loop import log, measurements
from megatron.scheduling.loop.halves import Halves
from megatron.scheduling.loop.log import Differing, FirstIterations, pipeline_begins_with_rank_0, say
from megatron.scheduling.loop.measurements import FirstMeasured, Waiting, Watermark
from megatron.scheduling.options.arguments import SchedulingConfig, differ, refuse
from megatron.scheduling.slices.stages import Slicing

# If anything is guarded, transfers are checked in this many first iterations, unless a flag says otherwise.
GUARDED_ITERATIONS = 2
Tensors = Sequence[torch.Tensor | None]


def _nothing(action: Action) -> Sequence[torch.UntypedStorage]:
    return ()


class Driver:
    """One rank's iterations."""

    def __init__(self, config: SchedulingConfig, watermark: Watermark | None = None) -> None:
        """`watermark` records whenever more is held than before."""
        self._config, self._transfers, self._watermark = config, config.transfers, watermark
        # What our own loop keeps of micro-batches besides their graphs.
        self.halves = Halves(defers=config.keep_weights_halves != "none")
        own = config.own
        self.slicing = None if own is None or own.slices == 1 else Slicing(own.slices, config.slice_lengths)
        self._between: Waiting = _nothing
        # A budget that is learned changes it.
        self.balance = config.balance
        self._engines: dict[ScheduleConfig, Engine] = {}
        self._streams: Streams | None = None
        self._verifier: Verifier | None = None
        self._program: ScheduleConfig | None = None
        self._active: Engine | None = None
        self._at: Action | None = None
        # By the position of the other rank.
        self._connections: dict[int, Connection | OwnMemory] = {}
        self._further: list[Closable] = []
        self.links: list[MeasuredLink] = []
        self._learns = config.memory is not None and config.memory.learns
        # Memory is measured for a report, or to learn a budget.
        self._meter = Meter(keeps_inputs=own is None) if config.report is not None or self._learns else None
        self._peaks: list[tuple[int, int]] = []
        self._most = 0, 0
        self._first_iterations = FirstIterations(config.transfers.minimum_bytes)
        self._differing = Differing()
        # Whether this is the first iteration after one of another program, as it then is on every rank.
        self.changed_over = False
        # The current iteration, as Megatron counts them, and whether it is recorded; the record of the last one.
        self._number, self._recording = 0, False
        self.recorded: Iteration | None = None

    def program(self, family: Family, num_microbatches: int, group_size: int | None = None) -> ScheduleConfig:
        """Return this family's schedule over this run's ranks and chunks, balanced if the run is."""
        return ScheduleConfig(
            schedule=family.name,
            num_ranks=self._config.num_ranks,
            num_microbatches=num_microbatches,
            num_chunks=self._config.num_chunks,
            balance=self.balance,
            group_size=group_size,
        )

    @contextlib.contextmanager
    def iteration(self, program: ScheduleConfig, config: Any) -> Iterator[Schedule]:
        """Enter around the loop of one iteration, which calls `begin` before its first communication and `end` after its
        last.

        `config` is Megatron's, of the model. Raises ValueError if it asks for what cannot be balanced. Collective over
        the world in a program's first iteration.
        """
        if not self._engines:
            # Settings that only the model's configuration has; the arguments were checked at the start.
            upstream.require(config)
            upstream.say_absent(config, configuration=True)
        refuse(config, self._config.balance is not None, self._config.own is not None, self._config.strict)
        engine = self._active = self._engine(program, config)
        engine.recorder = Recorder(Clock(self.device)) if self._recording else None
        begin_s = time.time()
        try:
            yield engine.schedule
        except Exception as error:
            error.add_note(f"bpipe: {engine.where()}")
            engine.abandon()
            raise
        finally:
            self._active = None
        if engine.is_captured:
            # Replays run without any of these calls.
            say(
                "this iteration is captured into a CUDA graph with its transfers. Replays of it are neither checked nor "
                "recorded"
            )
            return
        self._ended(engine)
        if engine.recorder is not None:
            assert self._meter is not None
            iteration = iteration_of(engine, self._meter, engine.recorder, program, self._number, begin_s)
            # The CPU's stand-in has no counter and returns 0.
            self.recorded = replace(iteration, device_peak_bytes=torch.cuda.max_memory_allocated() or None)

    def _ended(self, engine: Engine) -> None:
        """Note the peaks of an iteration, and print the lines of its end."""
        if self._learns:
            # The CPU's stand-in has no counters and returns 0.
            self._most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        if self._meter is not None:
            self._peaks.append((self._meter.peak_microbatches, self._meter.peak_bytes))
        self._differing.ended(engine, self.rank)
        links = {place: connection.link for place, connection in self._connections.items() if connection.link}
        self._first_iterations.ended(engine, self.rank, links)
        if self._verifier is not None and self._verifier.first_over and pipeline_begins_with_rank_0():
            for line in log.verified(self._verifier.certificate, engine, self.rank):
                say(line, everywhere=True)

    @property
    def running(self) -> bool:
        """Whether an iteration is running. Outside of one, as in evaluation, no call is for an engine."""
        return self._active is not None

    def begin(self, between: Waiting = _nothing) -> None:
        """Begin the engine's iteration.

        `between` returns the storages that are kept of a shard of the vocabulary from S to T, by S.
        """
        self._between = between
        self._engine_now.begin()

    def before(self, op: Action, beside: Action | None = None) -> None:
        self._engine_now.before(op, beside)
        self._at = op

    def after(self, op: Action, outputs: Tensors = (), inputs: Tensors = (), pieces: Pieces | None = None) -> None:
        engine, self._at = self._engine_now, None
        engine.after(op, outputs, inputs, pieces)
        grows = op.kind in (Kind.FORWARD, Kind.SHARD_FORWARD)
        if grows and self._watermark is not None and self._meter is not None:
            self._watermark.saw(self._number, op, self._meter, engine, self.program_now)

    def sent(self, op: Action) -> None:
        self._engine_now.sent(op)

    def communicated(self) -> None:
        self._engine_now.communicated()

    def end(self) -> None:
        self._engine_now.end()

    @property
    def _engine_now(self) -> Engine:
        assert self._active is not None, "no iteration is running"
        return self._active

    @property
    def rank(self) -> int:
        """This process's rank in its schedule."""
        return self._config.positions.here()

    @property
    def differing(self) -> bool:
        """Whether micro-batches may differ in size. Known from the first iteration on."""
        return self._transfers.differing

    @property
    def device(self) -> torch.device:
        return torch.device(torch.cuda.current_device())

    def _engine(self, program: ScheduleConfig, config: Any) -> Engine:
        """Return this program's engine, which is made at the first iteration that has it."""
        self.changed_over = self._program != program
        if self.changed_over and is_capturing(self.device):
            raise RuntimeFault(
                f"rank {dist.get_rank()}: a CUDA graph captures an iteration of {program.num_microbatches} micro-batches "
                "that has not run before: use --cuda-graph-warmup-steps 1 or more"
            )
        if self._program is not None and self.changed_over:
            # All ranks change programs at once, so host buffers for one program are enough.
            self._engines[self._program].release()
        self._program = program
        engine = self._engines.get(program)
        if engine is None:
            schedule = built(program)
            if self._config.balance:
                for line in () if self._engines else self._config.plan:
                    say(line)
                say(log.describe(schedule))
            transfers = self._transfers = replace(self._transfers, differing=self.differing or differ(config))
            transports = self._transports(schedule, config)
            refuse_standstill(schedule, program.passing, transfers, self.device, self.links)
            self._streams = self._streams or Streams(self.device)
            if self._verifier is None:
                self._verifier = self._make_verifier(config)
            engine_config = EngineConfig(
                name=f"rank {dist.get_rank()}",
                device=self.device,
                transfers=transfers,
                parts={} if program.balance is None else program.balance.part_bytes,
                at_once=program.passing.is_megatron,
                waiting=self._waiting,
                between=lambda shard: self._between(shard),
                shared=lambda storage: self.slicing is not None and self.slicing.kept.holds(storage),
                verifier=self._verifier,
                beside=functools.partial(_streams_of_layers, config),
                links={place: to.link.transport for place, to in self._connections.items() if to.link},
            )
            engine = Engine(schedule, self.rank, transports, engine_config, self._meter, self._streams)
            self._engines[program] = engine
        return engine

    def _make_verifier(self, config: Any) -> Verifier | None:
        """Return what checks the first iterations, if that is asked for or anything is guarded, which is printed."""
        features = guarded(config, self._config.balance is not None, self._config.own is not None)
        names = dict.fromkeys([*self._config.guarded, *(feature.name for feature in features)])
        iterations, settings = self._config.transfers.verify, Settings(config)
        if iterations is None:
            iterations = GUARDED_ITERATIONS if names else 0
            if settings.cuda_graph_impl == "full_iteration":
                iterations = min(iterations, settings.cuda_graph_warmup_steps)
        if names:
            checked = f"in the first {iterations:g} iterations" if math.isfinite(iterations) else "in all iterations"
            say(
                f"guarded (see docs/supported.md): {', '.join(names)}. Moved activations are checked {checked} "
                "(--bpipe-verify); --bpipe-strict refuses such a run"
            )
        return Verifier(f"rank {dist.get_rank()}", self.device, iterations) if iterations else None

    def _transports(self, schedule: Schedule, config: Any) -> dict[int, Transport]:
        """Return the transports to all ranks with which this program moves anything, by position.

        Connections of other programs stay.
        """
        if not moves_anything(schedule):
            return {}
        connected = {link.ranks for link in self.links}
        ways = self._config.positions.pipelines()
        connections, links, table = connect_pairs(schedule, ways, self._transfers, self.device, connected)
        self._connections |= connections
        if links:
            say(table)
        if not self.links:
            # By default Megatron waits for the whole device after every message, which would end all overlap, and has no
            # flag for it.
            config.batch_p2p_sync = False
            say(
                "batch_p2p_sync is off in this run: Megatron does not wait for the whole device after every message "
                "between stages; to compare speed, turn it off in the run without --bpipe too"
            )
        self.links += links
        used = {frozenset(pair) for pair in links_of(schedule)}
        return {
            place: connection.transport(differing=self.differing)
            for place, connection in self._connections.items()
            if frozenset((self.rank, place)) in used
        }

    def add_connections(self, connections: Iterable[Closable]) -> None:
        """Close these connections too at the end of the training, after all earlier ones."""
        self._further += connections

    def close(self, failed: bool) -> None:
        """End the training, and free its memory on this rank and on others."""
        engine = None if self._program is None else self._engines.get(self._program)
        reason = disconnect(engine, [*self._connections.values(), *self._further], failed)
        if reason is not None and not failed:
            say(f"memory that ranks lend to each other stays until this process ends: {reason}", everywhere=True)

    def _waiting(self, backward: Action) -> Sequence[torch.UntypedStorage]:
        return self.halves.storages(backward.key)

    @property
    def program_now(self) -> ScheduleConfig:
        """The configuration that ran last."""
        assert self._program is not None, "no iteration was run"
        return self._program

    @property
    def schedule(self) -> Schedule:
        """The schedule that ran last."""
        return self._engines[self.program_now].schedule

    def measured(self) -> FirstMeasured:
        """Return what the last iteration showed."""
        assert self._meter is not None, "nobody measures"
        meter, engine = self._meter, self._engines[self.program_now]
        kept: Mapping[int, KeptMemory] = {}
        peak, sizing, slicing = meter.peak_bytes, engine.sizing, self.slicing
        k = 1 if slicing is None else slicing.number
        # If sizes differ, the largest: host buffers have to be that large.
        by_place = measurements.most_by_place if self.differing else measurements.latest_by_place
        saved, moved = by_place(meter.each_bytes, k), engine.most_bytes if self.differing else engine.moved_bytes
        if slicing is not None:
            kept = slicing.kept.memory
            moved_each = {} if sizing is None else sizing.moved_each
            moved = measurements.moved_by_place(moved, moved_each, saved, k, self.differing)
            peak += measurements.kept_at_peak(engine.schedule, self.rank, saved, kept)
        return FirstMeasured(
            saved_bytes=saved,
            moved_bytes=moved,
            after_input_bytes=meter.after_input_bytes,
            shard_bytes=meter.shard_bytes,
            received_bytes=meter.received_bytes,
            peak_bytes=peak,
            allocated_bytes=self._most[0],
            reserved_bytes=self._most[1],
            lent_bytes=engine.lent_bytes,
            parts=sizing.parts() if sizing is not None else {},
            kept=kept,
        )

    def learned(self, balance: BalanceConfig | None) -> None:
        """Stop learning, and balance so from the next iteration on, on every rank; None: as before."""
        self.balance, self._learns = balance or self.balance, False
        if self._config.report is None:
            self._meter = None
            for engine in self._engines.values():
                engine.stop_measuring()

    def note(self, iteration: int, recording: bool) -> None:
        """Set the number of the next iteration, as Megatron counts them, and whether it is recorded."""
        self._number, self._recording, self.recorded = iteration, recording, None

    def failed(self, error: Exception) -> None:
        """Record what was held when a training step ended with this error."""
        if self._watermark is not None and self._meter is not None:
            engine = None if self._program is None else self._engines.get(self._program)
            self._watermark.failed(self._number, error, self._at, self._meter, engine, self._program)

    def stage_report(self, pipeline: int) -> RankSummary | None:
        """Return what this rank of this pipeline measured, with the prediction; None if no iteration was trained."""
        if self._meter is None or self._program is None or not self._peaks:
            return None
        engine = self._engines[self._program]
        slices: dict[str, Any] = {}
        if self.slicing is not None:
            # The slices of the last iteration, which may differ in size.
            meter, moved = self._meter, {key: engine.moved_bytes.get(key[0], 0) for key in self._meter.each_bytes}
            if engine.sizing is not None and engine.sizing.differing:
                moved = engine.sizing.moved_each
            rule = meter.each_bytes, moved, meter.after_each_bytes, meter.shard_bytes
            slices = {
                "slices": rule_by_slice(engine.schedule, *rule),
                "keys_bytes": self.slicing.kept.peak_bytes,
                "predicted_keys_bytes": kept_peak(engine.schedule, self.rank, self.slicing.kept.memory),
            }
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
            **slices,
        )


def _streams_of_layers(config: Any) -> Sequence[Any]:
    """Return the streams, other than the computation's, on which layers of this configuration save and read
    activations; a stream that has not been made yet is missing."""
    settings, streams = Settings(config), []
    if settings.moe_shared_expert_overlap:
        experts = sys.modules.get("megatron.core.transformer.moe.shared_experts")
        streams.append(None if experts is None else experts.SharedExpertMLP.stream)
    if settings.overlap_moe_expert_parallel_comm:
        streams.append(get_comm_stream())
    return [stream for stream in streams if stream is not None]
