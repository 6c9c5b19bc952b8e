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


# Six stages have two pairs, and host buffers that are filled again while what left them is on its way.
POOL = (4, 4, 3, 3, 5, 8)
LONG: dict[str, dict[str, Any]] = {
    "pairs": {"ranks": 6, "seconds": 60.0},
    # Three stages share one host, and each of them has a partner of its own in another program.
    "pool": {"ranks": 6, "seconds": 0.0, "microbatches": 3000, "bounds": POOL},
    # Backwards in halves, two chunks per rank in groups of two micro-batches.
    "groups": {
        "ranks": 6,
        "schedule": "grouped-interleaved",
        "chunks": 2,
        "group": 2,
        "seconds": 0.0,
        "microbatches": 4000,
    },
    # Keys and values stay, and what else a slice saves leaves.
    "slices": {"seconds": 0.0, "microbatches": 4000, "slices": 4},
    # The largest micro-batches grow: some stay at home, and host buffers grow and are given back.
    "differing": {"seconds": 45.0, "differing": True},
    "differing pool": {"ranks": 6, "seconds": 50.0, "microbatches": 1000, "bounds": POOL, "differing": True},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "transport"), [*((name, transport) for name in LONG for transport in ("gloo", "peer")), ("pairs", "host")]
)
def test_a_long_soak(name: str, transport: str, tmp_path: Path) -> None:
    scenario = Scenario(transport, transport, limit_s=800.0, **LONG[name])
    (outcome,) = run([scenario], tmp_path)
    assert_nothing_lost_and_nothing_kept(outcome)
    assert all(record["microbatches"] >= scenario.microbatches for record in outcome.records)
    senders = outcome.records[: 3 if scenario.bounds else 1]
    if scenario.microbatches:
        assert all(record["transfers"] > 300 for record in senders)
    if scenario.differing:
        assert all(record["stayed"] > 0 and record["grown"] > 1 for record in senders)
    counts = [(record["microbatches"], record["transfers"], record["stayed"]) for record in senders]
    print(f"{name} over {transport}: micro-batches, transfers, and what stayed at home of each sender: {counts}")


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


# By whom and when, and how it runs: the host of two shares it with each of those for whom it hosts.
BREAKING: dict[str, tuple[dict[int, tuple[str, ...]], dict[str, Any]]] = {
    "1f1b": (MOMENTS, {}),
    "grouped": (GROUPED_MOMENTS, {"how": GROUPED}),
    "shared": (SHARED_MOMENTS, {"bounds": SHARED}),
    "slices": (SLICED_MOMENTS, {"slices": 4}),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("transport", ["gloo", "peer"])
@pytest.mark.parametrize("name", BREAKING)
def test_whenever_a_process_breaks_the_others_end(name: str, transport: str, what: str, tmp_path: Path) -> None:
    moments, how = BREAKING[name]
    scenarios = [breaking(transport, rank, moment, what, **how) for rank in moments for moment in moments[rank]]
    for outcome in run(scenarios, tmp_path):
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
