"""A schedule for `torch.distributed.pipelining` whose stages hold evenly much.

In: stages, a loss, a schedule's name or file, and how to balance it. Out: an object that is used wherever torch's own
schedules are. Torch's runtime runs it; the engine stands around every computation and moves activations.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.plan.fit import Fit, plan_lines
from bpipe.runtime.checksums import Verifier
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.links import disconnect
from bpipe.runtime.meter import Meter
from bpipe.runtime.streams import allocated_on
from bpipe.schedule.action import Action
from bpipe.schedule.families.families import default_family
from bpipe.torch.buffers import ReceiveBuffers
from bpipe.torch.calls import StepCalls
from bpipe.torch.checks import refuse_standstill, why_unmoved
from bpipe.torch.memory_budget import Memory, RankBudgets
from bpipe.torch.option_names import name_arguments
from bpipe.torch.orders import (
    KIND_OF,
    Source,
    config_of,
    refuse_other_places,
    refuse_unrunnable,
    torch_orders,
)
from bpipe.torch.pipelines import Connected, connected, pipelines_of
from bpipe.torch.recompute import refuse_split_recomputation
from bpipe.torch.record import StepRecord
from bpipe.torch.sizes import clear_received, everywhere, hand_over, weigh
from bpipe.torch.upstream import (
    Computation,
    Runtime,
    SingleStage,
    ran_forward,
    refuse_compiled,
    refuse_sends_to_itself,
    require_attributes,
)
from bpipe.transport.config import TransferConfig

logger = logging.getLogger(__name__)

_OURS = (*KIND_OF.values(), Computation.OVERLAP_F_B)


# What is balanced where nobody names a schedule.
_DEFAULT = default_family(1)


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


def _device_of(stages: Sequence[Any]) -> torch.device:
    """Return the device of these stages: of CPUs there is one, whatever index a mesh gives it."""
    device = torch.device(stages[0].device)
    return torch.device("cpu") if device.type == "cpu" else device


class BalancedSchedule(Runtime):  # type: ignore[misc]
    """A schedule, torch's or ours, balanced, under torch's own runtime.

    `step`, `eval`, targets, losses and keywords are those of torch's schedules. `config` and `schedule` say what is run,
    `engine` moves activations, `verifier` checks them where that is asked. `links` are the measured links of all pairs,
    `buffers` torch's for what it receives, where they are kept lean. `plan` is that of a memory budget, from the first
    step on; before that the schedule moves nothing. After the last step call `close`, or use the schedule as a context
    manager: until then ranks lend memory to each other.
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
        """Build the schedule and connect its pairs. Collective over the world where anything moves.

        Args:
            stages: This rank's stages, one or a list.
            n_microbatches: Micro-batches of a step.
            loss_fn: As torch's schedules take it.
            schedule: A family that `bpipe schedule` lists, one of torch's names or classes, a file of
                `bpipe schedule --format csv`, or a Schedule.
            balance: How activations move, None if none do.
            memory: In place of bounds: bytes, or GiB as text, that each rank's micro-batches and host buffers may take.
                Stages are weighed before the first step, by forwards of their own, and as little as possible moves.
            group_size: Micro-batches of a group, for schedules that have groups.
            transfers: How activations travel, and in how many steps that is checked.
            lean_buffers: Whether what torch receives takes memory only while it is needed.
            meter: Measures what is held.
            report: A folder for `bpipe report`.
            report_steps: The first and the last step to record there.
            torch_options: Those of torch's schedules: `scale_grads`, `args_chunk_spec`, `kwargs_chunk_spec`,
                `output_merge_spec`, `backward_requires_autograd`.

        Raises:
            ValueError: For what cannot be built or run.
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
        device = _device_of(stages)
        refuse_sends_to_itself(stages, device)
        # Stages with split backwards whose graph nobody has looked at yet.
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
            allocated=allocated_on(device),
            waiting=self._between_halves,
            verifier=self.verifier,
        )
        self._report: StepRecord | None = None
        self._is_closed = self._has_run = False
        self._adopt(self.config, final=self._budget is None)

    def _adopt(self, config: ScheduleConfig, final: bool) -> None:
        """Run this schedule from now on, and connect its pairs; record it where it is `final`."""
        self.config, self.schedule = config, build(config)
        self.pipeline_order = torch_orders(self.schedule)
        self._prepare_schedule_with_comms(self.pipeline_order)
        require_attributes(self, self._stages)
        settings, transfers = self._engine_config, self._engine_config.transfers
        try:
            connections = self._connections = connected(
                self._stages[0].group, self.schedule, transfers, settings.device
            )
            self.links = connections.links
            for line in filter(None, (connections.table, connections.placed)):
                logger.info("bpipe: %s", line)
            refuse_standstill(self.schedule, self.pipeline_order_with_comms, transfers, settings.device, self.links)
        except (ValueError, RuntimeError) as error:
            name_arguments(error)
            raise
        settings = replace(settings, parts={} if config.balance is None else config.balance.part_bytes)
        transports = connections.transports(transfers.differing) or None
        self.engine = Engine(self.schedule, self.rank, transports, settings, self.meter)
        folder, steps = self._report_to
        if final and folder is not None:
            self._report = self._recording(folder, steps, connections, settings.device)

    def _recording(
        self, folder: str | Path, steps: tuple[int, int], connections: Connected, device: torch.device
    ) -> StepRecord:
        stages = self._stages
        pipelines = connections.pipelines or pipelines_of(stages[0].group, self.schedule)[0]
        return StepRecord(folder, steps, self.config, pipelines, stages, device)

    @classmethod
    def of(cls, other: Any, **options: Any) -> BalancedSchedule:
        """Return a balanced schedule of another's stages, loss, micro-batches and options of torch's.

        `options` are those of `BalancedSchedule`; the schedule is by default "1f1b" for one stage per rank and
        "interleaved-1f1b" for several.
        """
        stages = [other._stage] if isinstance(other, SingleStage) else other._stages
        default = default_family(len(stages))
        taken = {
            "scale_grads": other.scale_grads,
            "args_chunk_spec": other._args_chunk_spec,
            "kwargs_chunk_spec": other._kwargs_chunk_spec,
            "output_merge_spec": other._output_merge_spec,
        }
        return cls(stages, other._n_microbatches, other._loss_fn, **{"schedule": default, **taken, **options})

    def register_custom_function(self, computation_type: Any, custom_function: Any) -> None:
        """Let torch call a function in place of one of its own actions. Raises ValueError for computations: the engine
        stands around torch's own."""
        if computation_type in _OURS:
            raise ValueError(
                f"a custom function for {computation_type.name} computes where bpipe cannot see it: use torch's own "
                f"schedules with it, or leave it out"
            )
        super().register_custom_function(computation_type, custom_function)

    def close(self, *, failed: bool = False) -> None:
        """Give back what the schedule has on this rank and on others: host buffers, process groups and threads.

        After the last step all ranks call it. No step can follow. A second call does nothing.

        Args:
            failed: Whether the training failed. Then no rank is waited for, and memory that ranks lend to each other
                stays until the process ends. A step that failed need not be told.
        """
        if self._is_closed:
            return
        self._is_closed = True
        reason = disconnect(self.engine, self._connections.connections.values(), failed)
        if reason is not None and not failed:
            logger.warning("bpipe: memory that ranks lend to each other stays until this process ends: %s", reason)

    def __enter__(self) -> BalancedSchedule:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(failed=kind is not None)

    # -- a step, as torch's runtime takes it
    # -----------------------------------------------------------------------------------------------------------------

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._has_backward and torch.is_grad_enabled()):
            return super()._step_microbatches(*args, **kwargs)
        if self._is_closed:
            raise RuntimeError("this BalancedSchedule is closed: call close() after the last step, or make a new one")
        if self._budget is not None and self.plan is None:
            self._plan(self._budget, *args, **kwargs)
        with self._recorded(), self._called():
            made = super()._step_microbatches(*args, **kwargs)
            self.engine.end()
        if not self._has_run:
            self._has_run = True
            minimum_bytes = self._engine_config.transfers.minimum_bytes
            if reason := why_unmoved(self.schedule, self.rank, self.engine.moved_bytes, minimum_bytes):
                logger.warning("bpipe: %s", reason)
        return made

    def _plan(self, budget: RankBudgets, *args: Any, **kwargs: Any) -> None:
        """Weigh the stages, with the first micro-batch of a step that is about to run, and balance within the budget.

        Collective over the world. Raises ValueError where no plan keeps it.
        """
        given = inspect.signature(Runtime._step_microbatches).bind(self, *args, **kwargs).arguments
        targets, loss_kwargs = given.get("target_mbs"), given.get("loss_kwargs")
        first = (given.get("arg_mbs") or [()])[0], (given.get("kwarg_mbs") or [{}])[0]
        more = {"target": targets[0] if targets else None, "loss_kwargs": loss_kwargs}
        known = inspect.signature(Runtime._initialize_stages).parameters
        super()._initialize_stages(*first, **{name: more[name] for name in more if name in known})

        def forward(stage: Any, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            clear_received(stage, microbatch, self._stages)
            output = stage.forward_one_chunk(microbatch, *first)
            self._maybe_compute_loss(stage, output, targets, microbatch, *([loss_kwargs] if loss_kwargs else []))
            hand_over(output, stage.stage_index, microbatch, self._stages)
            return self._ran(stage, microbatch)

        settings = self._engine_config
        mine = weigh(self._stages, self._n_microbatches, forward, settings.device, settings.transfers.minimum_bytes)
        self._internal_losses.clear()
        self.plan = budget.plan(self.schedule, everywhere(mine))
        for line in plan_lines(self.plan, "as weighed,"):
            logger.info("bpipe: %s", line)
        self._adopt(replace(self.config, balance=self.plan.how), final=True)

    def _recorded(self) -> AbstractContextManager[None]:
        if self._report is None or self.meter is None:
            return nullcontext()
        return self._report.step(self.engine, self.meter, self.links, self.verifier)

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Have the engine called for the time of one step."""
        order = self.pipeline_order_with_comms
        mine = order[self.rank]
        buffers = self.buffers
        calls = self._calls = StepCalls(
            self.engine, mine, *(() if buffers is None else (buffers.receives, buffers.used))
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
            order[self.rank] = mine
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
        if self._report is not None and stage.is_last:
            self._report.losses.append(self._internal_losses[-1].detach())
        made, received = self._ran(stage, mb_index)
        if stage.stage_index in self._unseen_split:
            self._unseen_split.remove(stage.stage_index)
            refuse_split_recomputation(stage, made, self.schedule.name)
        if self.buffers is not None:
            self.buffers.took(stage.stage_index, mb_index, received)
        self._calls.forward_ran(made, received)

    def _ran(self, stage: Any, mb_index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the roots of the graph of the last forward, and what its stage received for it."""
        outputs, taken = ran_forward(stage, mb_index)
        roots = (self._internal_losses[-1],) if stage.is_last else outputs
        # What the caller gives, to the first stage and as keywords, is the caller's.
        num_received = 0 if stage.is_first else len(stage.args_recv_info[mb_index])
        received = [each for each in taken[:num_received] if isinstance(each, torch.Tensor) and each.requires_grad]
        return [each for each in roots if isinstance(each, torch.Tensor)], received

    def _between_halves(self, backward: Action) -> list[torch.UntypedStorage]:
        """What torch keeps from dgrad to wgrad besides the graph: gradients at the edges of the parameters' graphs."""
        stage = next(each for each in self._stages if each.stage_index == backward.stage)
        state = stage.backward_state.get(backward.microbatch)
        groups = () if state is None else state[1] or ()
        found = (grad for group in groups for grads in group.get("grads") or () for grad in grads or ())
        return [grad.untyped_storage() for grad in found if isinstance(grad, torch.Tensor)]
