"""Transports between real processes, without Megatron: for a long time, and while one of the processes breaks."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gloo.conftest import ROOT, finish, free_ports, start
from tests.gloo.soak import ITERATIONS_A_TURN, PROGRAMS, TURNS, Scenario

# Allocators keep pools, and which of a few thread arenas serves a copy is chance. One micro-batch that is kept an
# iteration is more.
RESIDENT_TOLERANCE_BYTES = 24 << 20
EVICTOR, ACCEPTOR = 0, 3
# A process that died is noticed by its closed connections, whatever the time-out is; one that stopped only by it. Busy
# machines need some.
TIMEOUT_S = {"SIGKILL": 30.0, "SIGSTOP": 6.0}
# Of one rank, once links were chosen: the world, and of a pair the group for messages and one a direction. What lost
# must be gone.
GROUPS = {None: 1, "peer": 2, "gloo": 4}
# A rank that moves nothing: who waits for it waits for its messages.
BETWEEN = 1
# Of the first program, p=4 and m=8. Stage 3 hosts 0EVICT1 from its start to 3B2, so after 3F1 it holds it.
MOMENTS = {
    EVICTOR: ("start", "copying", "0F3", "between"),
    BETWEEN: ("start", "sending", "1B2", "between"),
    ACCEPTOR: ("start", "copying", "3F1", "between"),
}
# Stages 0 and 1 share stage 3, which hosts for both of them.
SHARED = (3, 2, 2, 6)
SHARED_MOMENTS = {**MOMENTS, BETWEEN: ("start", "copying", "1F2", "between")}
# Micro-batches in 4 slices: stage 3 hosts 0EVICT4, the first slice of the second micro-batch, from 0F4 to 0B6. Others
# break between the forwards of a micro-batch's slices, or between their backwards.
SLICED_MOMENTS = {
    EVICTOR: ("start", "copying", "0F2", "0F7", "0B1", "0B4", "between"),
    BETWEEN: ("sending", "1F6", "1B2"),
    ACCEPTOR: ("copying", "3F5", "3B3", "3B1"),
}
# Backwards in halves and two chunks per rank, in groups of two micro-batches: stage 3's rank hosts 0EVICT1 from before
# 7F0 on.
GROUPED = ("grouped-interleaved", 2, 2)
GROUPED_MOMENTS = {EVICTOR: ("copying", "4I0"), BETWEEN: ("sending", "5W1"), ACCEPTOR: ("copying", "7F0")}


@dataclass
class Outcome:
    """What the ranks of one scenario left."""

    scenario: Scenario
    codes: list[int | None]
    seconds: float
    records: list[dict[str, Any]]
    logs: list[str]


def run(scenarios: Sequence[Scenario], folder: Path) -> list[Outcome]:
    """Run the scenarios one after another, in processes of their own."""
    (folder / "scenarios.json").write_text(json.dumps([asdict(scenario) for scenario in scenarios]))
    command = [sys.executable, "-m", "tests.gloo.soak", str(folder / "scenarios.json"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            assert process.wait() == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    outcomes = []
    for scenario in scenarios:
        place = folder / scenario.name
        outcome = json.loads((place / "outcome.json").read_text())
        logs = [(place / f"rank{rank}.log").read_text(errors="replace") for rank in range(scenario.ranks)]
        paths = [place / f"rank{rank}.json" for rank in range(scenario.ranks)]
        records = [json.loads(path.read_text()) for path in paths if path.exists()]
        outcomes.append(Outcome(scenario, outcome["codes"], outcome["seconds"], records, logs))
    return outcomes


def assert_nothing_lost_and_nothing_kept(outcome: Outcome) -> None:
    assert outcome.codes == [0] * outcome.scenario.ranks, "\n".join(log[-2000:] for log in outcome.logs)
    for rank, record in enumerate(outcome.records):
        where = f"{outcome.scenario.name}, rank {rank}"
        assert record["different"] == [], f"{where}: gradients differ"
        assert record["outlived"] == 0, f"{where}: activations outlived their iteration"
        assert record["kept"] == 0, f"{where}: keys outlived their iteration"
        assert record["microbatches"] >= TURNS * ITERATIONS_A_TURN * sum(m for m, _ in PROGRAMS)
        # The first turns connect and fill pools.
        turns = len(record["descriptors"]) // 3
        assert len(set(record["descriptors"][turns - 1 :])) == 1, f"{where}: open files {record['descriptors']}"
        assert len(set(record["threads"])) == 1, f"{where}: threads {record['threads']}"
        early, late = record["resident_bytes"][turns - 1 : 2 * turns], record["resident_bytes"][-turns:]
        growth = statistics.median(late) - statistics.median(early)
        assert growth < RESIDENT_TOLERANCE_BYTES, f"{where}: {growth / 2**20:.1f} MiB more resident at the end"
    assert outcome.records[EVICTOR]["transfers"] > 0


@pytest.mark.timeout(180)
def test_a_short_soak(tmp_path: Path) -> None:
    pairs = [Scenario(name, name, seconds=1.5) for name in ("gloo", "peer")]
    pool = Scenario("pool", "peer", seconds=0.7, bounds=SHARED)
    slices = Scenario("slices", "peer", seconds=0.7, slices=4)
    for outcome in run([*pairs, pool, slices], tmp_path):
        assert_nothing_lost_and_nothing_kept(outcome)
        for record in outcome.records if outcome.scenario.bounds is None else ():
            assert record["groups"] == GROUPS[record["transport"]], f"{outcome.scenario.name}: {record}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["gloo", "peer", "host"])
def test_a_long_soak(transport: str, tmp_path: Path) -> None:
    """Six stages have two pairs, and host buffers that are filled again while what left them is on its way."""
    (outcome,) = run([Scenario(transport, transport, ranks=6, seconds=60.0, limit_s=300.0)], tmp_path)
    assert_nothing_lost_and_nothing_kept(outcome)
    print(
        f"{transport}: {outcome.records[0]['microbatches']} micro-batches, {outcome.records[0]['transfers']} "
        f"transfers of stage 0"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["gloo", "peer"])
def test_a_long_soak_of_a_pool(transport: str, tmp_path: Path) -> None:
    """Three stages share one host, and each of them has a partner of its own beside it in another program."""
    pool = Scenario(transport, transport, 6, seconds=0.0, microbatches=3000, limit_s=800.0, bounds=(4, 4, 3, 3, 5, 8))
    (outcome,) = run([pool], tmp_path)
    assert_nothing_lost_and_nothing_kept(outcome)
    assert all(record["microbatches"] >= 3000 for record in outcome.records)
    print(
        f"{transport}: {outcome.records[0]['microbatches']} micro-batches, {outcome.records[0]['transfers']} "
        f"transfers of rank 0"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["gloo", "peer"])
def test_a_long_soak_of_halves_in_groups(transport: str, tmp_path: Path) -> None:
    """Backwards in halves, two chunks per rank in groups of two micro-batches, two pairs, freed memory poisoned."""
    grouped = Scenario(
        transport, transport, 6, "grouped-interleaved", 2, 2, seconds=0.0, microbatches=4000, limit_s=800.0
    )
    (outcome,) = run([grouped], tmp_path)
    assert_nothing_lost_and_nothing_kept(outcome)
    assert all(record["microbatches"] >= 4000 for record in outcome.records)
    assert all(outcome.records[rank]["transfers"] > 400 for rank in (0, 1))
    print(
        f"{transport}: {outcome.records[0]['microbatches']} micro-batches, {outcome.records[0]['transfers']} "
        f"transfers of rank 0"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["gloo", "peer"])
def test_a_long_soak_of_slices(transport: str, tmp_path: Path) -> None:
    """4,000 slices: keys and values stay, what else a slice saves leaves, and freed memory is poisoned."""
    sliced = Scenario(transport, transport, seconds=0.0, microbatches=4000, limit_s=800.0, slices=4)
    (outcome,) = run([sliced], tmp_path)
    assert_nothing_lost_and_nothing_kept(outcome)
    assert all(record["microbatches"] >= 4000 for record in outcome.records)
    assert outcome.records[EVICTOR]["transfers"] > 400
    print(
        f"{transport}: {outcome.records[0]['microbatches']} slices, {outcome.records[0]['transfers']} transfers of "
        f"rank 0 in {outcome.seconds:.0f} s"
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["gloo", "peer"])
def test_a_long_soak_of_sizes_that_differ(transport: str, tmp_path: Path) -> None:
    """Every micro-batch has rows of its own, and the largest grow: some stay at home, and host buffers grow and are
    given back."""
    (outcome,) = run([Scenario(transport, transport, seconds=45.0, limit_s=300.0, differing=True)], tmp_path)
    assert_nothing_lost_and_nothing_kept(outcome)
    first = outcome.records[EVICTOR]
    assert first["stayed"] > 0
    assert first["grown"] > 1
    print(
        f"{transport}: {first['microbatches']} micro-batches, {first['transfers']} transfers, {first['stayed']} "
        f"stayed at home"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["gloo", "peer"])
def test_a_long_soak_of_a_pool_of_sizes_that_differ(transport: str, tmp_path: Path) -> None:
    """Three ranks with rooms that grow share one host, which gives each its own back."""
    pool = Scenario(
        transport,
        transport,
        6,
        seconds=50.0,
        microbatches=1000,
        limit_s=800.0,
        bounds=(4, 4, 3, 3, 5, 8),
        differing=True,
    )
    (outcome,) = run([pool], tmp_path)
    assert_nothing_lost_and_nothing_kept(outcome)
    senders = outcome.records[:3]
    assert all(record["microbatches"] >= 1000 and record["transfers"] > 300 for record in senders)
    assert all(record["stayed"] > 0 and record["grown"] > 1 for record in senders)
    print(
        f"{transport}: {senders[0]['microbatches']} micro-batches, {[record['transfers'] for record in senders]} "
        f"transfers"
    )


def breaking(
    transport: str,
    rank: int,
    moment: str,
    what: str,
    how: tuple[str, int, int | None] = ("1f1b", 1, None),
    bounds: tuple[int, ...] | None = None,
    slices: int = 1,
) -> Scenario:
    """`how`: a schedule, its chunks and its groups. `bounds`: of a pool."""
    schedule, chunks, group = how
    kind = f"{'' if bounds is None else '-pool'}{'' if slices == 1 else '-slices'}"
    name, fault = f"{transport}-{what}-{rank}-{moment}{kind}", (rank, moment, what)
    sizes = (4, schedule, chunks, group, 1.0)
    return Scenario(
        name, transport, *sizes, timeout_s=TIMEOUT_S[what], limit_s=60.0, fault=fault, bounds=bounds, slices=slices
    )


def assert_the_others_end_and_say_where(outcome: Outcome) -> None:
    assert outcome.scenario.fault is not None
    broken, _, what = outcome.scenario.fault
    if what == "SIGKILL":
        assert outcome.seconds < TIMEOUT_S[what], f"{outcome.scenario.name}: the others noticed by their time-out only"
    for rank, (code, log) in enumerate(zip(outcome.codes, outcome.logs, strict=True)):
        where = f"{outcome.scenario.name}, rank {rank}: exit code {code}\n{log[-2000:]}"
        if rank == broken:
            assert code == (-signal.SIGKILL if what == "SIGKILL" else None), where
            continue
        assert code == 1, where
        # One error, with its action, what it waited for and how long at most: a transfer, or a message of a neighbour.
        # And how far it was.
        transfer = rf"rank {rank}, stage {rank}: \d(EVICT|LOAD|HOST|RETURN)\d+ with stage \d did not (end \(it was \w+\)|start)"
        message = (
            rf"rank {rank}: \d[FBI]\d+>\d[FBI]\d+ (did not pass|could not be (sent|posted)); the other end is rank \d"
        )
        found = re.findall(
            rf"TransferError: ({transfer}|{message})[;:] the time-out is {outcome.scenario.timeout_s:g} s, --bpipe-timeout: ",
            log,
        )
        assert len(found) == 1, where
        assert re.search(rf"rank {rank}, stage {rank}, after (the start|\d[FBIW]\d+)", log), where


@pytest.mark.timeout(120)
def test_a_process_that_breaks_ends_the_others(tmp_path: Path) -> None:
    """One of each kind; the slow test has all of them."""
    scenarios = [
        breaking("peer", ACCEPTOR, "start", "SIGKILL"),
        breaking("peer", EVICTOR, "copying", "SIGKILL"),
        breaking("gloo", ACCEPTOR, "copying", "SIGSTOP"),
        breaking("gloo", BETWEEN, "sending", "SIGKILL"),
        breaking("peer", ACCEPTOR, "3F1", "SIGKILL", bounds=SHARED),
        breaking("gloo", BETWEEN, "copying", "SIGKILL", bounds=SHARED),
        breaking("gloo", ACCEPTOR, "3B1", "SIGKILL", slices=4),
    ]
    for outcome in run(scenarios, tmp_path):
        assert_the_others_end_and_say_where(outcome)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("transport", ["gloo", "peer"])
def test_whenever_a_process_breaks_between_slices_the_others_end(transport: str, what: str, tmp_path: Path) -> None:
    every = [(rank, moment) for rank in SLICED_MOMENTS for moment in SLICED_MOMENTS[rank]]
    for outcome in run([breaking(transport, *one, what, slices=4) for one in every], tmp_path):
        if outcome.scenario.fault == (ACCEPTOR, "copying", what) and transport == "peer":
            assert outcome.codes == [0] * 4
        else:
            assert_the_others_end_and_say_where(outcome)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("transport", ["gloo", "peer"])
def test_whenever_one_of_three_that_share_a_host_breaks_the_others_end(
    transport: str, what: str, tmp_path: Path
) -> None:
    """The host of two, and each of those for whom it hosts."""
    every = [(rank, moment) for rank in SHARED_MOMENTS for moment in SHARED_MOMENTS[rank]]
    for outcome in run([breaking(transport, *one, what, bounds=SHARED) for one in every], tmp_path):
        if outcome.scenario.fault == (ACCEPTOR, "copying", what) and transport == "peer":
            assert outcome.codes == [0] * 4
        else:
            assert_the_others_end_and_say_where(outcome)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("transport", ["gloo", "peer"])
@pytest.mark.parametrize(
    ("how", "moments"), [(("1f1b", 1, None), MOMENTS), (GROUPED, GROUPED_MOMENTS)], ids=["1f1b", "grouped"]
)
def test_whenever_a_process_breaks_the_others_end(
    how: tuple[str, int, int | None], moments: dict[int, tuple[str, ...]], transport: str, what: str, tmp_path: Path
) -> None:
    for outcome in run(
        [breaking(transport, rank, moment, what, how) for rank in moments for moment in moments[rank]], tmp_path
    ):
        if outcome.scenario.fault == (ACCEPTOR, "copying", what) and transport == "peer":
            # Its acceptor copies nothing: nothing breaks, and that is the point of it.
            assert outcome.codes == [0] * 4
        else:
            assert_the_others_end_and_say_where(outcome)


@pytest.mark.timeout(120)
def test_a_link_that_carries_nothing_is_given_up_and_another_taken(tmp_path: Path) -> None:
    """With NCCL its watchdog ended the process before anything else was tried."""
    script = [str(ROOT / "tests/gloo/hanging_worker.py"), str(tmp_path)]
    outcome = finish(start(2, script, tmp_path, free_ports(1)[0]), tmp_path, 60.0)
    assert outcome.codes == [0, 0], outcome.logs
    for rank in range(2):
        left = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert left["transport"] == "peer"
        assert left["refused"] == {"gloo": "nothing arrived within 3 s (half of --bpipe-timeout)"}
