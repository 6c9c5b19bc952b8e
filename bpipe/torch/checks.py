"""Checks of what torch's runtime is about to run: deadlocks, and split backwards of stages that recompute."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bpipe.record.format import ONE_SIDED
from bpipe.record.report.memory import moved_nothing, without_transfers
from bpipe.runtime.checkpoints import Regions
from bpipe.runtime.config import BLOCKING, wait_level
from bpipe.runtime.graph import nodes_of, saved_names
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.dependencies import Dependencies
from bpipe.schedule.lowering.lower import lower_received
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.torch.upstream import RUN_VERSIONS, SEND_WAITS, Computation
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import MeasuredLink

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
