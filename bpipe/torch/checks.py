"""Judge torch's own programs, as its runtime will run them, before a step does.

In: a schedule, and every rank's actions as torch listed them, messages among computations. Out: nothing, or a
ValueError that says who would wait for whom for ever. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bpipe.record.format import ONE_SIDED
from bpipe.record.report.memory import moved_nothing, without_transfers
from bpipe.runtime.waits import BLOCKING, wait_level
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
    """Return, by rank, the values whose receives torch lists before its first computation and behind each.

    Raises ValueError where its lists send anything but right behind what makes it: its calls would come elsewhere.
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
            elif action.computation_type in _SENDS and not _follows(before):
                raise ValueError(
                    f"torch {torch.__version__} lists {action} on rank {rank} after {before}, not after the action "
                    "whose result it sends: bpipe expects another order. Use torch's own schedules, or one of torch "
                    f"{', '.join(RUN_VERSIONS)}"
                )
            if action.computation_type not in SEND_WAITS:
                before = action
        received.append(rows)
    return received


def _follows(before: Any) -> bool:
    return before is not None and (before.is_compute_op or before.computation_type in _SENDS)


def refuse_standstill(
    schedule: Schedule,
    order: Mapping[int, Sequence[Any]],
    transfers: TransferConfig,
    device: torch.device,
    links: Iterable[MeasuredLink],
) -> None:
    """Raise ValueError where ranks of this schedule could wait for each other for ever.

    `order` is torch's own, as it will run. Transfers that one rank makes by itself wait for nobody. Communicators are
    made by the first message in them: torch's handshake makes most before the first step, which is not relied on.
    """
    meets = any(link.transport not in ONE_SIDED for link in links)
    judged = schedule if meets else without_transfers(schedule)
    programs = lower_received(judged, received_in(order, schedule))
    waits, cause = wait_level(transfers, device)
    differing = transfers.differing and meets
    stuck = blocked_ranks(judged, waits, Exchange.TORCH, births=True, differing=differing, programs=programs)
    if stuck:
        first = stuck[0]
        others = ", ".join(f"rank {each.rank} for rank {each.peer}" for each in stuck[:8])
        way = 'Use TransferConfig(transport="peer")' if meets else "Use another schedule"
        if waits is WaitLevel.BLOCKING_LAUNCHES:
            way += f", or unset {BLOCKING}"
        raise ValueError(
            f"with {cause or 'messages over gloo'} ranks of {schedule.name} can wait for each other for ever: rank {first.rank} waits for "
            f"{first.message} at slot {first.slot}, which rank {first.peer} never reaches (waiting: {others}). {way}"
        )


def why_unmoved(schedule: Schedule, rank: int, moved_bytes: Mapping[int, int], minimum_bytes: int) -> str | None:
    """Return why a rank that was to evict moved nothing, or None if it did.

    Args:
        schedule: what has run.
        rank: of the schedule.
        moved_bytes: by stage, what the engine moved of a micro-batch.
        minimum_bytes: of the smallest storage that moves.
    """
    if not moved_nothing(schedule, rank, moved_bytes):
        return None
    return (
        f"rank {rank} moved nothing: every storage of its micro-batches has less than {minimum_bytes} bytes "
        "(minimum_bytes of TransferConfig), or other code holds it. Its memory is as without balancing"
    )
