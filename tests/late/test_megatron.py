"""Megatron's unmodified trainer on late devices, one process per rank, trains the bits of its stock loop on CPUs.

Losses, gradients and norms of each iteration are compared, and the final weights. Megatron's loops wait for the device
after each batch of messages (`batch_p2p_sync`); with --bpipe they do not.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import allocated_bytes
from bpipe.build import ScheduleConfig, build
from bpipe.record.read import read_run
from bpipe.schedule.memory import memory_of, peak_counts
from tests.gloo.conftest import Outcome
from tests.late.devices import AS_LATE, COMPUTE_LAST, COPIES_LAST, Draw
from tests.late.training import LateCase, close_parents, train

pytestmark = pytest.mark.timeout(1200)

BPIPE = "--bpipe --bpipe-min-bytes 1024 --bpipe-poison --bpipe-timeout 60 --bpipe-transport"
BATCH = "--global-batch-size 16"
INTERLEAVED = f"{BATCH} --num-layers 8 --num-virtual-stages-per-pipeline-rank 2"
# The same slices on CPUs, without evictions.
SLICES = f"{BATCH} --bpipe-slices 4"
# Replays draw no new numbers on late devices.
REPLAYABLE = "--attention-dropout 0 --hidden-dropout 0 --no-check-for-nan-in-loss-and-grad"
UNCAPTURED = f"{BATCH} --train-iters 5 {REPLAYABLE}"
# Five iterations of 4 micro-batches, and four of 8.
UNCAPTURED_GROWS = f"--step-batch-size-schedule '0:8 2560:16' --train-iters 9 {REPLAYABLE}"
UNCAPTURED_CHUNKS = f"{UNCAPTURED} --num-layers 8 --num-virtual-stages-per-pipeline-rank 2"
# Two eager iterations; the third is captured and then replayed.
CAPTURED = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2"
STOCK = {
    "1f1b": BATCH,
    "interleaved": INTERLEAVED,
    "slices": SLICES,
    "uncaptured": UNCAPTURED,
    "uncaptured_chunks": UNCAPTURED_CHUNKS,
    "uncaptured_grows": UNCAPTURED_GROWS,
}
# More than a tiny model needs: nothing is evicted after the first iteration.
BUDGET_GIB = 1
OWN_MEMORY = f"{BPIPE} auto --bpipe-hosts host"
ALL_HOSTS = f"{BPIPE} auto --bpipe-hosts all --bpipe-bound 6"

# By name: the stock run with the expected results, our flags, and the draw.
CASES: dict[str, tuple[str, str, Draw]] = {
    "stock": ("1f1b", "", Draw(1, COMPUTE_LAST)),
    "stock_blocking": ("1f1b", "", Draw(1, launch_blocks=True)),
    "nccl": ("1f1b", f"{BPIPE} nccl", Draw(1, COPIES_LAST)),
    "peer": ("1f1b", f"{BPIPE} peer", Draw(1, AS_LATE)),
    "host": ("1f1b", f"{BPIPE} host", Draw(2)),
    "auto": ("1f1b", f"{BPIPE} auto", Draw(3, eagerness=0.3)),
    "own_memory": ("1f1b", OWN_MEMORY, Draw(4)),
    "pool": ("1f1b", f"{BPIPE} nccl --bpipe-hosts pool --bpipe-bound 2,3,3,3", Draw(16)),
    "all_hosts": ("interleaved", ALL_HOSTS, Draw(17, COPIES_LAST)),
    "all_hosts_late": ("interleaved", ALL_HOSTS, Draw(18, AS_LATE)),
    "own_memory_compute_last": ("1f1b", OWN_MEMORY, Draw(19, COMPUTE_LAST)),
    "nccl_blocking": ("1f1b", f"{BPIPE} nccl", Draw(1, launch_blocks=True)),
    "timers_1": ("1f1b", f"{BPIPE} nccl --timing-log-level 1", Draw(5)),
    "timers_2": ("1f1b", f"{BPIPE} nccl --timing-log-level 2", Draw(6, COMPUTE_LAST)),
    "own_loop": ("1f1b", f"{BPIPE} nccl --bpipe-executor", Draw(7)),
    "own_loop_split": ("1f1b", f"{BPIPE} peer --bpipe-schedule 1f1b-split", Draw(8, COPIES_LAST)),
    "interleaved_stock": ("interleaved", "", Draw(9)),
    "interleaved_nccl": ("interleaved", f"{BPIPE} nccl", Draw(10, COMPUTE_LAST)),
    "interleaved_peer": ("interleaved", f"{BPIPE} peer", Draw(11, COPIES_LAST)),
    "slices_nccl": ("slices", f"{BPIPE} nccl", Draw(12, COPIES_LAST)),
    "slices_peer": ("slices", f"{BPIPE} peer", Draw(13, COMPUTE_LAST)),
    "slices_split": ("slices", f"{BPIPE} nccl --bpipe-schedule 1f1b-split", Draw(14, AS_LATE)),
    "captured_peer": ("uncaptured", f"{CAPTURED} {BPIPE} peer --bpipe-report {{folder}}/report", Draw(20)),
    "captured_host": ("uncaptured", f"{CAPTURED} {BPIPE} host", Draw(21, COPIES_LAST)),
    "captured_nccl": ("uncaptured", f"{CAPTURED} {BPIPE} nccl", Draw(22, eagerness=0.3)),
    "captured_own_memory": ("uncaptured", f"{CAPTURED} {OWN_MEMORY}", Draw(23, COMPUTE_LAST)),
    "captured_own_loop": ("uncaptured", f"{CAPTURED} {BPIPE} peer --bpipe-schedule zb-h1", Draw(24, AS_LATE)),
    "captured_grows": ("uncaptured_grows", f"{CAPTURED} {BPIPE} peer", Draw(26)),
    "captured_grows_nccl": ("uncaptured_grows", f"{CAPTURED} {BPIPE} nccl", Draw(27, COPIES_LAST)),
    "captured_learns": ("uncaptured", f"{CAPTURED} {BPIPE} peer --bpipe-memory auto:{BUDGET_GIB}", Draw(29)),
    "captured_interleaved": ("uncaptured_chunks", f"{CAPTURED} {BPIPE} peer", Draw(25, AS_LATE)),
    "slices_own_memory": ("slices", f"{OWN_MEMORY} --bpipe-bound 3", Draw(15)),
}
DAILY = (
    "nccl",
    "peer",
    "timers_1",
    "all_hosts",
    "slices_nccl",
    "captured_peer",
    "captured_grows",
)


@pytest.fixture(scope="module", autouse=True)
def parents() -> Iterator[None]:
    yield
    close_parents()


def slowly(names: Iterable[str]) -> list[object]:
    return [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    cases = [LateCase(name, flags) for name, flags in STOCK.items()]
    return train("cpu", 4, cases, tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def on_late_devices(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Outcome:
    slow = request.config.getoption("--slow")
    folder = tmp_path_factory.mktemp("late")
    cases = [
        LateCase(name, f"{STOCK[stock]} {flags.format(folder=folder)}", draw)
        for name, (stock, flags, draw) in CASES.items()
        if slow or name in DAILY
    ]
    # With one hardware queue, plans would be refused before they run.
    return train("late", 4, cases, folder, 900.0, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})


def same(outcome: Outcome, case: str, stock: Outcome, of: str, world: int) -> None:
    for rank in range(world):
        actual, expected = outcome.record(case, rank), stock.record(of, rank)
        assert actual == expected
        assert len({step["gradients"] for step in expected["iterations"]}) == len(expected["iterations"])


@pytest.mark.parametrize("case", slowly(CASES))
def test_late_devices_train_as_the_stock_loop_on_cpus(on_cpus: Outcome, on_late_devices: Outcome, case: str) -> None:
    print(CASES[case][2])
    same(on_late_devices, case, on_cpus, CASES[case][0], 4)


def test_transports_carry_what_they_are_to(on_late_devices: Outcome) -> None:
    for transport in ("nccl", "peer"):
        assert f"bpipe:   stages 0 and 3: {transport} " in on_late_devices.said(transport)
    # The pair's transport is what a busy machine measured as the fastest.
    tiers = on_late_devices.said("all_hosts")
    for link in ("stages 0 and 3: ", *(f"stage {stage} and its node's CPU memory: host " for stage in range(3))):
        assert f"bpipe:   {link}" in tiers


def test_a_report_has_the_iterations_before_the_capture_and_all_losses(on_late_devices: Outcome) -> None:
    run = read_run(on_late_devices.folder / "report")
    assert run.info.captured == 3
    assert [[*record.iterations] for record in run.ranks] == [[2]] * 4
    assert [*run.step_s] == [1, 2, 3, 4, 5]
    assert run.graph_pool_bytes is not None
    assert run.graph_pool_bytes > 0


def test_a_batch_that_grows_is_captured_anew(on_late_devices: Outcome) -> None:
    """Megatron alone replays the four captured micro-batches, and trains on half of a batch of eight."""
    assert on_late_devices.said("captured_grows").count("this iteration is captured into a CUDA graph") == 2


@pytest.mark.slow
def test_eight_ranks_make_their_communicators_and_train(tmp_path: Path) -> None:
    """Eight ranks deadlocked before communicators were made in advance: a cycle of a sender's sizes, a message and the
    creation of a communicator."""
    flags = "--global-batch-size 32 --train-iters 1"
    folders = [tmp_path / device for device in ("cpu", "late")]
    for folder in folders:
        folder.mkdir()
    stock = train("cpu", 8, [LateCase("m16", flags)], folders[0])
    cases = [LateCase(kind, f"{flags} {BPIPE} {kind}", Draw(1)) for kind in ("nccl", "peer")]
    late = train("late", 8, cases, folders[1], 600.0, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    for case in cases:
        same(late, case.name, stock, "m16", 8)


VOCABULARY = f"{BATCH} --bpipe-min-bytes 1024 --bpipe-timeout 60 --bpipe-vocabulary"


@pytest.mark.slow
def test_a_vocabulary_in_shards_trains_as_the_same_plan_on_cpus(tmp_path: Path) -> None:
    """On CPUs, ranks' parts are also added in the order of late groups: NCCL promises no order, and gloo's differs."""
    folders = [tmp_path / device for device in ("cpu", "late")]
    for folder in folders:
        folder.mkdir()
    on_cpus = train("cpu", 4, [LateCase(number, f"{VOCABULARY} {number}") for number in ("1", "2")], folders[0])
    cases = {
        LateCase(f"{number}_draw{draw.seed}", f"{VOCABULARY} {number}", draw): number
        for number in ("1", "2")
        for draw in (Draw(3, eagerness=0.8), Draw(1, COMPUTE_LAST), Draw(2))
    }
    late = train("late", 4, [*cases], folders[1], 600.0, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    for case, number in cases.items():
        same(late, case.name, on_cpus, number, 4)


def memory_said(outcome: Outcome, case: str) -> dict[int, list[tuple[int, ...]]]:
    """Return by stage, for each iteration, bytes in segments, segments taken, and peak allocated bytes."""
    by_stage = {}
    for rank in range(len(outcome.logs)):
        lines = [
            line.split(": ")[1] for line in outcome.said(case, rank).splitlines() if line.startswith("memory of stage")
        ]
        (stage,) = {int(line.split()[0]) for line in lines}
        by_stage[stage] = [tuple(map(int, line.split()[1:])) for line in lines]
    return by_stage


@pytest.mark.slow
def test_memory_is_what_the_schedule_says_and_is_taken_once(tmp_path: Path) -> None:
    """Compare peaks with stock's in evicted micro-batches. From the second iteration on, with optimizer state, no
    segment is taken."""
    more = f"{BATCH} --train-iters 6"
    stock = LateCase("stock", more, Draw(1, AS_LATE), memory=True)
    cases = [LateCase(kind, f"{more} {BPIPE} {kind}", Draw(2), memory=True) for kind in ("nccl", "peer")]
    late = train("late", 4, [stock, *cases], tmp_path, 600.0, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    peaks = {}
    for case in (stock, *cases):
        printed = memory_said(late, case.name)
        for stage, iterations in printed.items():
            steady = {(reserved, taken) for reserved, taken, _ in iterations[1:]}
            assert len(steady) == 1, (case.name, stage, iterations)
            assert len({peak for _, _, peak in iterations[2:]}) == 1, (case.name, stage, iterations)
        peaks[case.name] = [printed[stage][-1][-1] for stage in range(4)]
    plain, balanced = (build(ScheduleConfig("1f1b", 4, 8, balance=how)) for how in (None, BalanceConfig()))
    (microbatch,) = {peaks["stock"][0] - peaks["nccl"][0], peaks["stock"][0] - peaks["peer"][0]}
    for stage in range(4):
        own, hosted = allocated_bytes(balanced, stage, memory_of([1] * 4))
        own -= peak_counts(plain)[stage]
        # Lent memory is not in torch's allocator.
        assert peaks["peer"][stage] - peaks["stock"][stage] == own * microbatch, peaks
        assert peaks["nccl"][stage] - peaks["stock"][stage] == (own + hosted) * microbatch, peaks
