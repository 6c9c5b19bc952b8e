"""Judge a schedule by how this very run waits for its transfers, before its first iteration.

In: a schedule, the run's configuration, the device, and every pair's link. Out: nothing, or a ValueError that names what waits and the
way out. Starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from bpipe.check.case import ScheduleError
from bpipe.check.deadlock import Waits
from bpipe.check.rules import check_waits
from bpipe.ir.layout import Vocabulary
from bpipe.ir.program import Exchange
from bpipe.ir.schedule import Schedule
from bpipe.record.format import ONE_SIDED
from bpipe.report.memory import without_transfers
from bpipe.transport.connect import MeasuredLink
from megatron.scheduling.arguments import SchedulingConfig

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def waits_of(config: SchedulingConfig, device: torch.device) -> tuple[Waits, str]:
    """How strictly a rank waits for transfers that need their partner, and which setting makes it so."""
    if config.synchronous:
        return Waits.AT_ISSUE, "--bpipe-sync-transfers"
    if device.type == "cuda" and config.timers_interval is not None:
        # Megatron's timers around messages and computations: the device is synchronised between any two of them.
        return Waits.AT_ISSUE, "--timing-log-level 2"
    if device.type == "cuda" and os.environ.get(CONNECTIONS) == "1":
        return Waits.ONE_QUEUE, f"{CONNECTIONS}=1"
    return Waits.IN_EVERY_OPERATION, ""


def refuse_standstill(
    schedule: Schedule, exchange: Exchange, config: SchedulingConfig, device: torch.device, links: Iterable[MeasuredLink]
) -> None:
    """Raises ValueError where ranks would wait for each other. One-sided transfers wait for no partner.

    Megatron's loops wait for each message themselves; of our own loop's, sends ahead of their receivers can stand in the way.
    """
    waits, setting = waits_of(config, device)
    if waits is Waits.ONE_QUEUE and schedule.layout.vocabulary is Vocabulary.TWO:
        raise ValueError(
            f"with {setting} every rank would wait behind its S for all others', because what follows it waits in the one queue that there "
            "is: drop it, or take --bpipe-vocabulary 1"
        )
    posted, meets = exchange is Exchange.POSTED, any(link.transport not in ONE_SIDED for link in links)
    if not setting or not (posted or meets):
        return
    try:
        check_waits(schedule if meets else without_transfers(schedule), waits, exchange)
    except ScheduleError as error:
        other = "take --bpipe-transport peer" if meets else "choose another schedule"
        raise ValueError(f"with {setting} the ranks would wait for each other: drop it, or {other}. {error}") from None
