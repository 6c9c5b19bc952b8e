"""Every case on the requested device.

On late devices, cases run with small sizes, most of them in this process; on a GPU, as scripts/gpu_check.py runs its
steps, with moderate sizes. Speed is not checked, but on late devices exposed waits are.
"""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from bpipe.runtime.engine import Engine
from tests.gpu import abandon, memory, overhead, pipelines, side_stream, streams
from tests.gpu.accelerators import CUDA, LATE, Accelerator, Held, accelerator
from tests.gpu.cases import CASES
from tests.gpu.common import MODERATE, SMALL, Result
from tests.gpu.isolate import isolated, run_case
from tests.support.hand_made import with_late_loads

pytestmark = pytest.mark.timeout(600)
# On a GPU, steps start their own processes and contexts.
LONGEST_S = 200.0


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """Return a late device, with few iterations."""
    fewer = replace(streams.SIZES[SMALL], iterations=4, iterations_without_a_wait=2)
    monkeypatch.setitem(streams.SIZES, SMALL, fewer)
    return accelerator(LATE)


def values(result: Result) -> dict[str, str]:
    return dict(result.rows)


def result_of(name: str) -> Result:
    if CASES[name].own_process:
        return isolated(name, LATE, SMALL, LONGEST_S, {})
    return run_case(name, accelerator(LATE), SMALL, LONGEST_S)


# Trainings of many cases; tests/late and tests/gloo train the same mechanisms in fewer.
SLOW = ("captured", "true_size", "schedules", "trainer_8")
JUDGED = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name, case in CASES.items()
    if not case.needs_gpu
]
# Exposed waits are checked, because a late device's durations are given.
TIMED = ("overhead",)


@pytest.mark.parametrize("name", JUDGED)
def test_a_case_is_right(name: str) -> None:
    result = result_of(name)
    assert result.ok is True, (result.rows, result.failure, result.skipped)
    assert name in TIMED or not any("/s" in value or " GB" in value for value in values(result).values())
    if name in EXPECTED:
        EXPECTED[name](result)


def _streams(result: Result) -> None:
    assert result.facts["differing"] == 0
    assert result.facts["without"] == dict.fromkeys(("[1]", "[3]", "[5]", "[7]"), 2)


def _peer(result: Result) -> None:
    assert result.facts["evictor"]["rounds"] == {"count": 12, "wrong": 0}


def _memory(result: Result) -> None:
    """The bytes are exact: a late device counts as torch's allocator does, and no library has a workspace there."""
    stages = result.facts["stages"]
    assert len(stages) == 8
    assert [stage["measured"] - stage["predicted"] for stage in stages] == [0] * 8
    by_stage = {(stage["stage"], stage["balancing"]): stage for stage in stages}
    # The last stage's host buffer for the first one's micro-batch.
    assert by_stage[3, "with"]["lent"] >= by_stage[0, "with"]["moved"] > 0


def _halves(result: Result) -> None:
    facts = result.facts["Megatron's layers"]
    assert facts["gradients"] > 8
    # 16 numbers per hidden number, in 16 bits.
    assert facts["waiting_bytes"] == 16 * 16 * 32 * 2


def _overhead(result: Result) -> None:
    """Three loads of the cool-down were in bubbles, which a single stage does not have, and were fully exposed."""
    (case,) = result.facts["cases"]
    assert case["waits"] == []
    # The difference of two times on a running clock is rounded in its last bit.
    assert case["ratios"]["with"]["high"] == pytest.approx(1.0, rel=1e-12)
    assert case["ratios"]["synchronous"]["low"] > 1.0


def _side_stream(result: Result) -> None:
    """A late device always shows what a GPU shows only sometimes."""
    assert result.facts["not noted: wrong"] == result.facts["moved"] > 0


EXPECTED: dict[str, Callable[[Result], None]] = {
    "streams": _streams,
    "peer": _peer,
    "memory": _memory,
    "halves": _halves,
    "overhead": _overhead,
    "side_stream": _side_stream,
}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.needs_gpu])
def test_a_case_of_a_gpu_runs_to_its_end(name: str) -> None:
    """A typo in the script must not cost time on a GPU."""
    result = result_of(name)
    assert result.rows or result.skipped
    assert result.ok is not False, (result.rows, result.failure)


STEPS = [
    *CASES,
    "overhead_one_queue",
    *(pytest.param(step, marks=pytest.mark.slow) for step in ("connections", "allocators")),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_a_step(name: str, gpu_check: ModuleType) -> None:
    result: Any = gpu_check.find_out(name, CUDA, MODERATE, LONGEST_S)
    assert result.failure is None, result.failure
    if result.skipped:
        pytest.skip(result.skipped)
    assert result.ok is not False, result.rows


# -- the cases notice what is broken
# ----------------------------------------------------------------------------------------------------------------------


def test_streams_notices_a_missing_wait(on: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case must report wrong gradients if there are some."""
    (wait,) = (candidate for candidate in streams.WAITS if candidate.number == "[7]")
    monkeypatch.setattr(streams, "WAITS", ())
    with wait.taken_out():
        result = run_case("streams", on, SMALL, LONGEST_S)
    assert result.ok is False
    assert values(result)["gradients with delays and poison"].startswith("FAILED")


def test_pipelines_notices_a_missing_wait(on: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pipelines.SIZES, SMALL, replace(pipelines.SIZES[SMALL], schedules=("v-half",)))
    (wait,) = (candidate for candidate in streams.WAITS if candidate.number == "[7]")
    with wait.taken_out():
        assert values(run_case("pipelines", on, SMALL, LONGEST_S))["v-half"].startswith("FAILED")


def test_memory_notices_a_wrong_prediction(on: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "predicted_bytes", lambda *arguments: 1)
    assert run_case("memory", on, SMALL, 0.0).ok is False


def test_overhead_names_each_wait_that_is_exposed(on: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    balanced = overhead.balanced
    monkeypatch.setattr(overhead, "balanced", lambda *sizes: with_late_loads(balanced(*sizes)))
    result = run_case("overhead", on, SMALL, LONGEST_S)
    assert result.ok is False
    (case,) = result.facts["cases"]
    assert [wait["action"] for wait in case["waits"]] == ["0LOAD9", "0LOAD10", "0LOAD11"]
    rows = values(result)
    assert [name.split(": ")[1] for name in rows if "waited for" in name] == [
        f"{wait['action']} is waited for" for wait in case["waits"]
    ]
    assert any(value.startswith("FAILED") and value.endswith("in 3 waits") for value in rows.values())


def test_abandon_notices_a_host_that_waits_for_its_device(on: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It once synchronized inside, and showed no traceback until the device was done, if ever."""
    monkeypatch.setattr(Engine, "abandon", lambda engine: abandon.synchronize(on.device))
    result = run_case("abandon", on, SMALL, LONGEST_S)
    assert result.ok is False
    assert "nobody can go on" in str(result.failure)


def test_abandon_notices_a_device_that_was_not_busy(on: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(on), "busy", lambda self, seconds: Held(lambda: True, lambda: None))
    assert [value.split(":")[0] for value in values(run_case("abandon", on, SMALL, LONGEST_S)).values()] == [
        "FAILED"
    ] * 2


def test_nearly_full_notices_a_limit_that_is_none(on: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(on), "limit", lambda self, nbytes: None)
    rows = values(run_case("nearly_full", on, SMALL, LONGEST_S))
    assert rows["without balancing, in the same room"].startswith("FAILED: fits into")


def test_side_stream_says_when_nothing_was_tried(on: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_stream.Engine, "moved_bytes", {0: 100})
    result = run_case("side_stream", on, SMALL, LONGEST_S)
    assert result.ok is False
    assert "was not moved: nothing was tried" in values(result)["the side stream noted"]
