"""Any failure soon ends every rank, with an error that names its place, and leaves no process running."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from bpipe.cli import main
from bpipe.record.read import read_held
from bpipe.record.report.shortage import Shortage, shortage_of
from tests.gloo.conftest import ROOT, Outcome, finish, free_ports, start
from tests.gloo.flags import BPIPE, ITERATIONS, TINY

pytestmark = pytest.mark.timeout(120)

# Without placement, process r is stage r.
STAGES = f"{ITERATIONS} --num-layers 4 --pipeline-model-parallel-size 4 --global-batch-size 16 --bpipe-placement none"


def run(folder: Path, flags: str, fault: str | None = None, only: int | None = None, ranks: int = 4) -> Outcome:
    """Train on this many ranks; wait for all of them, or for rank `only`."""
    script = [str(ROOT / "tests/gloo/faulty.py"), *f"{TINY} {STAGES} {flags}".split()]
    processes = start(ranks, script, folder, free_ports(1)[0], {"FAULT": fault} if fault else None)
    return finish(processes, folder, timeout_s=90.0, only=only)


def test_a_partner_that_dies_ends_the_others(tmp_path: Path) -> None:
    """Stage 3 hosts for stage 0 and dies with two of its micro-batches."""
    outcome = run(tmp_path, BPIPE, fault="3 3F2 SIGKILL")
    for rank in range(3):
        assert f"bpipe: rank {rank}, stage {rank}, after " in outcome.logs[rank], outcome.logs[rank][-2000:]
    others_end(outcome, 3)


def others_end(outcome: Outcome, dead: int, last: bool = True) -> None:
    """Check that all other ranks end soon, with the first failure in their last line, or anywhere if not `last`."""
    assert outcome.codes[dead] == -signal.SIGKILL
    # Rank 0 holds the store that the others read.
    reason = (
        f"rank {dead} failed first: it does not answer, so it was killed,"
        if dead
        else "this run's store does not answer"
    )
    for rank in set(range(len(outcome.codes))) - {dead}:
        assert outcome.codes[rank] not in (0, None), f"rank {rank} did not notice"
        printed = last_line(outcome, rank) if last else outcome.logs[rank]
        assert f"bpipe: {reason}" in printed, outcome.logs[rank][-2000:]
    assert outcome.seconds < 60


def last_line(outcome: Outcome, rank: int) -> str:
    return outcome.logs[rank].rstrip().rpartition("\n")[2]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_first_failure_is_everybodys_last_line(tmp_path: Path, rank: int) -> None:
    """A stage runs out of memory: all ranks end with that cause, even if they only see a closed connection.

    Rank 0 holds the store, so it stays until the others have read it.
    """
    outcome = run(tmp_path, BPIPE, fault=f"{rank} {rank}F2 MEMORY")
    location = f"(rank {rank}, stage {rank}, after {rank}F1, at {rank}F2)"
    for survivor in range(4):
        assert outcome.codes[survivor] == 1, outcome.logs[survivor][-2000:]
        assert (
            last_line(outcome, survivor)
            == f"bpipe: rank {rank} failed first: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
            f"{location}"
        )
    assert outcome.seconds < 60


def test_megatrons_own_exit_waits_for_nobody(tmp_path: Path) -> None:
    """The rank leaves the trainer with SystemExit while host buffers are lent and opened."""
    outcome = run(tmp_path, f"{BPIPE} --bpipe-transport peer --exit-interval 2")
    assert outcome.codes == [0] * 4, [log[-1000:] for log in outcome.logs]
    assert " iteration        2/" in outcome.logs[3]
    assert " iteration        3/" not in outcome.logs[3]
    assert outcome.seconds < 60


def test_a_partner_that_stops_ends_its_evictor_within_the_time_out(tmp_path: Path) -> None:
    """Stage 3 freezes: its connections stay open, so only the time-out notices.

    The launcher ends the others when stage 0 has ended. The transport is two-sided: a rank that copies without its
    partner would wait in Megatron's own messages.
    """
    outcome = run(tmp_path, f"{BPIPE} --bpipe-transport gloo --bpipe-timeout 5", fault="3 3F2 SIGSTOP", only=0)
    assert outcome.codes[0] not in (0, None)
    assert "rank 0, stage 0: 0" in outcome.logs[0]
    assert "with stage 3 did not end" in outcome.logs[0]
    assert "the time-out is 5 s, --bpipe-timeout" in outcome.logs[0]


BITS = pytest.mark.parametrize(
    ("transport", "flags", "rank", "link"),
    [
        pytest.param("gloo", "--bpipe-transport gloo", 3, "stage 3 over gloo", id="gloo"),
        pytest.param("peer", "--bpipe-transport peer", 0, "stage 3 over peer", id="peer", marks=pytest.mark.slow),
        pytest.param("host", "--bpipe-transport host", 0, "stage 3 over host", id="host", marks=pytest.mark.slow),
        pytest.param(
            "host", "--bpipe-hosts host", 0, "its own node's memory over host", id="tier", marks=pytest.mark.slow
        ),
    ],
)


@BITS
def test_a_flipped_bit_ends_the_run_with_its_name(
    tmp_path: Path, transport: str, flags: str, rank: int, link: str
) -> None:
    """The bit flips in shared memory, in a host's own, or in a buffer on its way back; weights are not updated."""
    outcome = run(tmp_path, f"{BPIPE} {flags} --bpipe-verify 1", fault=f"{rank} {transport} FLIP")
    assert all(outcome.codes), [log[-500:] for log in outcome.logs]
    error, *_ = re.findall(r"RuntimeFault: rank 0: data that came back from .*", outcome.logs[0])
    expected = (
        rf"{re.escape(link)} differs from what was evicted: iteration 1 since the start, micro-batch \d of stage 0, "
        r"storage \d+ of \d+ \((float32|bool|int64) \[[\d, ]+\], saved by \w+Backward\w*, \d+ bytes\)\. Weights were not updated"
    )
    assert re.search(expected, error), error
    for survivor in range(4):
        assert last_line(outcome, survivor).startswith(
            "bpipe: rank 0 failed first: RuntimeFault: rank 0: data that came back"
        )
        assert " iteration        1/" not in outcome.logs[survivor]


def test_what_is_checked_and_as_it_was_is_said_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report"
    outcome = run(tmp_path, f"{BPIPE} --bpipe-verify all --bpipe-report {report}")
    assert outcome.codes == [0] * 4
    lines = re.findall(
        r"bpipe: verified 2 iterations: everything that rank (\d) evicted came back unchanged \((\d+) micro-batches",
        "".join(outcome.logs),
    )
    # Of four stages only the first evicts anything.
    assert sorted(rank for rank, _ in lines) == ["0"]
    assert main(["report", str(report), "--format", "json"]) == 0
    verified = json.loads(capsys.readouterr().out)["verified"]
    assert verified["iterations"] == 3
    assert 2 * verified["microbatches"] == 3 * sum(int(count) for _, count in lines)
    assert verified["nbytes"] > 1_000_000
    assert main(["report", str(report)]) == 0
    # The paragraph is wrapped, at places that depend on the printed seconds.
    text = " ".join(capsys.readouterr().out.split())
    assert "3 iterations: everything evicted came back unchanged (" in text


# No expert has a capacity: each takes the tokens that the router sends, and sizes are sent before the payload.
DIFFERING = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall --disable-bias-linear"
)
# The last of five hosts for three others.
SHARED = (
    "--num-layers 5 --pipeline-model-parallel-size 5 --global-batch-size 20 --bpipe-hosts pool --bpipe-bound 4,3,2,3,11"
)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "peer"])
@pytest.mark.parametrize(
    ("flags", "ranks", "fault"),
    [
        pytest.param("", 4, "3 3F2 SIGKILL", id="host"),
        pytest.param("", 4, "0 0F3 SIGKILL", id="evictor"),
        pytest.param("", 4, "0 0B7 SIGKILL 1", id="before its word"),
        pytest.param(SHARED, 5, "4 4F2 SIGKILL", id="host of three"),
        pytest.param(SHARED, 5, "1 1F4 SIGKILL", id="one of three"),
        pytest.param(SHARED, 5, "2 2B9 SIGKILL 1", id="one of three before its word"),
    ],
)
def test_whoever_dies_where_sizes_differ_ends_the_others(
    tmp_path: Path, flags: str, ranks: int, fault: str, transport: str
) -> None:
    """The rank dies while sizes or payload are in flight, or between iterations, when hosts wait for a message."""
    outcome = run(tmp_path, f"{BPIPE} --bpipe-transport {transport} {DIFFERING} {flags}", fault=fault, ranks=ranks)
    # A compiler that experts load prints its own last lines.
    others_end(outcome, int(fault[0]), last=False)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("when", ["1F3", "1B0", "1B6"])
def test_a_stage_that_dies_with_its_own_nodes_memory_full_ends_the_others(tmp_path: Path, when: str) -> None:
    """The rank has no partner: ranks that wait for its messages notice, and the others learn from them."""
    outcome = run(tmp_path, f"{BPIPE} --bpipe-hosts host", fault=f"1 {when} SIGKILL")
    others_end(outcome, 1, last=False)


# Stage 3 hosts the first slice of the second micro-batch, 4, from 0F4 to 0B6.
SLICED = f"{BPIPE} --bpipe-slices 4 --bpipe-timeout 30"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name)
        for name, fault in {
            "host between backwards": "3 3B2",
            "host between forwards": "3 3F5",
            "host behind the first slice": "3 3B0",
            "evictor with a slice away": "0 0F7",
            "evictor between backwards": "0 0B1",
            "evictor before its load": "0 0B7",
            "neighbour between forwards": "1 1F6",
            "neighbour between backwards": "2 2B3",
            "in the first iteration": "3 3F6 SIGKILL 1",
        }.items()
    ],
)
@pytest.mark.slow
def test_whoever_dies_between_slices_ends_the_others(tmp_path: Path, fault: str) -> None:
    outcome = run(tmp_path, SLICED, fault=fault if "SIGKILL" in fault else f"{fault} SIGKILL")
    others_end(outcome, int(fault[0]))


@pytest.mark.slow
def test_a_slice_that_finds_no_memory_is_everybodys_last_line(tmp_path: Path) -> None:
    outcome = run(tmp_path, SLICED, fault="1 1F6 MEMORY 1")
    for rank in range(4):
        assert outcome.codes[rank] == 1, outcome.logs[rank][-2000:]
        assert last_line(outcome, rank) == (
            "bpipe: rank 1 failed first: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (rank 1, "
            "stage 1, after 1B3, at 1F6)"
        )


OWN = "--bpipe-schedule zb-h1 --bpipe-timeout 5"


def test_a_neighbour_of_our_own_loop_that_dies_ends_the_others(tmp_path: Path) -> None:
    outcome = run(tmp_path, OWN, fault="2 2F2 SIGKILL")
    others_end(outcome, 2)
    for rank in (1, 3):
        edge = rf"TransferError: rank {rank}: \S+>\S+ (did not pass|could not be sent|could not be posted); the other end is rank 2: "
        assert re.search(edge, outcome.logs[rank]), outcome.logs[rank][-2000:]


@pytest.mark.slow
def test_a_neighbour_of_our_own_loop_that_stops_ends_its_receiver_within_the_time_out(tmp_path: Path) -> None:
    """The connections stay open, so only the time-out notices."""
    outcome = run(tmp_path, OWN, fault="2 2F2 SIGSTOP", only=3)
    assert outcome.codes[3] not in (0, None)
    assert "TransferError: rank 3: 2F2>3F2 did not pass; the other end is rank 2: " in outcome.logs[3], outcome.logs[3][
        -2000:
    ]
    assert "5000ms" in outcome.logs[3]
    assert "bpipe: rank 3, stage 3, after 3I1, at 3F2" in outcome.logs[3]


@pytest.mark.parametrize("balance", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_out_of_memory_in_the_first_iteration_leaves_what_was_held(
    tmp_path: Path, balance: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stage 0 fails in its third forward: the report names the stage, what it held, and what each remedy would need."""
    report = tmp_path / "report"
    flags = f"{BPIPE if balance else ''} --bpipe-report {report}"
    outcome = run(tmp_path, flags, fault="0 0F2 MEMORY 1")
    assert outcome.codes == [1] * 4
    result = shortage(report)
    assert result.answers[0].startswith("Rank 0 (stage 0 of pipeline 0, ")
    assert (
        "failed first: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (rank 0, stage 0, "
        in result.answers[0]
    )
    first = result.stages[0]
    # The third forward began with two micro-batches held. The peak would have been three if balanced, four if not.
    assert (len(first.fullest.microbatches), first.peak_microbatches) == (2, 3 if balance else 4)
    assert first.fullest.activations_bytes == 2 * first.microbatch_bytes > 1_000_000
    assert "during 0F2, iteration 1" in result.answers[1]
    assert [bool(stage.logits_bytes) for stage in result.stages] == [False, False, False, True]
    # Adam's two moments do not exist yet. Parameters, gradients and moments all have 4 bytes per element here.
    assert first.rank.whole_optimizer_bytes == pytest.approx(2 * first.rank.weights_bytes, rel=0.01)
    assert first.rank.gradients_bytes == pytest.approx(first.rank.weights_bytes, rel=0.01)
    assert [way.name for way in result.ways] == ["as it was run", *["with --bpipe"] * (not balance)]
    assert main(["report", str(report)]) == 0
    text = capsys.readouterr().out
    assert "2 of 3" in text or not balance
    assert main(["report", str(report), "--html", str(tmp_path / "page.html")]) == 2
    assert "has no recorded iteration" in capsys.readouterr().err


def shortage(folder: Path) -> Shortage:
    run = read_held(folder)
    assert run is not None
    return shortage_of(run)


@pytest.mark.slow
def test_a_rank_killed_in_the_first_iteration_leaves_what_it_held(tmp_path: Path) -> None:
    """The kernel kills the rank without an exception or a last message; its record ends with its latest peak."""
    report = tmp_path / "report"
    outcome = run(tmp_path, f"{BPIPE} --bpipe-report {report}", fault="1 1F1 SIGKILL 1")
    assert outcome.codes[1] == -signal.SIGKILL
    result = shortage(report)
    assert result.answers[0].startswith("Rank 1 ")
    assert "it does not answer, so it was killed" in result.answers[0]
    assert result.stages[1].rank.rank == 1
    assert result.stages[1].fullest.activations_bytes >= result.stages[1].microbatch_bytes > 0
    assert "after 1F0, iteration 1" in result.answers[1]


# Mistakes that all ranks see before they connect: the flags, and what rank 0 prints about them.
REFUSED = [
    ("--bpip", "error: unrecognized arguments: --bpip\n  instead of --bpip, did you mean --bpipe?\n"),
    ("--bpipe --bpipe-transport pigeon", "argument --bpipe-transport: invalid choice: 'pigeon'"),
    ("--bpipe --bpipe-timeout 0", "argument --bpipe-timeout: '0' must be a number of seconds above 0"),
    (
        "--bpipe --bpipe-transport nccl",
        "--bpipe-transport nccl cannot move memory of device cpu: use gloo, peer, host or auto",
    ),
    (
        "--sft",
        "error: --sft: Megatron joins the 2 packed rows of a micro-batch into one, but its pipeline receives them as 2, in a "
        "different order; use --micro-batch-size 1",
    ),
    (
        "--bpipe-report-iterations 5-3",
        "--bpipe-report-iterations 5-3: must be one number, or two with a hyphen, such as 3-5",
    ),
    (
        "--bpipe-report-iterations 3-5",
        "--bpipe-report-iterations 3-5: the training ends with iteration 3; choose from 1-3",
    ),
    ("--bpipe-report /proc/self/status/here", "error: --bpipe-report /proc/self/status/here: Not a directory\n"),
    (
        "--bpipe --recompute-granularity selective --recompute-modules mlp",
        "--bpipe: Megatron's own recomputation of the MLP",
    ),
]
ENDED = "ended with status 2\n"
# A refusal by Megatron itself.
ITS_OWN = (
    "--bpipe --global-batch-size 7",
    "(7) must be divisible by eval_micro_batch_size (2) * data_parallel_size (1)",
)


def test_what_cannot_start_is_said_once(tmp_path: Path) -> None:
    """Only one of four ranks prints a mistake: without a traceback, and with the usage if the parser refuses."""
    cases = [f"{TINY} {STAGES} {flags}".split() for flags, _ in [*REFUSED, ITS_OWN]]
    script = [str(ROOT / "tests/gloo/faulty.py")]
    outcome = finish(start(4, script, tmp_path, free_ports(1)[0], {"CASES": json.dumps(cases)}), tmp_path, 100)
    first, *others = [log.split("=== refused")[:-1] for log in outcome.logs]
    assert [len(parts) for parts in (first, *others)] == [len(cases)] * 4
    for index, (flags, message) in enumerate(REFUSED):
        assert message in first[index], flags
        assert "Traceback" not in first[index]
        assert first[index].endswith(ENDED), flags
        assert first[index].count("usage: ") == (index < 3), flags
        for parts in others:
            assert not any(text in parts[index] for text in (message, "error:", "usage:", "Traceback")), flags
            assert parts[index].endswith(ENDED), flags
    assert ITS_OWN[1] in first[-1]
