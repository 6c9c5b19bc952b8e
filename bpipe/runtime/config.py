"""Settings of an engine, and how strictly a rank waits for transfers."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bpipe.record.format import ONE_SIDED
from bpipe.record.report.memory import without_transfers
from bpipe.runtime.checksums import Verifier
from bpipe.schedule.action import Action
from bpipe.schedule.check.deadlock import WaitLevel
from bpipe.schedule.check.rules import ScheduleError, check_waits
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import MeasuredLink

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
BLOCKING = "CUDA_LAUNCH_BLOCKING"


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine."""

    name: str
    """This process in errors, such as "rank 3"."""

    device: torch.device
    """Where activations are computed."""

    transfers: TransferConfig
    """How they travel. With `differing`, so must both ranks of a pair and the transport."""

    parts: Mapping[int, int] = field(default_factory=dict)
    """By stage, bytes of each micro-batch that leave; by default all that can."""

    waiting: Callable[[Action], Sequence[torch.UntypedStorage]] = lambda backward: ()
    """Returns the storages that the caller keeps, in addition to the graph, between dgrad and wgrad."""

    between: Callable[[Action], Sequence[torch.UntypedStorage]] = lambda shard: ()
    """Returns the storages that the caller keeps between a shard's forward (S) and its backward (T)."""

    shared: Callable[[torch.UntypedStorage], bool] = lambda storage: False
    """Whether several slices of a micro-batch share a storage, so that it stays, as planned."""

    verifier: Verifier | None = None
    """Checks what leaves and comes back."""

    at_once: bool = False
    """Whether the two computations of an overlap run at once, with one call for both, or one after the other."""

    links: Mapping[int, str] = field(default_factory=dict)
    """By the other rank, the name of the transport, for the verifier's errors."""

    beside: Callable[[], Sequence[torch.Stream]] = lambda: ()
    """Returns streams other than the current one on which a stage computes parts of its forwards and backwards."""


def wait_level(transfers: TransferConfig, device: torch.device) -> tuple[WaitLevel, str]:
    """Return how strictly a rank may wait for transfers that need their partner, which decides whether a schedule can
    deadlock, and the reason; "" without one.

    A GPU has fewer queues than a run has streams, and which streams share one is not known; timers and profilers
    synchronize it, and NCCL may order its kernels across communicators (`NCCL_LAUNCH_ORDER_IMPLICIT`). A plan that
    survives all of this waits for each transfer where it is posted. With one queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`)
    messages wait for each other, too; with `CUDA_LAUNCH_BLOCKING=1` the host waits for each.
    """
    if device.type != "cpu" and os.environ.get(BLOCKING, "0") != "0":
        return WaitLevel.BLOCKING_LAUNCHES, f"{BLOCKING}=1"
    if device.type != "cpu" and os.environ.get(CONNECTIONS) == "1":
        return WaitLevel.ONE_QUEUE, f"{CONNECTIONS}=1"
    if transfers.synchronous:
        return WaitLevel.AT_ISSUE, "--bpipe-sync-transfers"
    if device.type != "cpu":
        return WaitLevel.AT_ISSUE, "transfers over NCCL and streams that share a GPU's queues"
    return WaitLevel.IN_EVERY_OPERATION, ""


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
