"""Before its first iteration, a run checks whether it could deadlock, given all that it really waits for."""

import pytest
import torch

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.config import refuse_standstill, wait_level
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.program import Exchange
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import MeasuredLink

INTERLEAVED = Exchange.MEGATRON_INTERLEAVED
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = TransferConfig()
SYNCHRONOUS = TransferConfig(synchronous=True)
DIFFERING = TransferConfig(differing=True)
# One micro-batch is left for the last group. Megatron refuses that, so no training has this schedule, but it would
# deadlock.
STILL = build(ScheduleConfig("interleaved-1f1b", 10, 11, num_chunks=2, balance=BalanceConfig()))


@pytest.mark.parametrize(
    ("config", "device", "connections", "waits"),
    [
        (PLAIN, CPU, None, WaitLevel.IN_EVERY_OPERATION),
        (PLAIN, CPU, "1", WaitLevel.IN_EVERY_OPERATION),
        (SYNCHRONOUS, CPU, None, WaitLevel.AT_ISSUE),
        # Streams share 8 queues, too; this was once assumed of 1 only.
        (PLAIN, CUDA, None, WaitLevel.AT_ISSUE),
        (PLAIN, CUDA, "8", WaitLevel.AT_ISSUE),
        (PLAIN, CUDA, "1", WaitLevel.ONE_QUEUE),
        (SYNCHRONOUS, CUDA, "1", WaitLevel.ONE_QUEUE),
        (SYNCHRONOUS, CUDA, None, WaitLevel.AT_ISSUE),
    ],
)
def test_what_makes_a_run_wait(
    config: TransferConfig,
    device: torch.device,
    connections: str | None,
    waits: WaitLevel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert wait_level(config, device)[0] is waits


def test_a_run_that_would_deadlock_is_refused_with_what_makes_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert not blocked_ranks(STILL, WaitLevel.IN_EVERY_OPERATION)
    over_nccl, by_copies = (
        [MeasuredLink((0, 9), "nccl", {}), MeasuredLink((1, 8), "peer", {})],
        [MeasuredLink((0, 9), "peer", {}), MeasuredLink((1, 8), "host", {})],
    )
    message = (
        r"with transfers over NCCL .* ranks can wait for each other for ever: use --bpipe-transport peer\. no deadlock"
    )
    with pytest.raises(ValueError, match=message):
        refuse_standstill(STILL, INTERLEAVED, PLAIN, CUDA, over_nccl)
    refuse_standstill(STILL, INTERLEAVED, PLAIN, CUDA, by_copies)
    refuse_standstill(STILL, INTERLEAVED, PLAIN, CPU, over_nccl)
    refuse_standstill(
        build(ScheduleConfig("interleaved-1f1b", 10, 20, num_chunks=2, balance=BalanceConfig())),
        INTERLEAVED,
        PLAIN,
        CUDA,
        over_nccl,
    )


def test_first_messages_that_cross_are_trained_with_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """First messages pass through the hosts; in the queue they deadlocked, so two pipes were refused."""
    posted = Exchange.POSTED
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name, chunks in (("chimera", 1), ("mixpipe", 1), ("bitpipe", 2)):
        schedule = build(ScheduleConfig(name, 4, 8, num_chunks=chunks, balance=BalanceConfig()))
        refuse_standstill(schedule, posted, PLAIN, CUDA, [MeasuredLink((0, 3), "nccl", {})])


@pytest.mark.parametrize(("device", "transport"), [(CPU, "gloo"), (CUDA, "nccl"), (CUDA, "peer")])
@pytest.mark.parametrize("connections", [None, "1", "8"])
def test_sizes_that_differ_are_trained(
    device: torch.device, transport: str, connections: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread used to post each transfer after what the host had issued meanwhile, which was refused over NCCL."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    schedule = build(ScheduleConfig("1f1b", 4, 8, num_chunks=1, balance=BalanceConfig()))
    refuse_standstill(schedule, Exchange.MEGATRON_1F1B, DIFFERING, device, [MeasuredLink((0, 3), transport, {})])


def test_what_goes_on_beside_the_computation_is_refused_in_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not deadlock, but every S would wait for all others."""
    posted = Exchange.POSTED
    first, second = (
        build(ScheduleConfig("1f1b", 4, 8, vocabulary=split)) for split in (Vocabulary.ONE, Vocabulary.TWO)
    )
    refuse_standstill(second, posted, PLAIN, CUDA, [])
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    refuse_standstill(second, posted, PLAIN, CPU, [])
    refuse_standstill(first, posted, PLAIN, CUDA, [])
    with pytest.raises(ValueError, match=r"with CUDA_DEVICE_MAX_CONNECTIONS=1, .*: drop .* use --bpipe-vocabulary 1"):
        refuse_standstill(second, posted, PLAIN, CUDA, [])


def test_launches_that_block_are_judged_by_the_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive that is posted ahead blocks its host, so most plans of our own loop deadlock."""
    schedule = build(ScheduleConfig("1f1b", 4, 8, num_chunks=1, balance=BalanceConfig()))
    links = [MeasuredLink((0, 3), "nccl", {})]
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert wait_level(PLAIN, CUDA) == (WaitLevel.BLOCKING_LAUNCHES, "CUDA_LAUNCH_BLOCKING=1")
    message = (
        r"with CUDA_LAUNCH_BLOCKING=1, ranks can wait for each other for ever: drop it, or use a schedule that "
        r"Megatron's own loops run\. no deadlock: rank \d, slot \d"
    )
    for link in (links, []):
        with pytest.raises(ValueError, match=message):
            refuse_standstill(schedule, Exchange.POSTED, PLAIN, CUDA, link)
    refuse_standstill(schedule, Exchange.MEGATRON_1F1B, PLAIN, CUDA, links)
    refuse_standstill(schedule, Exchange.POSTED, PLAIN, CPU, links)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    refuse_standstill(schedule, Exchange.POSTED, PLAIN, CUDA, links)
