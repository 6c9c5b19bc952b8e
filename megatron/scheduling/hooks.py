"""Drive the engine from Megatron's own pipelined loop: wrap the loop and the two steps it calls.

In: a configuration, and Megatron's calls. Out: the same calls, each with the engine's `before` and `after` around it. Megatron's loop
runs untouched, so whatever it does (communication, gradient overlap, timers, the rerun machine) it goes on doing; evaluation passes
through. Knows nothing of how activations are found or moved.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from bpipe.generate.families import default
from bpipe.ir.action import Action, Kind
from bpipe.ir.host_buffers import num_host_buffers
from bpipe.ir.memory import num_transfers, peak_counts
from bpipe.ir.schedule import Schedule
from bpipe.program import BalanceConfig, ScheduleConfig, build
from bpipe.runtime.engine import TIMERS, Engine, EngineConfig
from bpipe.runtime.meter import Meter
from bpipe.runtime.recorder import Recorder
from bpipe.runtime.streams import Clock, allocated_on
from bpipe.transport.base import Transport
from bpipe.transport.connect import Connection, MeasuredLink
from bpipe.transport.table import sufficiency
from megatron.scheduling import links, patches, upstream
from megatron.scheduling.arguments import SchedulingConfig
from megatron.scheduling.beside import OwnTime, no_barrier, told_before_finalizing
from megatron.scheduling.recording import Recorded
from megatron.scheduling.refusals import refuse
from megatron.scheduling.stage_report import StageReport
from megatron.scheduling.waiting import refuse_standstill
from megatron.scheduling.watermark import Watermark


class Hooks:
    """The wrappers, and what lives from one iteration to the next: an engine per number of micro-batches, and the pair's groups."""

    def __init__(self, config: SchedulingConfig) -> None:
        self._config = config
        self._engines: dict[int, Engine] = {}
        self._active: Engine | None = None
        self._meter = Meter() if config.report is not None else None
        self._connection: Connection | None = None
        self._connected = False
        self._forward_of: dict[int, Action] = {}
        self._last_num_microbatches = 0
        self._last_engine: Engine | None = None
        self._last_s: float | None = None
        self._judged = False
        self._told = False
        self._first_loop = True
        self._own_time = OwnTime()
        self._num_iterations = 0
        self._programs: dict[int, ScheduleConfig] = {}
        self.links: list[MeasuredLink] = []
        self.recording = False
        self.watermark: Watermark | None = None
        self._at: Action | None = None
        self.recorded: Recorded | None = None
        self._peaks: list[tuple[int, int, dict[int, int]]] = []

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """What to put in place of what."""
        return {
            patches.ONE_F_ONE_B: self._wrap_loop,
            patches.INTERLEAVED: self._wrap_loop,
            # With one stage there is nothing to balance, but this is to be said, and what is held can be measured: it is 1F1B of one stage.
            patches.NO_PIPELINING: self._wrap_loop,
            patches.FORWARD_STEP: self._wrap_forward,
            patches.BACKWARD_STEP: self._wrap_backward,
        }

    # -- wrappers ------------------------------------------------------------------------------------------------------------------

    def _wrap_loop(self, loop: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(loop)
        def run(**kwargs: Any) -> Any:
            if kwargs.get("forward_only"):
                return loop(**kwargs)
            model = _as_list(kwargs["model"])[0]
            # What only the model's configuration says; the arguments were judged at the start, if there were any.
            if not self._engines:
                for module in upstream.OF_CONFIGURATION:
                    upstream.require(get_model_config(model), module)
                upstream.say_absent(get_model_config(model), configuration=True)
            refuse(get_model_config(model), self._config.balance)
            engine = self._engine(kwargs["num_microbatches"], model)
            self._active = engine
            recorder = engine.recorder = Recorder(Clock(self._device)) if self.recording else None
            begin_s = time.time()
            try:
                with self._beside(engine, get_model_config(model)):
                    engine.begin()
                    result = loop(**kwargs)
                    engine.end()
            except Exception as error:
                error.add_note(f"bpipe: {engine.where()}")
                engine.abandon()
                raise
            finally:
                self._active = None
                self._forward_of.clear()
            self._measured(engine)
            self._print_timers(get_model_config(model).timers)
            if recorder is not None:
                self._keep(engine, recorder, begin_s)
            return result

        return run

    def _wrap_forward(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward_step)

        @functools.wraps(forward_step)
        def forward(*args: Any, **kwargs: Any) -> Any:
            engine = self._active
            if engine is None:
                return forward_step(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            stage = (given.get("vp_stage") or 0) * self._config.num_ranks + self._rank
            op = Action(stage, Kind.FORWARD, given["current_microbatch"])
            engine.before(op)
            self._at = op
            outputs, num_tokens = forward_step(*args, **kwargs)
            self._at = None
            tensors, inputs = _as_list(outputs), _as_list(given["input_tensor"])
            self._forward_of[id(tensors[0])] = op
            engine.after(op, tensors, inputs)
            if self.watermark is not None and self._meter is not None:
                self.watermark.saw(op, self._meter, engine, self._programs[engine.schedule.num_microbatches])
            return outputs, num_tokens

        return forward

    def _wrap_backward(self, backward_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward_step)
        def backward(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any) -> Any:
            engine = self._active
            if engine is None:
                return backward_step(input_tensor, output_tensor, output_tensor_grad, config)
            # Megatron does not say which micro-batch this is; the loop holds the very output its forward returned.
            forward = self._forward_of.pop(id(_as_list(output_tensor)[0]))
            op = Action(forward.stage, Kind.BACKWARD, forward.microbatch)
            engine.before(op)
            self._at = op
            gradient = backward_step(input_tensor, output_tensor, output_tensor_grad, config)
            self._at = None
            engine.after(op)
            return gradient

        return backward

    # -- set-up --------------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _beside(self, engine: Engine, config: Any) -> Iterator[None]:
        with no_barrier(config) if self._first_loop else contextlib.nullcontext(), told_before_finalizing(config, engine.communicated):
            yield

    @property
    def _device(self) -> torch.device:
        return torch.device(torch.cuda.current_device())

    @property
    def _rank(self) -> int:
        """This rank's place in its pipeline."""
        return int(parallel_state.get_pipeline_model_parallel_rank())

    def _engine(self, num_microbatches: int, model: torch.nn.Module) -> Engine:
        """The engine for this many micro-batches, made at the first iteration that has them."""
        self._first_loop = self._last_num_microbatches != num_microbatches
        if self._last_num_microbatches not in (0, num_microbatches):
            # Every rank changes over at once, so the host buffers of one program are enough.
            self._engines[self._last_num_microbatches].release()
        self._last_num_microbatches = num_microbatches
        engine = self._engines.get(num_microbatches)
        if engine is None:
            schedule = self._schedule(num_microbatches, get_model_config(model).microbatch_group_size_per_vp_stage)
            config = EngineConfig(
                name=f"rank {dist.get_rank()}",
                device=self._device,
                minimum_bytes=self._config.minimum_bytes,
                timeout_s=self._config.timeout_s,
                poison=self._config.poison,
                synchronous=self._config.synchronous,
                allocated=allocated_on(self._device),
                timed=self._own_time.of,
            )
            engine = Engine(schedule, self._rank, self._transport(schedule, config.device, model), config, self._meter)
            self._engines[num_microbatches] = engine
        return engine

    def _schedule(self, num_microbatches: int, group_size: int) -> Schedule:
        """`group_size` is Megatron's, which without chunks is there and means nothing."""
        interleaved = self._config.num_chunks > 1
        program = ScheduleConfig(
            schedule=default(self._config.num_chunks),
            num_ranks=self._config.num_ranks,
            num_microbatches=num_microbatches,
            num_chunks=self._config.num_chunks,
            balance=BalanceConfig() if self._config.balance else None,
            group_size=group_size if interleaved and group_size != self._config.num_ranks else None,
        )
        schedule = build(program)
        self._programs[num_microbatches] = program
        if self._config.balance:
            say(describe(schedule))
        return schedule

    def _transport(self, schedule: Schedule, device: torch.device, model: torch.nn.Module) -> Transport | None:
        if not moves_anything(schedule):
            return None
        if not self._connected:
            self._connection, self.links, table = links.connect_pairs(schedule, self._config.transport, self._config.timeout_s, device)
            self._connected = True
            say(table)
            say(without_p2p_sync(get_model_config(model)))
        refuse_standstill(schedule, self._config, device, self.links)
        return self._connection.transport() if self._connection is not None else None

    def close(self) -> None:
        """Training is over: end the threads that copy."""
        if self._connection is not None:
            self._connection.close()

    # -- measuring -----------------------------------------------------------------------------------------------------------------

    def _measured(self, engine: Engine) -> None:
        """An iteration's loop is over."""
        if self._meter is not None:
            self._peaks.append((self._meter.peak_microbatches, self._meter.peak_bytes, self._meter.saved_bytes))
        moved, now_s = sum(engine.moved_bytes.values()), time.perf_counter()
        if not self._told and pipeline_begins_with_rank_0():
            for stage in (stage for stage, nbytes in engine.moved_bytes.items() if not nbytes):
                say(nothing_moves(stage, self._config.minimum_bytes), everywhere=True)
            for share in (share for share in engine.shares.values() if share.moved_bytes):
                say(share.sentence, everywhere=True)
        self._told = True
        if self._last_s is not None and moved and engine is self._last_engine and not self._judged:
            # Two iterations of one program lie behind: the time between their ends is that of an iteration.
            self._judged = True
            schedule = engine.schedule
            window_s = (now_s - self._last_s) / (schedule.num_microbatches + (schedule.num_ranks - 1) / schedule.num_chunks)
            partner = schedule.partners[self._rank] if schedule.partners else self._rank
            assert self._connection is not None
            link = self._connection.link
            assert link is not None, "a connection is handed out with its link"
            enough, sentence = sufficiency(self._rank, partner, moved, window_s, link.bytes_per_s[link.transport])
            say(sentence, everywhere=not enough or pipeline_begins_with_rank_0())
        self._last_s, self._last_engine = now_s, engine

    def _print_timers(self, timers: Any) -> None:
        """Megatron prints a fixed list of its own timers; ours come after the loop, as often. Collective over the world."""
        self._num_iterations += 1
        if timers is not None:
            self._own_time.tell(timers)
        interval = self._config.timers_interval
        if interval is not None and timers is not None and self._num_iterations % interval == 0:
            timers.log(list(TIMERS), normalizer=interval)

    def _keep(self, engine: Engine, recorder: Recorder, begin_s: float) -> None:
        assert self._meter is not None
        rows, elapsed_s = recorder.rows(self._meter.saved_bytes, {**engine.hosted_bytes, **engine.moved_bytes})
        self.recorded = Recorded(
            program=self._programs[engine.schedule.num_microbatches],
            begin_s=begin_s,
            elapsed_s=elapsed_s,
            rows=rows,
            saved_bytes=self._meter.saved_bytes,
            moved_bytes=engine.moved_bytes,
            received_bytes=self._meter.received_bytes,
            host_bytes=engine.host_bytes,
            peak_bytes=self._meter.peak_bytes,
            shares=engine.shares,
        )

    def failed(self, error: Exception) -> None:
        """A training step ended with this error: write down what was held."""
        if self.watermark is not None and self._meter is not None:
            engine = self._engines.get(self._last_num_microbatches)
            self.watermark.failed(error, self._at, self._meter, engine, self._programs.get(self._last_num_microbatches))

    def stage_report(self, pipeline: int) -> StageReport | None:
        """What this rank of this pipeline measured, beside the prediction; None where no iteration was trained.

        The first iteration does not count when there are others: what micro-batches share is known only after two of them.
        """
        if self._meter is None or not self._peaks:
            return None
        engine = self._engines[self._last_num_microbatches]
        peaks = self._peaks[1:] or self._peaks
        return StageReport.of(
            engine.schedule,
            self._rank,
            peak_microbatches=max(peak[0] for peak in peaks),
            peak_bytes=max(peak[1] for peak in peaks),
            saved_bytes=peaks[-1][2],
            moved_bytes=engine.moved_bytes,
            received_bytes=self._meter.received_bytes,
            num_host_buffers=engine.num_host_buffers,
            host_bytes=engine.host_bytes,
            shares=engine.shares,
            balanced=self._config.balance,
            pipeline=pipeline,
        )


def _as_list(tensors: Any) -> list[Any]:
    return tensors if isinstance(tensors, list) else [tensors]


def pipeline_begins_with_rank_0() -> bool:
    """Whether this rank belongs to the pipeline that speaks for all."""
    return 0 in dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())


def moves_anything(schedule: Schedule) -> bool:
    """Whether any rank evicts."""
    return any(num_transfers(schedule, rank).evictions for rank in range(schedule.num_ranks))


def without_p2p_sync(config: Any) -> str:
    """Let Megatron no longer wait for the whole device after every message between stages, and say so: it would end all overlap.

    It does by default, and no flag changes that.
    """
    config.batch_p2p_sync = False
    return (
        "Megatron's wait for the whole device after every message between stages (batch_p2p_sync) is off in this run; to compare speed, "
        "give the run without --bpipe the same"
    )


def nothing_moves(stage: int, minimum_bytes: int) -> str:
    """One line for a stage whose activations were to leave, and are too small for it, or not its own."""
    return (
        f"stage {stage} moves nothing: of what a forward saves no storage of at least {minimum_bytes} bytes (--bpipe-min-bytes) is its "
        f"micro-batch's alone; training as usual"
    )


def describe(schedule: Schedule) -> str:
    """One line for the training log: what balancing does, or why it does nothing."""
    p, m = schedule.num_ranks, schedule.num_microbatches
    if not moves_anything(schedule):
        why = "with fewer than 4 stages there is nothing to balance" if p < 4 else "no stage holds more micro-batches than the bound"
        return f"{schedule.name}, {p} stage{'s' * (p > 1)}, {m} micro-batches: {why}; training as usual"
    evictors = [s for s in range(p) if num_transfers(schedule, s).evictions]
    pairs = ", ".join(
        f"{s} -> {schedule.partners[s] if schedule.partners else '?'} ({num_transfers(schedule, s).evictions} of {m}, "
        f"{num_host_buffers(schedule, schedule.partners[s] if schedule.partners else s)} host buffers)"
        for s in evictors
    )
    return f"{schedule.name}, {p} stages, {m} micro-batches: at most {max(peak_counts(schedule))} held; evicting {pairs}"


def say(line: str, everywhere: bool = False) -> None:
    """One line in the training log, from rank 0 or from the rank that calls."""
    if everywhere or dist.get_rank() == 0:
        print(f"bpipe: {line}", flush=True)
