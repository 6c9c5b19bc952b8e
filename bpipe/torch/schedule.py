"""A schedule for `torch.distributed.pipelining` whose stages hold evenly much.

In: stages, a loss, a schedule's name or file, and how to balance it. Out: an object that is used wherever torch's own
schedules are. Torch's runtime runs it; the engine stands around every computation and moves activations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bpipe.balance.config import named_balance
from bpipe.build import build
from bpipe.generate.families import default_family
from bpipe.ir.action import Action
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.meter import Meter
from bpipe.runtime.streams import allocated_on
from bpipe.runtime.verifying import Verifier
from bpipe.torch.buffers import ReceiveBuffers
from bpipe.torch.calls import StepCalls
from bpipe.torch.judged import refuse_standstill
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
from bpipe.torch.recomputed import refuse_split_recomputation
from bpipe.torch.recorded import StepRecord
from bpipe.torch.upstream import Computation, Runtime, SingleStage, refuse_compiled, require_attributes

logger = logging.getLogger(__name__)

_OURS = (*KIND_OF.values(), Computation.OVERLAP_F_B)


# What is balanced where nobody names a schedule.
_DEFAULT = default_family(1)


def _refuse_late_receives(torch_options: dict[str, Any]) -> None:
    if torch_options.pop("defer_pp_recv", False):
        raise ValueError(
            "defer_pp_recv receives as late as it can, and by that order pipelines wait for themselves even where "
            "nothing is balanced: leave it out"
        )


def _device_of(stages: Sequence[Any]) -> torch.device:
    """Return the device of these stages: of CPUs there is one, whatever index a mesh gives it."""
    device = torch.device(stages[0].device)
    return torch.device("cpu") if device.type == "cpu" else device


class BalancedSchedule(Runtime):  # type: ignore[misc]
    """A schedule, torch's or ours, balanced, under torch's own runtime.

    `step`, `eval`, targets, losses and keywords are those of torch's schedules. `config` and `schedule` say what is run,
    `engine` moves activations, `verifier` checks them where that is asked. `links` are the measured links of all pairs,
    `buffers` torch's for what it receives, where they are kept lean.
    """

    def __init__(
        self,
        stages: Any,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        schedule: Source = _DEFAULT,
        balance: str = "bpipe",
        bounds: int | Sequence[int] | None = None,
        partners: Sequence[int] | None = None,
        hosts: str | None = None,
        group_size: int | None = None,
        minimum_bytes: int = 65536,
        transport: str = "auto",
        timeout_s: float = 600.0,
        differing: bool = False,
        poison: bool = False,
        lean_buffers: bool = True,
        verify: float = 0,
        meter: Meter | None = None,
        report: str | Path | None = None,
        report_steps: tuple[int, int] = (3, 5),
        **torch_options: Any,
    ) -> None:
        """Build the schedule and connect its pairs. Collective over the world where anything moves.

        `stages` are this rank's, one or a list. `schedule`: a family of `bpipe schedule --list`, one of torch's names or
        classes, a file of `bpipe schedule --format csv`, or a Schedule. `balance`: "bpipe" or "none". `bounds`: most
        micro-batches of a chunk that each rank may hold, one number for all or one a rank; by default the smallest that
        all keep. `hosts`: who keeps what leaves: "pair", "pool", "host" (the node's own memory) or "all".
        `minimum_bytes`: smaller storages stay. `transport`: as `--bpipe-transport`. `differing`: micro-batches of a
        stage may differ in size. `poison` fills freed memory with NaN, for tests. `lean_buffers`: what torch receives
        takes memory only while it is needed. `verify`: in so many first steps check that what leaves comes back as it
        left; infinity for all. `meter` measures. `report`: a folder for `bpipe report`, where steps `report_steps`,
        from the first to the last, are written down. `torch_options` are those of torch's schedules: `scale_grads`,
        `args_chunk_spec`, `kwargs_chunk_spec`, `output_merge_spec`, `backward_requires_autograd`. Raises ValueError for
        what cannot be built or run.
        """
        stages = list(stages) if isinstance(stages, (list, tuple)) else [stages]
        _refuse_late_receives(torch_options)
        bounds = (bounds,) if isinstance(bounds, int) else bounds
        how = named_balance(balance, bounds, partners, hosts=hosts)
        self.config = config_of(schedule, stages, n_microbatches, how, group_size)
        self.schedule = build(self.config)
        refuse_unrunnable(self.schedule)
        refuse_other_places(self.schedule, stages)
        # Stages with split backwards whose graph nobody has looked at yet.
        self._unseen_split = set(self.schedule.split_stages)
        if self._unseen_split:
            refuse_compiled(stages, self.schedule.name)
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, **torch_options)
        self.pipeline_order = torch_orders(self.schedule)
        self._prepare_schedule_with_comms(self.pipeline_order)
        require_attributes(self, stages)
        self.meter = meter = Meter(keeps_inputs=False) if meter is None and report is not None else meter
        own = {stage.stage_index for stage in stages}
        self.buffers = ReceiveBuffers(stages, own.__contains__) if lean_buffers else None
        self._calls: StepCalls | None = None
        device = _device_of(stages)
        connections = self._connected(stages, transport, timeout_s, device)
        self.links = connections.links
        refuse_standstill(self.schedule, self.pipeline_order_with_comms, device, self.links, differing)
        self.verifier = Verifier(f"rank {dist.get_rank()}", device, verify) if verify else None
        config = EngineConfig(
            name=f"rank {dist.get_rank()}",
            device=device,
            minimum_bytes=minimum_bytes,
            timeout_s=timeout_s,
            poison=poison,
            differing=differing,
            parts={} if how is None else how.part_bytes,
            allocated=allocated_on(device),
            waiting=self._between_halves,
            verifier=self.verifier,
        )
        self.engine = Engine(self.schedule, self.rank, connections.transports(differing) or None, config, meter)
        self._report = None if report is None else self._recording(stages, report, report_steps, connections, device)

    def _connected(self, stages: Sequence[Any], transport: str, timeout_s: float, device: torch.device) -> Connected:
        try:
            connections = connected(stages[0].group, self.schedule, transport, timeout_s, device)
        except (ValueError, RuntimeError) as error:
            name_arguments(error)
            raise
        if connections.table:
            logger.info("bpipe: %s", connections.table)
        if connections.placed:
            logger.info("bpipe: %s", connections.placed)
        return connections

    def _recording(
        self,
        stages: Sequence[Any],
        folder: str | Path,
        steps: tuple[int, int],
        connections: Connected,
        device: torch.device,
    ) -> StepRecord:
        pipelines = connections.pipelines or pipelines_of(stages[0].group, self.schedule)[0]
        return StepRecord(folder, steps, self.config, pipelines, stages, device)

    @classmethod
    def of(cls, other: Any, **options: Any) -> BalancedSchedule:
        """Return a balanced schedule of another's stages, loss, micro-batches and options of torch's.

        `options` are those of `BalancedSchedule`; the schedule is by default "1f1b" for one stage a rank and
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
                f"a function of its own for {computation_type.name} computes where bpipe does not see it: use torch's own "
                f"schedules with it, or leave it out"
            )
        super().register_custom_function(computation_type, custom_function)

    # -- a step, as torch's runtime takes it
    # -----------------------------------------------------------------------------------------------------------------

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._has_backward and torch.is_grad_enabled()):
            return super()._step_microbatches(*args, **kwargs)
        with self._recorded(), self._called():
            made = super()._step_microbatches(*args, **kwargs)
            self.engine.end()
        return made

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
        outputs, taken = stage.fwd_cache[mb_index]
        roots = (self._internal_losses[-1],) if stage.is_last else outputs
        # What the caller gives, to the first stage and as keywords, is the caller's.
        num_received = 0 if stage.is_first else len(stage.args_recv_info[mb_index])
        received = [each for each in taken[:num_received] if isinstance(each, torch.Tensor) and each.requires_grad]
        made = [each for each in roots if isinstance(each, torch.Tensor)]
        if stage.stage_index in self._unseen_split:
            self._unseen_split.remove(stage.stage_index)
            refuse_split_recomputation(stage, made, self.schedule.name)
        self._calls.forward_ran(made, received)

    def _between_halves(self, backward: Action) -> list[torch.UntypedStorage]:
        """What torch keeps from dgrad to wgrad besides the graph: gradients at the edges of the parameters' graphs."""
        stage = next(each for each in self._stages if each.stage_index == backward.stage)
        state = stage.backward_state.get(backward.microbatch)
        groups = () if state is None else state[1] or ()
        found = (grad for group in groups for grads in group.get("grads") or () for grad in grads or ())
        return [grad.untyped_storage() for grad in found if isinstance(grad, torch.Tensor)]
