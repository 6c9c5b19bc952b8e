"""scripts/gpu_check.py without a GPU: every step with tiny sizes, what it says of something broken, and that the
others then go on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from bpipe.build import ScheduleConfig, build, named_balance
from bpipe.ir.action import Kind
from bpipe.ir.memory import memory_of, peak_bytes
from bpipe.runtime.evictor import Evictor
from tests.support.threads import one_thread_a_rank as one_thread_a_rank

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def check(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("gpu_check")


def rehearse(check: ModuleType, name: str, **changes: Any) -> Any:
    step = check.STEPS[name]
    sizes = step.sizes["rehearsal"]
    return step.run(CPU, replace(sizes, **changes) if changes else sizes, time.monotonic() + 60)


def values(result: Any) -> Mapping[str, str]:
    return dict(result.rows)


# -- each step
# ----------------------------------------------------------------------------------------------------------------------


def test_limits(check: ModuleType) -> None:
    facts = rehearse(check, "limits").facts
    assert len(facts) == 5
    assert all(spread["low"] > 0 and spread["count"] == 2 for spread in facts.values())


@pytest.mark.timeout(180)  # processes that have to import torch, on a machine that may be full
def test_peer(check: ModuleType) -> None:
    result = rehearse(check, "peer")
    assert result.ok is True
    assert result.facts["evictor"]["rounds"] == {"count": 12, "wrong": 0}
    assert result.facts["lender"]["engine"]["host_buffer_bytes"] > 0
    assert not any("/s" in value or " ms" in value for value in values(result).values()), (
        "two processes on one GPU are not timed"
    )


def test_streams(check: ModuleType) -> None:
    result = rehearse(check, "streams")
    assert result.ok is True
    assert (result.facts["iterations"], result.facts["differing"]) == (6, 0)
    # The other three are waits between streams, or would free memory under a copy.
    assert result.facts["mutations"] == {"[7]": {"caught": 2, "iterations": 2}}


def test_streams_notices_a_missing_wait(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that looks for wrong gradients has to find some."""
    unwaited = next(mutation for mutation in check.streams.MUTATIONS if mutation.wait == "[7]")
    monkeypatch.setattr(Evictor, "_finish", unwaited.instead())
    result = rehearse(check, "streams")
    assert result.ok is False
    assert values(result)["gradients with delays and poison"].startswith("FAILED")


def test_streams_notices_that_nothing_shows_a_missing_wait(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(check.streams.MUTATIONS[3], instead=lambda: Evictor._finish)
    monkeypatch.setattr(check.streams, "MUTATIONS", (harmless,))
    result = rehearse(check, "streams")
    assert result.ok is False
    assert any("caught in 0 of 2" in value for value in values(result).values())


def test_connections(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both steps again for each number, and what went wrong there is named here."""
    asked: list[tuple[Any, ...]] = []

    def isolated(name: str, size: str, limit_s: float, environment: Mapping[str, str]) -> Any:
        asked.append((name, size, environment["CUDA_DEVICE_MAX_CONNECTIONS"]))
        wrong = check.Result(ok=False, rows=[("gradients", "FAILED: 3 of 4"), ("other", "ok: yes")])
        crashed = check.Result(ok=False, failure="its process ended with status -11")
        return check.Result(ok=True) if name == "peer" else wrong if len(asked) == 2 else crashed

    monkeypatch.setattr(check.isolate, "isolated", isolated)
    result = check.find_out("connections", "rehearsal", 1.0)
    assert asked == [(name, "rehearsal", number) for number in "18" for name in ("peer", "streams")]
    assert result.ok is False
    assert values(result) == {
        "peer, 1 connection": "ok: 0 lines as expected",
        "streams, 1 connection": "FAILED: not right: gradients",
        "peer, 8 connections": "ok: 0 lines as expected",
        "streams, 8 connections": "FAILED: its process ended with status -11",
    }


def test_what_is_only_measured_keeps_its_lines(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = check.Result(rows=[("with / without", "1.01")])
    monkeypatch.setattr(check.isolate, "isolated", lambda *arguments: measured)
    result = check.find_out("overhead_one_queue", "rehearsal", 1.0)
    assert result.ok is None
    assert values(result) == {"1 connection: with / without": "1.01"}


def test_versions(check: ModuleType) -> None:
    said = values(rehearse(check, "versions"))
    assert torch.__version__ in said["torch"]
    assert "pytest " in said["packages"]


@pytest.mark.timeout(180)
def test_counts(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    result = rehearse(check, "counts")
    assert result.ok is True
    assert re.search(r"ok: \d+ passed", result.rows[0][1])
    broken = rehearse(check, "counts", place="tests/unit/runtime/no_such_file.py")
    assert broken.ok is False
    assert "no_such_file" in broken.facts["output"]
    monkeypatch.setattr(check.counts, "NEEDED", ("pytest", "no_such_plugin"))
    assert rehearse(check, "counts").skipped == "not installed: no_such_plugin"


QUESTIONS = {
    "(a) a kernel behind two of another stream": (0, 3),
    "(b) a kernel behind another stream's copy, no event": (3, 3),
    "(b) a kernel behind another stream's copy, plain event": (0, 3),
    "(b) a kernel behind another stream's copy, timing events": (0, 3),
}


@pytest.mark.parametrize("connections", [1, 8])
def test_queues(check: ModuleType, monkeypatch: pytest.MonkeyPatch, connections: int) -> None:
    """One queue: whatever stands behind something that has to wait does not run.

    Eight: nothing waits for another stream's work.
    """
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(connections))
    result = rehearse(check, "queues")
    assert result.ok is None
    assert {name: fact["early"] for name, fact in result.facts.items()} == {
        name: early[connections > 1] for name, early in QUESTIONS.items()
    }


def test_queues_says_what_it_cannot_judge(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is over before a probe could be: nothing was shown."""
    monkeypatch.setattr(check.queues.Simulated, "COPY_S", 1e-3)
    said = values(rehearse(check, "queues"))
    assert [value.startswith("cannot be judged") for value in said.values()] == [False, True, True, True]


def test_queues_gives_up_on_what_never_ends(check: ModuleType) -> None:
    class Stuck(check.queues.Simulated):  # type: ignore[misc]
        TICK_S = 1.0

        def ended(self, event: float) -> bool:
            return False

    with pytest.raises(TimeoutError, match="not ended within 20 s"):
        check.queues.watch(Stuck(1), lambda device: (1.0, 1.0))


def test_queues_is_asked_under_three_numbers(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mapping[str, str]] = []

    def isolated(name: str, size: str, limit_s: float, environment: Mapping[str, str]) -> Any:
        asked.append(environment)
        return check.Result(rows=[("(a)", "did not wait")])

    monkeypatch.setattr(check.isolate, "isolated", isolated)
    assert [row[0] for row in check.find_out("queues", "rehearsal", 1.0).rows] == ["unset: (a)", "1: (a)", "8: (a)"]
    assert asked == [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}]


def test_memory(check: ModuleType) -> None:
    result = rehearse(check, "memory", stages=4, microbatches=8)
    assert result.ok is True
    by_stage = {(one["stage"], one["balancing"]): one for one in result.facts["stages"]}
    saved = result.facts["parts"]["saved"]
    assert [by_stage[stage, "without"]["measured"] for stage in range(4)] == [saved * held for held in (4, 3, 2, 1)]
    assert [by_stage[stage, "with"]["measured"] for stage in range(4)] == [saved * held for held in (3, 3, 2, 1)]
    # The last stage's own micro-batch, and two host buffers for the first one's.
    assert by_stage[3, "with"]["lent"] >= 2 * by_stage[0, "with"]["moved"]


def test_memory_notices_a_wrong_prediction(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.memory, "predicted_bytes", lambda *arguments: 1)
    assert rehearse(check, "memory", stages=4, microbatches=8).ok is False


@pytest.mark.parametrize(
    ("off", "taken", "later", "right"),
    [
        (5 << 20, 0, 7, True),  # more than one allocation's rounding: no error, and 2 MiB said it was
        (-(5 << 20), 5 << 20, 7, True),
        (9 << 20, 0, 7, False),
        (0, 9 << 20, 7, False),
        (0, -1, 7, False),
        (0, 0, 8, False),
    ],
)
def test_what_memory_forgives(check: ModuleType, off: int, taken: int, later: int, right: bool) -> None:
    steady = [dict.fromkeys(check.memory.STEADY, value) for value in (0, 7, later)]
    peak = check.memory.Peak((1 << 30) + off, 1 << 30, 0, 100, 100 + taken, steady)
    assert check.memory.right(peak, check.memory.TOLERANCE_BYTES) is right


def test_overhead(check: ModuleType) -> None:
    result = rehearse(check, "overhead")
    (case,) = result.facts["cases"]
    assert case["moved_bytes"] > 0
    assert len(case["iteration_s"]["synchronous"]) == 2
    assert 0 <= case["exposed_s"] < case["recorded_iteration_s"]


def test_overhead_with_layers_that_compute_again(check: ModuleType) -> None:
    """A fast CPU hides everything, so the second case of a GPU would never be tried."""
    overhead = check.overhead
    sizes, result = overhead.SIZES["rehearsal"], check.Result()
    whole, part = (
        overhead._case(CPU, replace(sizes.shape, recomputed=count), sizes, 1.0, time.monotonic() + 60, result)
        for count in (0, 1)
    )
    assert 0 < part["moved_bytes"] < whole["moved_bytes"]
    assert "cannot hide" in result.rows[0][0]


@pytest.mark.timeout(180)
def test_nccl_over_gloo(check: ModuleType) -> None:
    result = rehearse(check, "nccl")
    assert result.ok is True
    assert result.facts["evictor"]["engine"]["count"] == result.facts["lender"]["engine"]["count"] == 4
    assert result.facts["lender"]["engine"]["host_buffer_bytes"] > 0
    assert not any("/s" in value or " ms" in value for value in values(result).values()), (
        "two processes on one GPU are not timed"
    )


@pytest.mark.timeout(300)
def test_megatron(check: ModuleType) -> None:
    """In a process of its own: the stand-in for CUDA that Megatron gets on a CPU stays in it."""
    result = check.find_out("megatron", "rehearsal", 1.0)
    assert result.ok is True, (result.rows, result.failure)
    for name in check.megatron_stage.MODELS:
        found = result.facts[name]
        assert 0.9 * found["left_bytes"] <= found["moved_bytes"] < found["left_bytes"]
        assert found["wrong"] == 0
        assert values(result)[f"{name}: two runs without an engine"] == "ok: the same bits"


def test_without_megatron_its_step_is_skipped(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.megatron_stage.importlib.util, "find_spec", lambda name: None)
    assert rehearse(check, "megatron").skipped == "megatron-core is not installed here"


@pytest.mark.timeout(300)
def test_halves(check: ModuleType) -> None:
    result = check.find_out("halves", "rehearsal", 1.0)
    assert result.ok is True, (result.rows, result.failure)
    assert result.facts["Megatron's layers"]["wrong"] == 0
    assert result.facts["Megatron's layers"]["gradients"] > 8
    # 16 numbers a hidden one, in 16 bit.
    assert result.facts["Megatron's layers"]["waiting_bytes"] == 16 * 16 * 32 * 2
    assert values(result)["Transformer Engine's layers"] == "skipped: transformer-engine is not installed here"


def test_nearly_full(check: ModuleType) -> None:
    result = rehearse(check, "nearly_full")
    assert result.ok is True
    assert values(result)["balanced, where there is no room to spare"].startswith("ok: 0 of 2 iterations differ")


def test_side_stream(check: ModuleType) -> None:
    """A CPU has no streams, so nothing is reproduced; that the side's half really was away is the point of it."""
    result = rehearse(check, "side_stream")
    assert result.ok is True
    assert result.facts["moved"] == 2 * 6
    assert result.facts["moved_bytes"] >= 4 << 10
    assert values(result)["moved and brought back"].startswith(
        "0 of 12 moved micro-batches read something else; not reproduced"
    )


def test_side_stream_says_when_nothing_was_tried(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.side_stream.Engine, "moved_bytes", {0: 100})
    assert "was not moved: nothing was tried" in values(rehearse(check, "side_stream"))["moved and brought back"]


def test_side_stream_tells_micro_batches_that_read_something_else(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is overwritten while it comes back: the very thing this step would see on a GPU."""

    def poisoned(evictor: Evictor, backward: Any) -> None:
        finish(evictor, backward)
        for storage in brought.pop((backward.stage, backward.microbatch), []):
            storage.fill_(0xFF)

    def loading(evictor: Evictor, action: Any, host_buffer: int) -> None:
        load(evictor, action, host_buffer)
        brought[action.stage, action.microbatch] = evictor._known[action.stage, action.microbatch].storages

    brought: dict[Any, Any] = {}
    finish, load = Evictor.finish_load, Evictor.load
    monkeypatch.setattr(Evictor, "finish_load", poisoned)
    monkeypatch.setattr(Evictor, "load", loading)
    result = rehearse(check, "side_stream")
    assert "12 of 12 moved micro-batches read something else; REPRODUCED" in values(result)["moved and brought back"]
    assert result.ok is True, "expected, and why it is refused: not a failure of this machine"


def test_abandon(check: ModuleType) -> None:
    result = rehearse(check, "abandon")
    assert result.ok is True
    assert list(values(result)) == ["evictor, buffers in host memory", "acceptor, buffers lent to a partner"]


def test_allocators(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def isolated(name: str, size: str, limit_s: float, environment: Mapping[str, str]) -> Any:
        asked.append((name, *environment.values()))
        return check.Result(ok=True)

    monkeypatch.setattr(check.isolate, "isolated", isolated)
    assert check.find_out("allocators", "rehearsal", 1.0).ok is True
    assert asked == [(name, "expandable_segments:True") for name in ("versions", "streams", "peer", "memory")] + [
        (name, "backend:cudaMallocAsync") for name in ("versions", "streams")
    ]


def test_what_needs_a_gpu_says_why_it_is_skipped(check: ModuleType) -> None:
    assert "compute units" in rehearse(check, "compute_units").skipped


# -- the prediction
# ----------------------------------------------------------------------------------------------------------------------


def test_a_prediction_adds_what_an_operation_needs_while_it_runs(check: ModuleType) -> None:
    parts = check.memory.Parts(saved=100, forward_extra=7, backward_extra=20)
    plain, balanced = (
        build(ScheduleConfig("1f1b", 4, 8, balance=named_balance(balance))) for balance in ("none", "bpipe")
    )
    assert [check.memory.predicted_bytes(plain, rank, parts, 0) for rank in range(4)] == [420, 320, 220, 120]
    assert (
        check.memory.predicted_bytes(balanced, 0, parts, 90)
        == peak_bytes(balanced, memory_of((100,) * 4, (90,) * 4))[0] + 20
    )
    # What it hosts is no part of it: host buffers are there all the time, and are added as they are.
    assert check.memory.predicted_bytes(balanced, 3, parts, 90) == 120


def test_the_parts_of_a_micro_batch(check: ModuleType) -> None:
    watch = check.memory.Watch(base=1000, seen={Kind.FORWARD: (1016, 1140, 1100), Kind.BACKWARD: (1100, 1120, 1000)})
    assert watch.parts() == check.memory.Parts(saved=100, forward_extra=40, backward_extra=20)


def test_a_program_that_asks_for_more_is_not_flat(check: ModuleType) -> None:
    first, later = (dict.fromkeys(check.memory.STEADY, value) for value in (1, 2))
    assert check.memory._flat([first, later, later])
    assert not check.memory._flat([first, later, first])
    assert "NOT flat" in check.memory._steady_text([first, later, first])
