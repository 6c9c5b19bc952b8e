"""Long runs of the transports between real processes, without Megatron."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gloo.conftest import ROOT
from tests.gloo.soak import ITERATIONS_A_TURN, PROGRAMS, TURNS, Scenario

# Allocators keep pools, and copies come from random thread arenas. A leak of one micro-batch per iteration exceeds
# this.
RESIDENT_TOLERANCE_BYTES = 24 << 20
EVICTOR = 0
# Groups per rank after links were chosen: the world, and per pair one for messages and one per direction. Groups of the
# transports that were not chosen must be gone.
GROUPS = {None: 1, "peer": 2, "gloo": 4}
# Stages 0 and 1 share stage 3, which hosts for both of them.
SHARED = (3, 2, 2, 6)


@dataclass
class Outcome:
    """The results of one scenario's ranks."""

    scenario: Scenario
    codes: list[int | None]
    records: list[dict[str, Any]]
    logs: list[str]


def run(scenarios: Sequence[Scenario], folder: Path) -> list[Outcome]:
    """Run the scenarios one after another, each in its own processes."""
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
        codes = json.loads((place / "codes.json").read_text())
        logs = [(place / f"rank{rank}.log").read_text(errors="replace") for rank in range(scenario.ranks)]
        paths = [place / f"rank{rank}.json" for rank in range(scenario.ranks)]
        records = [json.loads(path.read_text()) for path in paths if path.exists()]
        outcomes.append(Outcome(scenario, codes, records, logs))
    return outcomes


def assert_nothing_lost_and_nothing_kept(outcome: Outcome) -> None:
    assert outcome.codes == [0] * outcome.scenario.ranks, "\n".join(log[-2000:] for log in outcome.logs)
    for rank, record in enumerate(outcome.records):
        prefix = f"{outcome.scenario.name}, rank {rank}"
        assert record["different"] == [], f"{prefix}: gradients differ"
        assert record["outlived"] == 0, f"{prefix}: activations outlived their iteration"
        assert record["microbatches"] >= TURNS * ITERATIONS_A_TURN * sum(m for m, _ in PROGRAMS)
        # The first turns connect and fill pools.
        turns = len(record["descriptors"]) // 3
        assert len(set(record["descriptors"][turns - 1 :])) == 1, f"{prefix}: open files {record['descriptors']}"
        assert len(set(record["threads"])) == 1, f"{prefix}: threads {record['threads']}"
        early, late = record["resident_bytes"][turns - 1 : 2 * turns], record["resident_bytes"][-turns:]
        growth = statistics.median(late) - statistics.median(early)
        assert growth < RESIDENT_TOLERANCE_BYTES, f"{prefix}: {growth / 2**20:.1f} MiB more resident at the end"
    assert outcome.records[EVICTOR]["transfers"] > 0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_short_soak(tmp_path: Path) -> None:
    pairs = [Scenario(name, name, seconds=1.5) for name in ("gloo", "peer")]
    pool = Scenario("pool", "peer", seconds=0.7, bounds=SHARED)
    for outcome in run([*pairs, pool], tmp_path):
        assert_nothing_lost_and_nothing_kept(outcome)
        for record in outcome.records if outcome.scenario.bounds is None else ():
            assert record["groups"] == GROUPS[record["transport"]], f"{outcome.scenario.name}: {record}"


# Six stages have two pairs, and a host buffer is refilled while its previous contents are still being sent.
POOL = (4, 4, 3, 3, 5, 8)
LONG: dict[str, dict[str, Any]] = {
    "pairs": {"ranks": 6, "seconds": 60.0},
    # Three stages share one host, and each has a partner of its own in another program.
    "pool": {"ranks": 6, "seconds": 0.0, "microbatches": 3000, "bounds": POOL},
    # The largest micro-batches grow: some are not evicted, and host buffers are reallocated.
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
