"""A script that chooses ranks with embeddings, as Megatron-LM's own does, trains by schedules with other placements.

It continues a checkpoint of stock Megatron with stock's losses and weights to the last bit. On a V and with two pipes,
the first and last stages are on one rank, but the script's choice names two ranks, and it asks whether it is the first
stage without naming a chunk. Such schedules were refused, and later their last stage got tokens without labels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gloo.compare import alike
from tests.gloo.conftest import ROOT, Case, Outcome, Row, finish, free_ports, start
from tests.gloo.flags import BPIPE, CHUNKS, FOUR, TINY, TWO, UNTIED, batch
from tests.gloo.test_placed import NAMED
from tests.support.torch_schedules import as_csv, torch_schedule

# A script that stands in for upstream's, or a checkout's own pretrain_gpt.py (scripts/test_upstream.sh).
COMMON = f"{NAMED} {batch(8)} --script {os.environ.get('UPSTREAM_SCRIPT', 'upstream_script.py')}"
# Untied: stock cannot save the tied weight if the last stage predicts further tokens.
AHEAD = f"{UNTIED} --mtp-num-layers 1 --position-embedding-type rope"
MODELS = {"tied": "", "untied": UNTIED, "ahead": AHEAD}
GROUPED = f"--bpipe-schedule grouped-interleaved {CHUNKS}"
# By name: the model, our flags, and the ranks of the stock pipeline. To Megatron, two pipes are two replicas of half as
# many ranks, and its sums have their order.
RUNS: dict[str, tuple[str, str, str]] = {
    # Stock runs twice: if the script is not reproducible with another Megatron, no comparison can succeed.
    "stock": ("tied", "", FOUR),
    "v-half": ("tied", "--bpipe-schedule v-half", FOUR),
    "zb-v_of_torch": ("tied", "--bpipe-schedule {schedules}/zb_v.csv", FOUR),
    # The schedule has two chunks without a flag.
    "bitpipe": ("tied", "--bpipe-schedule bitpipe", TWO),
    "grouped": ("tied", GROUPED, FOUR),
    "grouped_balanced": ("tied", f"{GROUPED} {BPIPE}", FOUR),
    "v-half_untied": ("untied", "--bpipe-schedule v-half", FOUR),
    "v-half_predictions": ("ahead", "--bpipe-schedule v-half", FOUR),
    "bitpipe_untied": ("untied", "--bpipe-schedule bitpipe", TWO),
}
ALWAYS = ("stock", "v-half")


def row_of(name: str, model: str, ours: str, stock: str) -> Row:
    """Return a row whose first case saves the checkpoint that the others load."""
    common, begun = f"{COMMON} {MODELS[model]}", f"begun_{model}"
    resumed = f"--load {{folder}}/{begun} --train-iters 3 --override-opt-param-scheduler"
    save = Case(begun, f"{common} {FOUR} --train-iters 1 --save {{folder}}/{begun} --save-interval 1")
    reference = Case(f"stock_{model}_{stock.split()[-1]}", f"{common} {stock} {resumed}")
    return Row(
        name, save, Case(name, f"{common} {FOUR} {ours} {resumed}"), slow=name not in ALWAYS, others=(reference,)
    )


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    schedules = tmp_path_factory.mktemp("schedules")
    (schedules / "zb_v.csv").write_text(as_csv(torch_schedule("ScheduleZBVZeroBubble", 4, 8, 2)))
    return {"schedules": schedules}


@pytest.mark.timeout(560)
@pytest.mark.parametrize("row", [row_of(name, *run).parameter() for name, run in RUNS.items()])
def test_upstreams_script_trains_as_stock_does_from_stocks_checkpoint(
    trained: Callable[[Row], Outcome], row: Row
) -> None:
    outcome, (stock,) = trained(row), row.others
    alike(outcome, stock.name, row.ours.name)
    assert len(outcome.record(row.ours.name, 3)["iterations"]) == 2


@pytest.mark.timeout(120)
def test_a_choice_that_is_not_megatrons_is_refused_in_a_v(tmp_path: Path) -> None:
    """The refusal names the difference once, and all ranks end with the same status."""
    upstreams = (ROOT / "tests/gloo/upstream_script.py").read_text()
    argument = "get_embedding_ranks=ranks_with_embeddings"
    assert upstreams.count(argument) == 1
    script = tmp_path / "script.py"
    script.write_text(upstreams.replace(argument, "get_embedding_ranks=lambda pp_ranks: pp_ranks[1:]"))
    flags = f"{TINY} {FOUR} --num-layers 8 {batch(8)} --train-iters 1 --bpipe-schedule v-half".split()
    outcome = finish(
        start(4, ["-m", "megatron.scheduling.launch", str(script), *flags], tmp_path, free_ports(1)[0]), tmp_path, 100
    )
    assert outcome.codes == [2] * 4, outcome.logs[0][-3000:]
    message = (
        "bpipe: error: get_embedding_ranks: in the pipeline of ranks 0, 1, 2, 3 the script chooses 1, 2, 3, where "
        "Megatron's own function chooses 0, 3. In this schedule rank 3 has both the first and the last stage"
    )
    assert message in outcome.logs[0]
    assert "Traceback" not in "".join(outcome.logs)
    assert "".join(outcome.logs).count("bpipe: error") == 1
