"""Refuse a run whose ranks could wait for each other for ever, before its first iteration."""

from collections.abc import Iterable, Iterator

import torch

from bpipe.record.format import ONE_SIDED
from bpipe.record.report.memory import without_transfers
from bpipe.runtime.config import wait_level
from bpipe.schedule.check.deadlock import WaitLevel
from bpipe.schedule.check.rules import ScheduleError, check_waits
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import MeasuredLink


def refuse_standstill(
    schedule: Schedule,
    exchange: Exchange,
    transfers: TransferConfig,
    device: torch.device,
    links: Iterable[MeasuredLink],
) -> None:
    """Raise ValueError if ranks could wait for each other. One-sided transfers wait for no partner.

    Megatron's loops wait for each message themselves. In our own loop, sends ahead of their receivers can block others in
    the same queue. If micro-batches differ in size, a HOST waits for the lengths of its storages.
    """
    waits, cause = wait_level(transfers, device)
    holds_messages = exchange is Exchange.POSTED and waits >= WaitLevel.ONE_QUEUE
    holds_messages |= waits >= WaitLevel.BLOCKING_LAUNCHES
    meets = any(link.transport not in ONE_SIDED for link in links)
    if waits is WaitLevel.ONE_QUEUE and schedule.layout.vocabulary is Vocabulary.TWO:
        # In one queue the second step runs before the computation instead of next to it: slow, even if it never blocks.
        raise ValueError(
            f"with {cause}, every rank would wait after its S for that of all other ranks, because there is only one "
            "queue: drop it, or use --bpipe-vocabulary 1"
        )
    differing = meets and transfers.differing
    if differing and not cause:
        cause = "micro-batches that differ in size"
    if not cause or not (meets or holds_messages):
        return
    try:
        check_waits(schedule if meets else without_transfers(schedule), waits, exchange, differing)
    except ScheduleError as error:
        ways = ", or ".join(_ways_out(waits, transfers, meets, exchange))
        raise ValueError(f"with {cause}, ranks can wait for each other for ever: {ways}. {error}") from None


def _ways_out(waits: WaitLevel, transfers: TransferConfig, meets: bool, exchange: Exchange) -> Iterator[str]:
    if waits >= WaitLevel.ONE_QUEUE or transfers.synchronous:
        yield "drop it"
    if waits is WaitLevel.BLOCKING_LAUNCHES:
        one_by_one = exchange is Exchange.MEGATRON_INTERLEAVED
        yield "add --no-overlap-p2p-communication" if one_by_one else "use a schedule that Megatron's own loops run"
    else:
        yield f"use {'--bpipe-transport peer' if meets else 'another schedule'}"
