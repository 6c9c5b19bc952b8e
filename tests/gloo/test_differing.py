"""Training whose micro-batches differ in size equals stock Megatron's, with memory poisoned, and says what stayed at
home."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.gloo import conversations
from tests.gloo.conftest import BPIPE, Case, Outcome, asked_for
from tests.gloo.test_placed import ALIKE, alike
from tests.gloo.test_training import same
from tests.gloo.test_two_pipes_trained import ALIKE as ONE_LOSS
from tests.gloo.test_two_pipes_trained import by, pipeline

# No expert has a capacity: each takes the tokens that the router sends.
DROPLESS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear"),
    *("--moe-router-load-balancing-type", "aux_loss"),
)
# Megatron's own attention takes no packed rows.
PACKED = ("--micro-batch-size", "1", "--global-batch-size", "8", "--spec", "tests.gloo.layers", "attending_plainly")
CONVERSATIONS = (
    *(*PACKED, "--sft", "--data-path", "{conversations}", "--split", "1,0,0"),
    *("--tokenizer-type", "SFTTokenizer", "--tokenizer-model", "words"),
)
COMMON = ("--global-batch-size", "16", "--train-iters", "3")
POOL = ("--bpipe-hosts", "pool")
OURS = (
    *("--bpipe-executor", *POOL, "--bpipe-bound", "2,3,3,3", "3,2,2,6", "--bpipe-memory", "auto:0.0084"),
    *("--bpipe-schedule", "1f1b-split", "grouped-interleaved"),
)
INTERLEAVED = ("--num-layers", "8", "--num-layers-per-virtual-pipeline-stage", "1")

ROWS = {
    "dropless": (*DROPLESS, "--moe-token-dispatcher-type", "alltoall"),
    "dropless_gathered": (*DROPLESS, "--moe-token-dispatcher-type", "allgather"),
    "dropless_interleaved": (*DROPLESS, *INTERLEAVED, "--moe-token-dispatcher-type", "alltoall"),
    "dropless_by_our_loop": (*DROPLESS, "--moe-token-dispatcher-type", "alltoall", "--bpipe-executor"),
    "dropless_to_several": (*DROPLESS, "--moe-token-dispatcher-type", "alltoall", *POOL, "--bpipe-bound", "2,3,3,3"),
    "dropless_to_one": (*DROPLESS, "--moe-token-dispatcher-type", "alltoall", *POOL, "--bpipe-bound", "3,2,2,6"),
    "dropless_learned": (*DROPLESS, "--moe-token-dispatcher-type", "alltoall", "--bpipe-memory", "auto:0.0084"),
    "packed": CONVERSATIONS,
    "packed_by_our_loop": (*CONVERSATIONS, "--bpipe-executor"),
    "packed_split_backwards": (*CONVERSATIONS, "--bpipe-schedule", "1f1b-split"),
    "packed_interleaved": (
        *(*CONVERSATIONS, *INTERLEAVED, "--split", "9,1,0", "--eval-iters", "2", "--eval-interval", "2"),
    ),
    "documents_apart": (*PACKED, "--dataloader-inter-document-masking"),
    "lengths": ("--differing", "lengths"),
    "lengths_by_our_loop": ("--differing", "lengths", "--bpipe-executor"),
    "lengths_of_split_backwards": ("--differing", "lengths", "--bpipe-schedule", "1f1b-split"),
    "lengths_in_groups": (
        *(*INTERLEAVED, "--differing", "lengths", "--bpipe-schedule", "grouped-interleaved"),
        *("--eval-iters", "2", "--eval-interval", "2", "--attention-dropout", "0", "--hidden-dropout", "0"),
    ),
    "policy": ("--differing", "policy"),
    "policy_by_our_loop": ("--differing", "policy", "--bpipe-executor"),
    "policy_of_split_backwards": ("--differing", "policy", "--bpipe-schedule", "1f1b-split"),
    "policy_in_groups": (
        *(*INTERLEAVED, "--differing", "policy", "--bpipe-schedule", "grouped-interleaved"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
    ),
    "partial": ("--differing", "partial"),
}
TRANSPORTS = ("gloo", "peer")
# What a change breaks first runs always, the rest only with --slow.
ALWAYS = (
    ("packed", "peer"),
    ("packed_interleaved", "gloo"),
    ("lengths", "gloo"),
    ("lengths_in_groups", "peer"),
    ("dropless_by_our_loop", "gloo"),
    ("partial", "peer"),
)


def with_data(flags: Sequence[str], folder: Path) -> list[str]:
    """The flags with a file of conversations, written to a folder, where they ask for one."""
    data = str(conversations.write(folder / "conversations.jsonl"))
    return [data if flag == "{conversations}" else flag for flag in flags]


def stock(flags: Sequence[str]) -> list[str]:
    """Without our own loop: Megatron's gives the same bits; and without who hosts."""
    return [flag for flag in flags if flag not in OURS]


@pytest.fixture(scope="module")
def rows(
    run_cases: Callable[..., Outcome], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    folder = tmp_path_factory.mktemp("data")
    cases = []
    for row, transport in sorted(asked_for(request, "row", "transport")):
        name, flags = f"{row}_{transport}", [*COMMON, *with_data(ROWS[row], folder)]
        balanced = [*BPIPE, "--bpipe-transport", transport, *flags, "--bpipe-report", f"{{folder}}/{name}_balanced"]
        cases += [Case(name, stock(flags)), Case(f"{name}_balanced", balanced)]
    return run_cases(4, cases, timeout_s=900, worker="differing_worker.py")


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    ("row", "transport"),
    [
        pytest.param(row, transport, marks=() if (row, transport) in ALWAYS else pytest.mark.slow)
        for row in ROWS
        for transport in TRANSPORTS
    ],
)
def test_a_training_of_differing_sizes_equals_stock(rows: Outcome, row: str, transport: str) -> None:
    name = f"{row}_{transport}"
    same(rows, name, f"{name}_balanced", 4)
    assert rows.reports(f"{name}_balanced")[0]["evictions"] > 0, "nothing was moved, so nothing was tested"
    summaries = rows.reports(f"{name}_balanced")
    stayed = sum(summary["stayed_microbatches"] for summary in summaries if "stayed_microbatches" in summary)
    said = rows.logs[0].split(f"=== {name}_balanced\n")[1].split("===")[0]
    assert ("were too large for their host buffers and stayed here; the next iteration has room" in said) == (
        stayed > 0
    )
    assert summaries[0]["largest_bytes"]["0"] > 0
    if row == "packed":
        # Some packs are larger than the first; once all have left there is room for all.
        assert stayed > 0
        assert summaries[0]["times_grown"] > 0


@pytest.mark.timeout(400)
def test_packed_rows_are_told_to_all_stages_of_a_v(run_cases: Callable[..., Outcome], tmp_path: Path) -> None:
    """The rank that writes the indices of the data was given none of it, which only the ends of a V had read."""
    common = [*COMMON, *ALIKE, *with_data(CONVERSATIONS, tmp_path)]
    cases = [Case("stock", common), Case("v", [*common, "--bpipe-schedule", "v-half", *BPIPE])]
    alike(run_cases(4, cases, 380, worker="named_worker.py"), "stock", "v")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_packed_rows_of_both_directions_equal_stocks(run_cases: Callable[..., Outcome], tmp_path: Path) -> None:
    """Each pipe's chunks read where the sequences of their own micro-batches end."""
    common = [*COMMON, *ONE_LOSS, *with_data(CONVERSATIONS, tmp_path)]
    cases = [Case("stock", [*common, *pipeline(2)]), Case("chimera", [*common, *by("chimera"), *BPIPE])]
    alike(run_cases(4, cases, 380, worker="named_worker.py"), "stock", "chimera")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_packed_rows_of_tensor_parallel_ranks_equal_stocks(run_cases: Callable[..., Outcome], tmp_path: Path) -> None:
    shapes = ("--num-layers", "4", "--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size", "2")
    common = [*COMMON, *with_data(CONVERSATIONS, tmp_path), *shapes, "--sequence-parallel"]
    report = ("--bpipe-report", "{folder}/balanced")
    cases = [Case("stock", common), Case("balanced", [*common, *BPIPE, *report])]
    done = run_cases(8, cases, 380, worker="differing_worker.py")
    same(done, "stock", "balanced", 8)
    assert done.reports("balanced")[0]["evictions"] > 0, "nothing was moved, so nothing was tested"
