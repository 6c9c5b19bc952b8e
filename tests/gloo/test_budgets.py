"""Budgets in bytes are kept, as little as possible is evicted, and no bit changes, even if the plan changes.

"One tensor" is a stage's input of a micro-batch: Megatron's loop may hold the last backward's until the next forward
has returned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bpipe.cli import main
from bpipe.plan.budget import Devices, OverBudget, budget_text, within
from tests.gloo.compare import devices_of, same
from tests.gloo.conftest import Case, Outcome
from tests.gloo.flags import BPIPE, INPUT_BYTES, INTERLEAVED, REPORT
from tests.support.smallest import smallest_bytes

pytestmark = pytest.mark.timeout(300)

BATCH = "--global-batch-size 16"
SHAPES: dict[str, str] = {"plain": BATCH, "chunks": f"{INTERLEAVED} {BATCH}"}


def budgets(shape: str, steps: int) -> list[str]:
    """Return budgets in GiB, from one that needs no eviction to the smallest."""
    devices = devices_of(SHAPES[shape])
    largest, least = max(devices.need_bytes(devices.schedule)), smallest_bytes(devices)
    return [feasible(devices, largest - (largest - least) * step // (steps - 1)) for step in range(steps)]


def feasible(devices: Devices, budget: int) -> str:
    """Return the budget, or the next that a plan keeps: with uneven chunks, a slightly larger one may have no plan."""
    for candidate in range(budget, 2 * budget, budget // 1000):
        with suppress(OverBudget):
            within(devices_with(devices, budget_text([candidate])))
            return budget_text([candidate])
    raise AssertionError(f"no plan for {budget}")


def case(name: str, shape: str, memory: str, more: str) -> Case:
    return Case(name, f"{SHAPES[shape]} {BPIPE} {REPORT} --bpipe-memory {memory} {more}")


def state_bytes(outcome: Outcome, name: str) -> list[int]:
    """Return each rank's measured weights, gradients and optimizer state."""
    paths = sorted(Path(outcome.report_folder(name)).glob("record_*.jsonl"))
    return [json.loads(path.read_text().splitlines()[0])["weights_bytes"] for path in paths]


def check_kept(outcome: Outcome, name: str, budget: str) -> None:
    """Check that peaks after the first iteration exceed the budget by at most one tensor."""
    limit = float(budget) * 2**30
    reports = outcome.reports(name)
    assert len(reports) == 4
    for report, state in zip(reports, state_bytes(outcome, name), strict=True):
        assert report["peak_bytes"] + state <= limit + INPUT_BYTES, f"{name}: rank {report['rank']}"


def evictions(outcome: Outcome, name: str) -> list[int]:
    return [report["evictions"] for report in outcome.reports(name)]


@pytest.fixture(scope="module")
def four(
    run_cases: Callable[..., Outcome], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Outcome:
    slow = tmp_path_factory.mktemp("cluster") / "slow.toml"
    speeds = "inside_gb_per_s = 0.5\nbetween_gb_per_s = 0.5\n"
    slow.write_text(f'nodes = 1\ngpus_per_node = 4\n[device]\nlike = "h100-80g"\nname = "slow"\n{speeds}')
    nothing, middle = budgets("plain", 2)[0], budgets("chunks", 3)[1]
    tightest = budgets("plain", 2)[1]
    cases = [
        *(Case(shape, flags) for shape, flags in SHAPES.items()),
        case("given", "plain", tightest, "--bpipe-transport gloo"),
        case("auto_middle", "chunks", f"auto:{middle}", "--bpipe-transport peer"),
    ]
    if request.config.getoption("--slow"):
        cases += [
            case("auto_nothing", "plain", f"auto:{nothing}", "--bpipe-transport gloo --bpipe-executor"),
            case("auto_all", "chunks", f"auto:{middle}", "--bpipe-transport gloo --bpipe-hosts all"),
            case("auto_in_time", "chunks", f"auto:{middle}", f"--bpipe-transport gloo --bpipe-cluster {slow}"),
        ]
    return run_cases(4, cases)


def test_a_budget_that_is_given_is_kept_and_what_must_leaves(four: Outcome) -> None:
    same(four, "plain", "given", 4)
    devices = devices_of(BATCH)
    fit = within(devices_with(devices, budgets("plain", 2)[1]))
    check_kept(four, "given", budgets("plain", 2)[1])
    assert evictions(four, "given") == [3, 0, 0, 0]
    assert [fit.sent_bytes(rank) > 0 for rank in range(4)] == [True, False, False, False]
    log = four.said("given")
    assert log.count("bpipe: by prediction within ") == 1
    assert "bpipe: rank 0 would need " in log


def devices_with(devices: Devices, budget: str) -> Devices:
    return replace(devices, budget_bytes=(int(float(budget) * 2**30),) * 4)


@pytest.mark.parametrize(
    ("shape", "name"), [pytest.param("plain", "auto_nothing", marks=pytest.mark.slow), ("chunks", "auto_middle")]
)
def test_what_is_learned_changes_the_plan_and_no_bit(four: Outcome, shape: str, name: str) -> None:
    """The first iteration evicts all that helps; later ones evict only what the budget requires.

    Our own loop runs if nothing is evicted, otherwise Megatron's.
    """
    same(four, shape, name, 4)
    log = four.said(name)
    assert "bpipe: the first iteration moves as much as helps, until bytes are measured:" in log
    assert log.count("changing the plan:") == 1
    budget = budgets("plain", 2)[0] if shape == "plain" else budgets("chunks", 3)[1]
    check_kept(four, name, budget)
    if name == "auto_nothing":
        assert evictions(four, name) == [0] * 4
        assert "as measured within " in log
        assert "nothing has to leave" in log
    else:
        first = log.split("until bytes are measured:")[1].split("changing the plan:")[0]
        assert 0 < sum(evictions(four, name)) < sum(hosted(first))


@pytest.mark.slow
def test_what_is_learned_takes_links_that_the_first_plan_had_not(four: Outcome) -> None:
    """No device has room in the tightest plan; all evictions went to the nodes' memory, and stayed there."""
    same(four, "chunks", "auto_all", 4)
    first, last = four.said("auto_all").split("changing the plan:")
    assert "its own node hosts" in first
    assert "stages 0 and 3" not in first
    assert "its own node hosts" not in last
    assert "stages 0 and 3: gloo " in last, "connected when it was known that it is needed"
    check_kept(four, "auto_all", budgets("chunks", 3)[1])
    assert 0 < sum(evictions(four, "auto_all")) < sum(hosted(first))


@pytest.mark.slow
def test_what_is_learned_is_in_time_by_a_clusters_seconds_and_no_bit_changes(
    four: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cluster's links are slow. Loads are already issued as early as there is room."""
    same(four, "chunks", "auto_in_time", 4)
    first, learned = four.said("auto_in_time").split("changing the plan:")
    waits = "not every transfer ends before it is needed"
    assert waits not in first, "the first plan is by bytes"
    assert f"{waits}: waits in an iteration rank 0 " in learned
    check_kept(four, "auto_in_time", budgets("chunks", 3)[1])
    assert sum(evictions(four, "auto_in_time")) > 0
    # The report rebuilds the schedule that ran from the record.
    assert main(["report", four.report_folder("auto_in_time")]) == 0
    assert "differ" not in capsys.readouterr().err


def hosted(log: str) -> list[int]:
    """Return the numbers of hosted micro-batches in a plan's lines."""
    return [int(count) for count in re.findall(r"hosts (\d+) of its", log)]
