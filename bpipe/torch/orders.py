"""Convert schedules into what torch's runtime runs, and torch's own schedules into ours, and refuse what it cannot run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, config_of_schedule
from bpipe.names import unknown
from bpipe.record.format import ONE_SIDED
from bpipe.record.report.memory import moved_nothing, without_transfers
from bpipe.runtime.config import BLOCKING, wait_level
from bpipe.runtime.graph import Regions, nodes_of, saved_names
from bpipe.schedule.action import SHARDS, Action, Kind
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.dependencies import Dependencies
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.unit_grid import align, is_listing
from bpipe.schedule.files.document import read, read_file
from bpipe.schedule.lowering.lower import lower_received
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule, Slot
from bpipe.torch.upstream import RUN_VERSIONS, SEND_WAITS, Computation, SingleStage, TorchAction, schedule_class
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import MeasuredLink

KIND_OF = {
    Kind.FORWARD: Computation.FORWARD,
    Kind.BACKWARD: Computation.FULL_BACKWARD,
    Kind.BACKWARD_INPUT: Computation.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT: Computation.BACKWARD_WEIGHT,
}
# Schedules of torch's that are families here, by the same names.
_FAMILIES_TOO = ("1F1B", "GPipe")
# Torch's names of its schedules (`get_schedule_class`). Torch up to 2.14 lists the last rank of its 1F1B with the wrong
# micro-batches, so for those that are families here ours are used, which have the same orders.
TORCH_NAMES = {
    **{name: name.lower() for name in _FAMILIES_TOO},
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "LoopedBFS": "ScheduleLoopedBFS",
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
    "DualPipeV": "ScheduleDualPipeV",
}
_OWN = {f"Schedule{name}": name.lower() for name in _FAMILIES_TOO}
_FILES = (".csv", ".json", ".txt")

# A schedule's name, a file, a class of torch's or a schedule.
Source = str | Path | type | Schedule


def config_of(
    source: Source, stages: Sequence[Any], num_microbatches: int, balance: BalanceConfig | None, group_size: int | None
) -> ScheduleConfig:
    """Return the configuration of a schedule for this pipeline's stages.

    Raises ValueError for an unknown name, for sizes that do not fit, and for what torch's runtime cannot run.
    """
    num_ranks, num_stages = int(stages[0].group_size), int(stages[0].num_stages)
    if num_stages % num_ranks:
        raise ValueError(
            f"{num_stages} stages on {num_ranks} ranks: every rank computes equally many, so use a multiple of "
            f"{num_ranks}"
        )
    name = _family_named(source)
    if name is not None:
        return ScheduleConfig(
            name,
            num_ranks,
            num_microbatches,
            num_chunks=num_stages // num_ranks,
            balance=balance,
            group_size=group_size,
            exchange=Exchange.TORCH,
        )
    if group_size is not None:
        raise ValueError(f"group_size {group_size} is for bpipe's own families, and {source} is not one: leave it out")
    schedule = _schedule_of(source, stages, num_microbatches)
    if (schedule.num_ranks, schedule.num_microbatches) != (num_ranks, num_microbatches):
        raise ValueError(
            f"schedule {schedule.name} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} micro-batches, "
            f"but this pipeline has {num_ranks} and {num_microbatches}: make it for these"
        )
    if schedule.hosts is not None and balance is not None and balance != BalanceConfig():
        raise ValueError(f"schedule {schedule.name} is already balanced: leave bounds, memory and hosts out")
    return replace(config_of_schedule(schedule, balance), exchange=Exchange.TORCH)


def _family_named(source: Source) -> str | None:
    """Return the family of a name or a class, None if it is no family."""
    if isinstance(source, type):
        return _OWN.get(source.__name__)
    if not isinstance(source, str):
        return None
    name = TORCH_NAMES.get(source, source)
    if name in FAMILIES:
        return name
    if name in TORCH_NAMES.values() or source.endswith(_FILES) or Path(source).is_file():
        return None
    raise ValueError(unknown("schedule", source, (*FAMILIES, *TORCH_NAMES)))


def _schedule_of(source: Source, stages: Sequence[Any], num_microbatches: int) -> Schedule:
    if isinstance(source, Schedule):
        return source
    if isinstance(source, str) and source in TORCH_NAMES:
        source = schedule_class(source)
    if isinstance(source, type):
        return schedule_of_class(source, stages, num_microbatches)
    schedule = read_file(str(source))
    return align(schedule) if is_listing(schedule) and schedule.hosts is None else schedule


def schedule_of_class(made_by: Any, stages: Sequence[Any], num_microbatches: int) -> Schedule:
    """Return the order of one of torch's classes on the unit grid."""
    if issubclass(made_by, SingleStage):
        raise ValueError(
            f"{made_by.__name__} is not a torch schedule that bpipe knows: give one of {', '.join(TORCH_NAMES)}"
        )
    order = made_by(list(stages), num_microbatches).pipeline_order
    if not any(order.values()):
        raise ValueError(
            f"{made_by.__name__} lists its messages itself (pipeline_order_with_comms), and has no list of "
            "computations without them (pipeline_order): bpipe lets torch place the messages, so give it the "
            "computations alone"
        )
    rows = (",".join("" if action is None else str(action) for action in order[rank]) for rank in sorted(order))
    return replace(align(read("\n".join(rows) + "\n")), name=made_by.__name__.removeprefix("Schedule"))


def refuse_unrunnable(schedule: Schedule) -> None:
    """Raise ValueError for a schedule that torch's runtime cannot run."""
    if schedule.layout.num_pipes > 1:
        raise ValueError(f"{schedule.name} has {schedule.layout.num_pipes} pipes: torch's runtime supports one")
    if schedule.layout.slices > 1:
        raise ValueError(f"{schedule.name} cuts micro-batches into slices: torch's runtime supports whole ones only")
    last = schedule.num_stages - 1
    for rank, row in enumerate(schedule.ranks):
        actions = [action for slot in row for action in slot.computations]
        for action in actions:
            if action.kind in SHARDS:
                raise ValueError(f"{action} on rank {rank} is a shard of the vocabulary: torch's runtime supports none")
        losses = [action.microbatch for action in actions if action.stage == last and action.kind is Kind.FORWARD]
        if losses != sorted(losses):
            raise ValueError(
                f"{schedule.name} computes the losses of micro-batches in the order {losses}: torch's runtime "
                "identifies each by how many came before it, so they must be in ascending order"
            )


def refuse_other_places(schedule: Schedule, stages: Sequence[Any]) -> None:
    """Raise ValueError if this rank's stages are not those that the schedule computes here."""
    rank, own = int(stages[0].group_rank), tuple(sorted(int(stage.stage_index) for stage in stages))
    scheduled = schedule.layout.stages_of(rank)
    if own != scheduled:
        raise ValueError(
            f"rank {rank} of the pipeline has stages {_listed(own)}, but {schedule.name} computes {_listed(scheduled)} "
            "there: make those stages on this rank, or use a schedule that places them so"
        )


def _listed(stages: Sequence[int]) -> str:
    return " and ".join(map(str, stages)) or "none"


def torch_orders(schedule: Schedule) -> dict[int, list[Any]]:
    """Return every rank's computations as torch's actions, without bubbles."""
    return {rank: [_cell(slot) for slot in row if slot.compute is not None] for rank, row in enumerate(schedule.ranks)}


def _cell(slot: Slot) -> Any:
    actions = tuple(TorchAction(action.stage, KIND_OF[action.kind], action.microbatch) for action in slot.computations)
    return actions[0] if len(actions) == 1 else TorchAction(-1, Computation.OVERLAP_F_B, None, actions)


_RECEIVED_FOR = {Computation.RECV_F: Kind.FORWARD, Computation.RECV_B: Kind.BACKWARD}
_SENDS = (Computation.SEND_F, Computation.SEND_B)


def received_in(order: Mapping[int, Sequence[Any]], schedule: Schedule) -> list[list[list[int]]]:
    """Return, by rank, the values whose receives torch lists before its first computation and after each.

    `order` are every rank's actions as torch listed them, messages among computations. Raises ValueError if a SEND does
    not follow right after its computation: the engine would be called too late.
    """
    dependencies = Dependencies(schedule.layout, schedule.num_microbatches)
    received: list[list[list[int]]] = []
    for rank in sorted(order):
        rows: list[list[int]] = [[]]
        before: Any = None
        for action in order[rank]:
            if action.is_compute_op:
                rows.append([])
            elif action.computation_type in _RECEIVED_FOR:
                kind = _RECEIVED_FOR[action.computation_type]
                rows[-1].append(dependencies.operand_of(Action(action.stage_index, kind, action.microbatch_index)))
            elif action.computation_type in _SENDS and not (
                before is not None and (before.is_compute_op or before.computation_type in _SENDS)
            ):
                raise ValueError(
                    f"torch {torch.__version__} lists {action} on rank {rank} after {before}, not after the action "
                    "whose result it sends: bpipe expects another order. Use torch's own schedules, or one of torch "
                    f"{', '.join(RUN_VERSIONS)}"
                )
            if action.computation_type not in SEND_WAITS:
                before = action
        received.append(rows)
    return received


def refuse_standstill(
    schedule: Schedule,
    order: Mapping[int, Sequence[Any]],
    transfers: TransferConfig,
    device: torch.device,
    links: Iterable[MeasuredLink],
) -> None:
    """Raise ValueError if ranks of this schedule could wait for each other forever.

    `order` is torch's own, as it will run. One-sided transfers wait for nobody. Communicators are made by the first
    message in them: torch's handshake makes most before the first step, but this is not relied on.
    """
    two_sided = any(link.transport not in ONE_SIDED for link in links)
    judged = schedule if two_sided else without_transfers(schedule)
    programs = lower_received(judged, received_in(order, schedule))
    waits, cause = wait_level(transfers, device)
    differing = transfers.differing and two_sided
    stuck = blocked_ranks(judged, waits, Exchange.TORCH, births=True, differing=differing, programs=programs)
    if stuck:
        first = stuck[0]
        waiting = ", ".join(f"rank {blocked.rank} for rank {blocked.peer}" for blocked in stuck[:8])
        way = 'Use TransferConfig(transport="peer")' if two_sided else "Use another schedule"
        if waits is WaitLevel.BLOCKING_LAUNCHES:
            way += f", or unset {BLOCKING}"
        raise ValueError(
            f"with {cause or 'messages over gloo'} ranks of {schedule.name} can wait for each other for ever: rank {first.rank} waits for "
            f"{first.message} at slot {first.slot}, which rank {first.peer} never reaches (waiting: {waiting}). {way}"
        )


def refuse_split_recomputation(stage: Any, outputs: Sequence[torch.Tensor], name: str) -> None:
    """Refuse a stage that recomputes by `torch.utils.checkpoint` in a schedule with split backwards.

    Torch's dgrad computes a region again and its wgrad asks for it a second time, which ends with "Trying to backward
    through the graph a second time". A stage that defers its wgrad itself (`dw_builder`) has one backward.

    Args:
        stage: A stage of torch's pipelining.
        outputs: The outputs of its first micro-batch.
        name: The schedule's name, for the error.

    Raises:
        ValueError: The stage recomputes and does not defer its wgrad itself.
    """
    if stage.dw_builder is not None:
        return
    regions = Regions()
    nodes = nodes_of(output.grad_fn for output in outputs)
    if any(regions.recomputes(node, attribute) for node in nodes for attribute in saved_names(type(node))):
        raise ValueError(
            f"stage {stage.stage_index} recomputes (torch.utils.checkpoint) and {name} splits its backward, which "
            "torch's own dgrad and wgrad do not support together: use a schedule with whole backwards (1f1b, "
            "interleaved-1f1b), leave recomputation out, or let the stage defer its wgrad itself (PipelineStage's "
            "dw_builder)"
        )


def why_unmoved(schedule: Schedule, rank: int, moved_bytes: Mapping[int, int], minimum_bytes: int) -> str | None:
    """Return why a rank of a schedule that has run evicted nothing though it should have, or None.

    `moved_bytes`: by stage, what the engine moved of a micro-batch. `minimum_bytes`: size of the smallest storage that moves.
    """
    if not moved_nothing(schedule, rank, moved_bytes):
        return None
    return (
        f"rank {rank} moved nothing: every storage of its micro-batches has less than {minimum_bytes} bytes "
        "(minimum_bytes of TransferConfig), or other code holds it. Its memory is as without balancing"
    )
