"""Training with micro-batches of differing sizes equals stock Megatron's, and reports those that were not evicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gloo import conversations
from tests.gloo.compare import row_is_alike, same
from tests.gloo.conftest import Case, Outcome, Row
from tests.gloo.flags import BPIPE, FOUR, INTERLEAVED, QUIET, REPORT, SEQUENCE
from tests.gloo.test_placed import NAMED, by, pipeline

pytestmark = pytest.mark.timeout(2460)
Trained = Callable[[Row], Outcome]

# No expert has a capacity; each takes the tokens that the router sends.
DROPLESS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --disable-bias-linear "
    "--moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type alltoall"
)
# Megatron's own attention takes no packed rows.
PACKED = "--micro-batch-size 1 --global-batch-size 8 --spec tests.gloo.layers attending_plainly"
CONVERSATIONS = (
    f"{PACKED} --sft --data-path {{conversations}} --split 1,0,0 --tokenizer-type SFTTokenizer --tokenizer-model words"
)
COMMON = "--global-batch-size 16 --train-iters 3"
EVALUATED = "--eval-iters 2 --eval-interval 2"
OWN, SPLIT, GROUPED = "--bpipe-executor", "--bpipe-schedule 1f1b-split", "--bpipe-schedule grouped-interleaved"
POOL = "--bpipe-hosts pool --bpipe-bound"
LEARNED = "--bpipe-memory auto:0.0084"

# Stock's flags, ours, and the transport: every schedule has both.
ROWS = {
    "dropless": (DROPLESS, "", "gloo"),
    "dropless_gathered": (f"{DROPLESS} --moe-token-dispatcher-type allgather", "", "peer"),
    "dropless_interleaved": (f"{DROPLESS} {INTERLEAVED}", "", "peer"),
    "dropless_by_our_loop": (DROPLESS, OWN, "gloo"),
    "dropless_to_several": (DROPLESS, f"{POOL} 2,3,3,3", "gloo"),
    "dropless_to_one": (DROPLESS, f"{POOL} 3,2,2,6", "peer"),
    "dropless_learned": (DROPLESS, LEARNED, "gloo peer"),
    "packed": (CONVERSATIONS, "", "peer"),
    "packed_by_our_loop": (CONVERSATIONS, OWN, "peer"),
    "packed_split_backwards": (CONVERSATIONS, SPLIT, "gloo"),
    "packed_interleaved": (f"{CONVERSATIONS} {INTERLEAVED} --split 9,1,0 {EVALUATED}", "", "gloo"),
    "documents_apart": (f"{PACKED} --dataloader-inter-document-masking", "", "gloo"),
    "lengths": ("--differing lengths", "", "gloo"),
    "lengths_by_our_loop": ("--differing lengths", OWN, "peer"),
    "lengths_of_split_backwards": ("--differing lengths", SPLIT, "peer"),
    "lengths_in_groups": (f"{INTERLEAVED} --differing lengths {EVALUATED} {QUIET}", GROUPED, "peer"),
    "partial": ("--differing partial", "", "gloo peer"),
}
# The rows that a change breaks first always run, the rest only with --slow.
ALWAYS = ("packed-peer dropless_by_our_loop-gloo").split()


def rows() -> list[Row]:
    pairs = []
    for feature, (stock, ours, transports) in ROWS.items():
        for transport in transports.split():
            name, common = f"{feature}-{transport}", f"{COMMON} {stock}"
            case = Case(name, f"{common} {BPIPE} --bpipe-transport {transport} {ours} {REPORT}")
            pairs.append(Row(name, Case(feature, common), case, slow=name not in ALWAYS))
    return pairs


# On a V and with two pipes, weights are compared by name.
PLACED = {
    # The rank that writes the data's indices had no data, which only the ends of a V read.
    "packed-v": Row(
        "packed-v",
        Case("packed_for_a_v", f"{NAMED} {COMMON} {CONVERSATIONS}"),
        Case("packed-v", f"{NAMED} {COMMON} {CONVERSATIONS} --bpipe-schedule v-half {BPIPE}"),
    ),
    # Each pipe's chunks read the sequence ends of their own micro-batches.
    "packed-chimera": Row(
        "packed-chimera",
        Case("packed_for_two_pipes", f"{NAMED} {COMMON} {CONVERSATIONS} {pipeline(2)}"),
        Case("packed-chimera", f"{NAMED} {COMMON} {CONVERSATIONS} {by('chimera')} {BPIPE}"),
    ),
}
WIDE = f"{COMMON} {CONVERSATIONS} --num-layers 4 {FOUR} {SEQUENCE}"
WIDE_ROW = Row("packed-wide", Case("packed_wide", WIDE), Case("packed-wide", f"{WIDE} {BPIPE} {REPORT}"), world=8)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return {"conversations": conversations.write(tmp_path_factory.mktemp("data") / "conversations.jsonl")}


@pytest.mark.parametrize("row", [row.parameter() for row in (*rows(), WIDE_ROW)])
def test_a_training_of_differing_sizes_equals_stock(trained: Trained, row: Row) -> None:
    outcome, case = trained(row), row.ours.name
    same(outcome, row.stock.name, case, row.world)
    summaries = outcome.reports(case)
    assert summaries[0]["evictions"] > 0, "nothing was moved, so nothing was tested"
    if row.world == 8:
        return
    stayed = sum(summary.get("stayed_microbatches", 0) for summary in summaries)
    printed = outcome.said(case)
    assert ("were too large for their host buffers and stayed here; the next iteration has room" in printed) == (
        stayed > 0
    )
    assert summaries[0]["largest_bytes"]["0"] > 0
    if row.stock.name == "packed":
        # Some packs are larger than the first; the buffers grow to fit them.
        assert stayed > 0
        assert summaries[0]["times_grown"] > 0


@pytest.mark.parametrize("row", [row.parameter() for row in PLACED.values()])
def test_packed_rows_are_known_on_all_stages(trained: Trained, row: Row) -> None:
    row_is_alike(trained(row), row)
