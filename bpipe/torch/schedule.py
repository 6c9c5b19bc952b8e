"""A memory-balanced schedule for `torch.distributed.pipelining`, used like torch's own schedules.

Torch's runtime runs it, and the engine, called around every computation, moves activations.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.plan.budget import Fit, plan_lines
from bpipe.runtime.checksums import Verifier
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.links import connect_pairs, disconnect
from bpipe.runtime.meter import Meter
from bpipe.schedule.action import Action
from bpipe.schedule.families.families import default_family
from bpipe.schedule.files.text import write_csv
from bpipe.schedule.memory import moves_anything
from bpipe.schedule.schedule import Schedule
from bpipe.torch.calls import ReceiveBuffers, StepCalls
from bpipe.torch.memory_budget import Memory, RankBudgets, everywhere, weigh
from bpipe.torch.orders import (
    KIND_OF,
    Source,
    config_of,
    refuse_other_places,
    refuse_split_recomputation,
    refuse_standstill,
    refuse_unrunnable,
    torch_orders,
    why_unmoved,
)
from bpipe.torch.record import StepRecord
from bpipe.torch.upstream import (
    Computation,
    Runtime,
    SingleStage,
    ran_forward,
    receive_zeros,
    refuse_compiled,
    refuse_sends_to_itself,
    require_attributes,
)
from bpipe.transport.config import FIELD_OF_FLAG, TransferConfig
from bpipe.transport.connect import Connection, MeasuredLink, OwnMemory
from bpipe.transport.cuda_runtime import is_capturing
from bpipe.transport.distributed import gathered
from bpipe.transport.one_sided import Transport

logger = logging.getLogger(__name__)

_COMPUTATIONS = (*KIND_OF.values(), Computation.OVERLAP_F_B)
_DEFAULT = default_family(1)
# By a flag of a training with Megatron, which errors of the engine and the transports name: the option here.
ARGUMENTS = {
    "--bpipe-bound": "bounds of BalanceConfig",
    "--bpipe-hosts": "hosts of BalanceConfig",
    "--bpipe-memory": "memory",
    **{flag: f"{name} of TransferConfig" for flag, name in FIELD_OF_FLAG.items()},
}


def name_arguments(error: BaseException) -> None:
    """Add a note to an error that names flags, with the options of `BalancedSchedule`."""
    text = str(error)
    options = [f"{flag} is {argument}" for flag, argument in ARGUMENTS.items() if flag in text]
    if options:
        error.add_note(f"bpipe: under torch.distributed.pipelining {', '.join(options)}")


def _refuse_other_messages(torch_options: dict[str, Any]) -> None:
    if torch_options.pop("defer_pp_recv", False):
        raise ValueError(
            "defer_pp_recv receives as late as possible, and in that order pipelines deadlock even without "
            "balancing: leave it out"
        )
    if torch_options.get("max_outstanding_sends") is not None:
        raise ValueError(
            f"max_outstanding_sends={torch_options['max_outstanding_sends']} makes ranks wait for sends, which bpipe does "
            "not consider where it looks for deadlocks: leave it out"
        )


Connections = dict[int, Connection | OwnMemory]
Pipelines = list[tuple[int, ...]]


def connected(
    group: Any, schedule: Schedule, transfers: TransferConfig, device: torch.device
) -> tuple[Connections, list[MeasuredLink], str, Pipelines]:
    """Connect the pairs of this schedule. Collective over the world if anything moves, without a message otherwise.

    Returns this rank's connections by the other's position in the pipeline; every pair's link; a table of them for the
    log; and the global ranks of every pipeline, by position, empty if nothing moves. Raises ValueError if a pair has no
    transport on this device or ranks have other schedules, and RuntimeError if a pair has no transport.
    """
    if not moves_anything(schedule):
        return {}, [], "", []
    pipelines = pipelines_of(group, schedule)
    return *connect_pairs(schedule, pipelines, transfers, device), pipelines


def pipelines_of(group: Any, schedule: Schedule) -> Pipelines:
    """Return the global ranks of every pipeline of the world, by position. Collective over the world.

    `group` is that of the stages, None for the whole world. Raises ValueError on every rank if not all run this
    schedule.
    """
    own = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    text = hashlib.sha256(write_csv(schedule).encode()).hexdigest()
    everyone = gathered((own, text))
    others = [rank for rank, (_, other) in enumerate(everyone) if other != everyone[0][1]]
    if others:
        raise ValueError(
            f"ranks {', '.join(map(str, others))} made a different schedule from rank 0: give every rank of the "
            "world the same micro-batches, schedule and balance"
        )
    return sorted({ranks for ranks, _ in everyone})


class BalancedSchedule(Runtime):  # type: ignore[misc]
    """A schedule, torch's or ours, balanced, under torch's own runtime.

    `step`, `eval`, targets, losses and keywords are those of torch's schedules. After the last step call `close`, or use
    the schedule as a context manager: until then ranks lend memory to each other.

    Attributes:
        config: The configuration of the schedule.
        schedule: The schedule that runs.
        plan: Of a memory budget, from the first step on; before that the schedule moves nothing.
        engine: Moves activations.
        links: Measured links of all pairs.
        meter: Measures what is held, if that is wanted.
        verifier: Checks what moves, if that is wanted.
        buffers: Torch's buffers for what it receives, if they are lean.
    """

    def __init__(
        self,
        stages: Any,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        schedule: Source = _DEFAULT,
        balance: BalanceConfig | None = BalanceConfig(),
        memory: Memory | None = None,
        group_size: int | None = None,
        transfers: TransferConfig = TransferConfig(),
        lean_buffers: bool = True,
        meter: Meter | None = None,
        report: str | Path | None = None,
        report_steps: tuple[int, int] = (3, 5),
        **torch_options: Any,
    ) -> None:
        """Build the schedule and connect its pairs. Collective over the world if anything moves.

        Args:
            stages: This rank's stages, one or a list.
            n_microbatches: Micro-batches of a step.
            loss_fn: As torch's schedules take it.
            schedule: A family that `bpipe schedule` lists, one of torch's names or classes, a file of
                `bpipe schedule --format csv`, or a Schedule.
            balance: How activations move, None if none do.
            memory: Instead of bounds: bytes, or GiB as text, that each rank's micro-batches and host buffers may take.
                Stages are measured before the first step, by forwards of their own, and as little as possible moves.
            group_size: Micro-batches of a group, for schedules that have groups.
            transfers: How activations travel, and in how many steps that is checked.
            lean_buffers: Whether what torch receives takes memory only while it is needed.
            meter: Measures what is held.
            report: A folder for `bpipe report`.
            report_steps: The first and the last step to record there.
            **torch_options: Options of torch's schedules: `scale_grads`, `args_chunk_spec`, `kwargs_chunk_spec`,
                `output_merge_spec`, `backward_requires_autograd`.

        Raises:
            ValueError: The schedule cannot be built, or torch's runtime cannot run it.
        """
        stages = list(stages) if isinstance(stages, (list, tuple)) else [stages]
        _refuse_other_messages(torch_options)
        self.config = config_of(schedule, stages, n_microbatches, balance, group_size)
        self.plan: Fit | None = None
        self._budget: RankBudgets | None = None
        if memory is not None:
            self.config = replace(self.config, balance=None)
            self._budget = RankBudgets.of(memory, build(self.config), balance, transfers.differing)
        self.schedule = build(self.config)
        refuse_unrunnable(self.schedule)
        refuse_other_places(self.schedule, stages)
        device = torch.device(stages[0].device)
        if device.type == "cpu":
            # There is one CPU, whatever index a mesh gives it.
            device = torch.device("cpu")
        refuse_sends_to_itself(stages, device)
        # Stages with split backwards whose graph has not been checked yet.
        self._unseen_split = set(self.schedule.split_stages)
        if self._unseen_split:
            refuse_compiled(stages, self.schedule.name)
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, **torch_options)
        self.meter = Meter(keeps_inputs=False) if meter is None and report is not None else meter
        own = {stage.stage_index for stage in stages}
        self.buffers = ReceiveBuffers(stages, own.__contains__) if lean_buffers else None
        self._calls: StepCalls | None = None
        name = f"rank {dist.get_rank()}"
        self.verifier = Verifier(name, device, transfers.verify) if transfers.verify else None
        self._report_to = report, report_steps
        self._engine_config = EngineConfig(
            name=name,
            device=device,
            transfers=transfers,
            waiting=self._between_halves,
            verifier=self.verifier,
        )
        self._report: StepRecord | None = None
        self._is_closed = self._has_run = False
        self._adopt(self.config, final=self._budget is None)

    def _adopt(self, config: ScheduleConfig, final: bool) -> None:
        """Run this schedule from now on, and connect its pairs; record it if it is `final`."""
        self.config, self.schedule = config, build(config)
        self.pipeline_order = torch_orders(self.schedule)
        self._prepare_schedule_with_comms(self.pipeline_order)
        require_attributes(self, self._stages)
        settings, group = self._engine_config, self._stages[0].group
        transfers = settings.transfers
        try:
            self._connections, self.links, table, pipelines = connected(
                group, self.schedule, transfers, settings.device
            )
            if table:
                logger.info("bpipe: %s", table)
            refuse_standstill(self.schedule, self.pipeline_order_with_comms, transfers, settings.device, self.links)
        except (ValueError, RuntimeError) as error:
            name_arguments(error)
            raise
        settings = replace(settings, parts={} if config.balance is None else config.balance.part_bytes)
        transports: dict[int, Transport] = {
            place: connection.transport(differing=transfers.differing)
            for place, connection in self._connections.items()
        }
        self.engine = Engine(self.schedule, self.rank, transports, settings, self.meter)
        folder, steps = self._report_to
        if final and folder is not None:
            pipelines = pipelines or pipelines_of(group, self.schedule)
            self._report = StepRecord(folder, steps, self.config, pipelines, self._stages, settings.device)

    @classmethod
    def of(cls, other: Any, **options: Any) -> BalancedSchedule:
        """Return a balanced schedule with the stages, loss, micro-batches and options of one of torch's schedules.

        `options` are those of `BalancedSchedule`. The schedule is by default "1f1b" for one stage per rank and
        "interleaved-1f1b" for several.
        """
        stages = [other._stage] if isinstance(other, SingleStage) else other._stages
        torch_options = {
            "scale_grads": other.scale_grads,
            "args_chunk_spec": other._args_chunk_spec,
            "kwargs_chunk_spec": other._kwargs_chunk_spec,
            "output_merge_spec": other._output_merge_spec,
        }
        options = {"schedule": default_family(len(stages)), **torch_options, **options}
        return cls(stages, other._n_microbatches, other._loss_fn, **options)

    def register_custom_function(self, computation_type: Any, custom_function: Any) -> None:
        """Let torch call a function instead of one of its own actions.

        Raises ValueError for computations: the engine is called around torch's own.
        """
        if computation_type in _COMPUTATIONS:
            raise ValueError(
                f"a custom function for {computation_type.name} computes where bpipe cannot see it: use torch's own "
                f"schedules with it, or leave it out"
            )
        super().register_custom_function(computation_type, custom_function)

    def close(self, *, failed: bool = False) -> None:
        """Give back what the schedule has on this rank and on others: host buffers, process groups and threads.

        All ranks call it after the last step. No step can follow. A second call does nothing.

        Args:
            failed: Whether the training failed other than in a step. Then no rank is waited for, and memory that ranks
                lend to each other stays until the process ends.
        """
        if self._is_closed:
            return
        self._is_closed = True
        reason = disconnect(self.engine, self._connections.values(), failed)
        if reason is not None and not failed:
            logger.warning("bpipe: memory that ranks lend to each other stays until this process ends: %s", reason)

    def __enter__(self) -> BalancedSchedule:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(failed=kind is not None)

    # -- a step of torch's runtime
    # -----------------------------------------------------------------------------------------------------------------

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._has_backward and torch.is_grad_enabled()):
            return super()._step_microbatches(*args, **kwargs)
        if self._is_closed:
            raise RuntimeError("this BalancedSchedule is closed: call close() after the last step, or make a new one")
        if self._budget is not None and self.plan is None:
            self._plan(self._budget, *args, **kwargs)
        recorded: AbstractContextManager[None] = nullcontext()
        if self._report is not None and self.meter is not None and not is_capturing(self._engine_config.device):
            recorded = self._report.step(self.engine, self.meter, self.links, self.verifier)
        with recorded, self._called():
            result = super()._step_microbatches(*args, **kwargs)
            self.engine.end()
        if not self._has_run:
            self._has_run = True
            minimum_bytes = self._engine_config.transfers.minimum_bytes
            if reason := why_unmoved(self.schedule, self.rank, self.engine.moved_bytes, minimum_bytes):
                logger.warning("bpipe: %s", reason)
        return result

    def _plan(self, budget: RankBudgets, *args: Any, **kwargs: Any) -> None:
        """Measure the stages with the first micro-batch of a step that is about to run, and balance within the budget.

        Collective over the world. Raises ValueError if no plan keeps it.
        """
        arguments = inspect.signature(Runtime._step_microbatches).bind(self, *args, **kwargs).arguments
        targets, loss_kwargs = arguments.get("target_mbs"), arguments.get("loss_kwargs")
        first = (arguments.get("arg_mbs") or [()])[0], (arguments.get("kwarg_mbs") or [{}])[0]
        # Keywords that later versions of torch have.
        more = {"target": targets[0] if targets else None, "loss_kwargs": loss_kwargs}
        parameters = inspect.signature(Runtime._initialize_stages).parameters
        super()._initialize_stages(*first, **{name: more[name] for name in more if name in parameters})

        def forward(stage: Any, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            here = {int(other.stage_index): other for other in self._stages}
            if not stage.is_first and stage.stage_index - 1 not in here:
                # No rank sends anything for this forward.
                receive_zeros(stage, microbatch)
            output = stage.forward_one_chunk(microbatch, *first)
            self._maybe_compute_loss(stage, output, targets, microbatch, *([loss_kwargs] if loss_kwargs else []))
            if (following := here.get(stage.stage_index + 1)) is not None:
                following.set_local_fwd_input(output, microbatch)
            return self._ran(stage, microbatch)

        settings = self._engine_config
        sizes = weigh(self._stages, self._n_microbatches, forward, settings.device, settings.transfers.minimum_bytes)
        self._internal_losses.clear()
        self.plan = budget.plan(self.schedule, everywhere(sizes))
        for line in plan_lines(self.plan, "as measured,"):
            logger.info("bpipe: %s", line)
        self._adopt(replace(self.config, balance=self.plan.how), final=True)

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Have the engine called during one step."""
        order, buffers = self.pipeline_order_with_comms, self.buffers
        actions = order[self.rank]
        calls = self._calls = StepCalls(
            self.engine, actions, *(() if buffers is None else (buffers.receives, buffers.used))
        )
        order[self.rank] = calls.watched()
        try:
            with calls.around(self._stages):
                yield
            if buffers is not None:
                buffers.end()
        except Exception as error:
            name_arguments(error)
            if calls.begun:
                error.add_note(f"bpipe: {self.engine.where()}")
                self.engine.abandon()
            raise
        finally:
            order[self.rank] = actions
            self._calls = None

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        super()._initialize_stages(*args, **kwargs)
        if self._calls is not None:
            if self.buffers is not None:
                self.buffers.begin()
            self._calls.begin()

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, *rest: Any, **more: Any
    ) -> None:
        super()._maybe_compute_loss(stage, output, target_mbs, mb_index, *rest, **more)
        if self._calls is None:
            return
        if self._report is not None and stage.is_last and not self.engine.is_captured:
            self._report.losses.append(self._internal_losses[-1].detach())
        roots, received = self._ran(stage, mb_index)
        if stage.stage_index in self._unseen_split:
            self._unseen_split.remove(stage.stage_index)
            refuse_split_recomputation(stage, roots, self.schedule.name)
        if self.buffers is not None:
            self.buffers.took(stage.stage_index, mb_index, received)
        self._calls.forward_ran(roots, received)

    def _ran(self, stage: Any, mb_index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the roots of the graph of the last forward, and what its stage received for it."""
        outputs, inputs = ran_forward(stage, mb_index)
        roots = (self._internal_losses[-1],) if stage.is_last else outputs
        # The first stage's inputs and keywords belong to the caller.
        num_received = 0 if stage.is_first else len(stage.args_recv_info[mb_index])
        received = [
            tensor for tensor in inputs[:num_received] if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        ]
        return [tensor for tensor in roots if isinstance(tensor, torch.Tensor)], received

    def _between_halves(self, backward: Action) -> list[torch.UntypedStorage]:
        """Return what torch keeps from dgrad to wgrad besides the graph: gradients at the edges of the parameters'
        graphs."""
        stage = next(stage for stage in self._stages if stage.stage_index == backward.stage)
        state = stage.backward_state.get(backward.microbatch)
        groups = () if state is None else state[1] or ()
        gradients = (grad for group in groups for grads in group.get("grads") or () for grad in grads or ())
        return [grad.untyped_storage() for grad in gradients if isinstance(grad, torch.Tensor)]
