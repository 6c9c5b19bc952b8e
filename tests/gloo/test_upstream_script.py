"""A script that chooses ranks with embeddings, and asks Megatron for the stage, as Megatron-LM's own pretrain_gpt.py
does, trains by schedules that place stages otherwise.

From one checkpoint of stock Megatron, by the same script, with stock's losses and weights to the last bit. A V, and two
pipes, have the first stage and the last on one rank. The script's choice names two: every such schedule was refused
under upstream's script. Then its last stage got tokens and no labels, because the script asks without a stage whether
it is the first, and ended in iteration 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gloo.conftest import BPIPE, ROOT, TINY, Case, Outcome, asked_for, finish, free_ports, start
from tests.gloo.test_placed import ALIKE, EIGHT, FOUR, RESUMED, TWO, alike
from tests.support.torch_schedules import as_csv, torch_schedule

# The stand-in, or a checkout's own pretrain_gpt.py (scripts/test_upstream.sh).
COMMON = (*ALIKE, *EIGHT, "--script", os.environ.get("UPSTREAM_SCRIPT", "upstream_script.py"))
UNTIED = ("--untie-embeddings-and-output-weights",)
# Untied: stock cannot save the tied weight of a pipeline's last stage that predicts further tokens.
AHEAD = (*UNTIED, "--mtp-num-layers", "1", "--position-embedding-type", "rope")
# By what is trained: what a model has besides, flags of ours, and the ranks of the stock pipeline that it is compared
# with. Two pipes are to Megatron two replicas of half as many ranks, and its sums have the order of those.
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    # Stock twice: what the script itself, in another Megatron, does not repeat nobody can equal.
    "stock": ((), (), FOUR),
    "v-half": ((), ("--bpipe-schedule", "v-half"), FOUR),
    "zb-v_of_torch": ((), ("--bpipe-schedule", "{schedules}/zb_v.csv"), FOUR),
    # It takes two chunks, which nobody says.
    "bitpipe": ((), ("--bpipe-schedule", "bitpipe"), TWO),
    "grouped": ((), ("--bpipe-schedule", "grouped-interleaved", "--num-virtual-stages-per-pipeline-rank", "2"), FOUR),
    "grouped_balanced": (
        (),
        ("--bpipe-schedule", "grouped-interleaved", "--num-virtual-stages-per-pipeline-rank", "2", *BPIPE),
        FOUR,
    ),
    "v-half_untied": (UNTIED, ("--bpipe-schedule", "v-half"), FOUR),
    "v-half_predictions": (AHEAD, ("--bpipe-schedule", "v-half"), FOUR),
    "bitpipe_untied": (UNTIED, ("--bpipe-schedule", "bitpipe"), TWO),
}
ALWAYS = ("stock", "v-half", "zb-v_of_torch", "bitpipe", "grouped")
MODELS = {(): "tied", UNTIED: "untied", AHEAD: "ahead"}


@pytest.fixture(scope="module")
def trained(
    run_cases: Callable[..., Outcome], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    schedules = tmp_path_factory.mktemp("schedules")
    (schedules / "zb_v.csv").write_text(as_csv(torch_schedule("ScheduleZBVZeroBubble", 4, 8, 2)))
    cases: dict[str, Case] = {}
    for name in (name for name in RUNS if (name,) in asked_for(request, "name")):
        model, ours, stock = RUNS[name]
        begun = f"begun_{MODELS[model]}"
        common, resumed = (*COMMON, *model), ("--load", f"{{folder}}/{begun}", "--train-iters", "3", *RESUMED)
        save = ("--train-iters", "1", "--save", f"{{folder}}/{begun}", "--save-interval", "1")
        cases.setdefault(begun, Case(begun, (*common, *FOUR, *save)))
        cases.setdefault(stock_of(name), Case(stock_of(name), (*common, *stock, *resumed)))
        mine = [flag.replace("{schedules}", str(schedules)) for flag in ours]
        cases[name] = Case(name, (*common, *FOUR, *mine, *resumed))
    return run_cases(4, list(cases.values()), timeout_s=500, worker="named_worker.py")


def stock_of(name: str) -> str:
    model, _, stock = RUNS[name]
    return f"stock_{MODELS[model]}_{stock[-1]}"


@pytest.mark.timeout(560)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in RUNS]
)
def test_upstreams_script_trains_as_stock_does_from_stocks_checkpoint(trained: Outcome, name: str) -> None:
    alike(trained, stock_of(name), name)
    assert len(trained.record(name, 3)["iterations"]) == 2


@pytest.mark.timeout(120)
def test_a_choice_that_is_not_megatrons_is_refused_in_a_v(tmp_path: Path) -> None:
    """Once, by every rank with the same status, and with what differs."""
    upstreams = (ROOT / "tests/gloo/upstream_script.py").read_text()
    given = "get_embedding_ranks=ranks_with_embeddings"
    assert upstreams.count(given) == 1
    script = tmp_path / "script.py"
    script.write_text(upstreams.replace(given, "get_embedding_ranks=lambda pp_ranks: pp_ranks[1:]"))
    flags = (*TINY, *FOUR, "--num-layers", "8", *EIGHT, "--train-iters", "1", "--bpipe-schedule", "v-half")
    outcome = finish(
        start(4, ["-m", "megatron.scheduling.launch", str(script), *flags], tmp_path, free_ports(1)[0]), tmp_path, 100
    )
    assert outcome.codes == [2] * 4, outcome.logs[0][-3000:]
    said = (
        "bpipe: error: get_embedding_ranks: in the pipeline of ranks 0, 1, 2, 3 the script chooses 1, 2, 3, where "
        "Megatron's own function chooses 0, 3. In this schedule rank 3 has both the first and the last stage"
    )
    assert said in outcome.logs[0]
    assert "Traceback" not in "".join(outcome.logs)
    assert "".join(outcome.logs).count("bpipe: error") == 1
