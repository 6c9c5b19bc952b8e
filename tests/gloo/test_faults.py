"""Whatever goes wrong ends every rank, soon, with an error that says where; and leaves no process behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gloo.conftest import BPIPE, ITERATIONS, ROOT, TINY, Outcome, _free_ports, finish, start

# Without placement, process r is stage r.
STAGES = (*ITERATIONS, "--num-layers", "4", "--pipeline-model-parallel-size", "4", "--global-batch-size", "16", "--bpipe-placement", "none")


def run(folder: Path, arguments: Sequence[str], fault: str | None = None, only: int | None = None) -> Outcome:
    """Train on four ranks; wait for all of them to end, or for rank `only`."""
    script = [str(ROOT / "tests/gloo/faulty.py"), *TINY, *STAGES, *arguments]
    processes = start(4, script, folder, _free_ports(1)[0], {"FAULT": fault} if fault else None)
    return finish(processes, folder, timeout_s=90.0, only=only)


@pytest.mark.timeout(120)
def test_a_partner_that_dies_ends_the_others(tmp_path: Path) -> None:
    """Stage 3 hosts for stage 0 and dies with two of its micro-batches."""
    outcome = run(tmp_path, BPIPE, fault="3 3F2 SIGKILL")
    assert outcome.codes[3] == -signal.SIGKILL
    for rank in range(3):
        assert outcome.codes[rank] not in (0, None), f"rank {rank} did not notice"
        assert f"bpipe: rank {rank}, stage {rank}, after " in outcome.logs[rank], outcome.logs[rank][-2000:]
    assert outcome.seconds < 60


@pytest.mark.timeout(120)
def test_a_partner_that_stops_ends_its_evictor_within_the_time_out(tmp_path: Path) -> None:
    """Stage 3 freezes: its connections stay open, so only the time-out can tell. The launcher ends the others when stage 0 has gone.

    Two-sided: who copies by itself does not need a partner that answers, and waits in Megatron's own messages as it would without us.
    """
    outcome = run(tmp_path, [*BPIPE, "--bpipe-transport", "gloo", "--bpipe-timeout", "5"], fault="3 3F2 SIGSTOP", only=0)
    assert outcome.codes[0] not in (0, None)
    assert "rank 0, stage 0: 0" in outcome.logs[0]
    assert "with stage 3 did not end" in outcome.logs[0]
    assert "the time-out is 5 s, --bpipe-timeout" in outcome.logs[0]


BAD = [
    (["--bpipe", "--bpipe-transport", "pigeon"], "argument --bpipe-transport: invalid choice: 'pigeon'"),
    (["--bpipe", "--bpipe-transport", "nccl"], "--bpipe-transport nccl cannot move memory of device cpu: use gloo, peer, host or auto"),
    (["--bpipe", "--bpipe-timeout", "0"], "--bpipe-timeout 0: must be above 0 seconds"),
    (["--bpipe-report-iterations", "5-3"], "--bpipe-report-iterations 5-3: must be a number or two with a hyphen, such as 3-5"),
    (["--bpipe", "--global-batch-size", "7"], "(7) must be divisible by eval_micro_batch_size (2) * data_parallel_size (1)"),
    (
        ["--bpipe", "--num-experts", "2"],
        "--bpipe: how much a mixture of experts saves depends on where the router sends the tokens",
    ),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("arguments", "message"), BAD[:2])
def test_bad_input_ends_every_rank(tmp_path: Path, arguments: list[str], message: str) -> None:
    """One that is seen while parsing, one that is seen when the ranks have met."""
    outcome = run(tmp_path, arguments)
    assert all(code not in (0, None) for code in outcome.codes), outcome.codes
    for log in outcome.logs:
        assert log.count(message) == 1, log[-2000:]


@pytest.mark.timeout(120)
def test_nothing_large_enough_to_move_is_refused(tmp_path: Path) -> None:
    """Only stage 0 measures a micro-batch; the others see it go."""
    outcome = run(tmp_path, ["--bpipe", "--bpipe-min-bytes", "1000000000"])
    assert all(code not in (0, None) for code in outcome.codes), outcome.codes
    assert "no storage of at least 1000000000 bytes belongs to it alone" in outcome.logs[0]


@pytest.mark.timeout(60)
def test_bad_arguments_are_refused_before_the_ranks_meet(tmp_path: Path) -> None:
    cases = [[*TINY, *STAGES, *arguments] for arguments, _ in [BAD[0], *BAD[2:]]]
    script = [str(ROOT / "tests/gloo/faulty.py")]
    outcome = finish(start(1, script, tmp_path, _free_ports(1)[0], {"CASES": json.dumps(cases), "WORLD_SIZE": "4"}), tmp_path, 50)
    parts = outcome.logs[0].split("=== refused")
    assert len(parts) == len(cases) + 1
    for part, (_, message) in zip(parts, [BAD[0], *BAD[2:]], strict=False):
        assert message in part
