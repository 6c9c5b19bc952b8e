"""scripts/gpu_check.py without a GPU: every step with tiny sizes, what it says of something broken, and that the others then go on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bpipe.ir.action import Kind
from bpipe.program import ProgramConfig, build
from bpipe.runtime.evictor import Evictor
from bpipe.simulate.memory import peak_bytes
from tests.unit.threads import one_thread_a_rank as one_thread_a_rank

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


# -- each step ----------------------------------------------------------------------------------------------------------------------------


def test_limits(check: ModuleType) -> None:
    facts = rehearse(check, "limits").facts
    assert len(facts) == 5
    assert all(spread["low"] > 0 and spread["count"] == 2 for spread in facts.values())


@pytest.mark.timeout(180)  # processes that have to import torch, on a machine that may be full
def test_peer(check: ModuleType) -> None:
    result = rehearse(check, "peer")
    assert result.ok is True
    assert result.facts["evictor"]["rounds"] == {"count": 12, "wrong": 0}
    assert result.facts["lender"]["engine"]["slot_bytes"] > 0
    assert not any("/s" in value or " ms" in value for value in values(result).values()), "two processes on one GPU are not timed"


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

    def isolated(names: Sequence[str], size: str, seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
        asked.append((tuple(names), size, environment["CUDA_DEVICE_MAX_CONNECTIONS"]))
        wrong = check.Result(ok=False, rows=[("gradients", "FAILED: 3 of 4"), ("other", "ok: yes")])
        crashed = check.Result(ok=False, failure="its process ended with status -11")
        return {"peer": check.Result(ok=True), "streams": wrong if len(asked) == 1 else crashed}

    monkeypatch.setattr(check.isolate, "isolated", isolated)
    result = rehearse(check, "connections")
    assert asked == [(("peer", "streams"), "rehearsal", "1"), (("peer", "streams"), "rehearsal", "8")]
    assert result.ok is False
    assert values(result) == {
        "peer with 1 connection": "ok: 0 lines as expected",
        "streams with 1 connection": "FAILED: not right: gradients",
        "peer with 8 connections": "ok: 0 lines as expected",
        "streams with 8 connections": "FAILED: its process ended with status -11",
    }


def test_memory(check: ModuleType) -> None:
    result = rehearse(check, "memory", stages=4, microbatches=8)
    assert result.ok is True
    by_stage = {(one["stage"], one["balancing"]): one for one in result.facts["stages"]}
    saved = result.facts["parts"]["saved"]
    assert [by_stage[stage, "without"]["measured"] for stage in range(4)] == [saved * held for held in (4, 3, 2, 1)]
    assert [by_stage[stage, "with"]["measured"] for stage in range(4)] == [saved * held for held in (3, 3, 2, 1)]
    # The last stage's own micro-batch, and two slots for the first one's.
    assert by_stage[3, "with"]["slots"] >= 2 * by_stage[0, "with"]["moved"]


def test_memory_notices_a_wrong_prediction(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.memory, "predicted_bytes", lambda *arguments: 1)
    assert rehearse(check, "memory", stages=4, microbatches=8).ok is False


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
        overhead._case(CPU, replace(sizes.shape, recomputed=count), sizes, 1.0, time.monotonic() + 60, result) for count in (0, 1)
    )
    assert 0 < part["moved_bytes"] < whole["moved_bytes"]
    assert "cannot hide" in result.rows[0][0]


def test_what_needs_a_gpu_says_why_it_is_skipped(check: ModuleType) -> None:
    assert "compute units" in rehearse(check, "compute_units").skipped


# -- the prediction -----------------------------------------------------------------------------------------------------------------------


def test_a_prediction_adds_what_an_operation_needs_while_it_runs(check: ModuleType) -> None:
    parts = check.memory.Parts(saved=100, forward_extra=7, backward_extra=20)
    plain, balanced = (build(ProgramConfig("1f1b", 4, 8, balance=balance)) for balance in ("none", "bpipe"))
    assert [check.memory.predicted_bytes(plain, rank, parts, 0) for rank in range(4)] == [420, 320, 220, 120]
    assert check.memory.predicted_bytes(balanced, 0, parts, 90) == peak_bytes(balanced, (100,) * 4, (90,) * 4)[0] + 20
    # What it hosts is no part of it: slots are there all the time, and are added as they are.
    assert check.memory.predicted_bytes(balanced, 3, parts, 90) == 120


def test_the_parts_of_a_micro_batch(check: ModuleType) -> None:
    watch = check.memory.Watch(base=1000, seen={Kind.FORWARD: (1016, 1140, 1100), Kind.BACKWARD: (1100, 1120, 1000)})
    assert watch.parts() == check.memory.Parts(saved=100, forward_extra=40, backward_extra=20)


def test_a_program_that_asks_for_more_is_not_flat(check: ModuleType) -> None:
    first, later = (dict.fromkeys(check.memory.STEADY, value) for value in (1, 2))
    assert check.memory._flat([first, later, later])
    assert not check.memory._flat([first, later, first])
    assert "NOT flat" in check.memory._steady_text([first, later, first])


# -- around the steps ---------------------------------------------------------------------------------------------------------------------


def test_a_step_that_raises_is_a_failure_with_its_place(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no such device")

    monkeypatch.setitem(check.STEPS, "limits", replace(check.STEPS["limits"], run=broken))
    result = check.run_step("limits", CPU, "rehearsal", 0.0)
    assert result.ok is False
    assert "in broken" in result.failure
    assert "no such device" in result.failure


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os._exit(3)", "status 3"),
        ("import os; os.kill(os.getpid(), 11)", "status -11"),
        ("import time; time.sleep(60)", "did not end"),
    ],
)
def test_a_process_that_dies_or_hangs_is_a_failure(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, reason: str
) -> None:
    script = tmp_path / "step.py"
    script.write_text(program)
    monkeypatch.setattr(check.isolate, "SCRIPT", script)
    monkeypatch.setattr(check.isolate, "GRACE_S", 1.0 if "sleep" in program else 30.0)
    result = check.isolate.isolated(["limits"], "rehearsal", 0.0, {})["limits"]
    assert result.ok is False
    assert reason in result.failure


@pytest.mark.timeout(180)
def test_the_script_writes_everything_down(check: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert check.main(["--rehearse", "--only", "streams", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["header"]["torch"] == torch.__version__
    assert found["header"]["command"].endswith(f"--rehearse --only streams --json {file}")
    assert found["steps"]["streams"]["ok"] is True
    assert found["steps"]["streams"]["facts"]["differing"] == 0
    printed = capfd.readouterr().out.splitlines()
    assert check.REHEARSED in printed[-1]
    assert any(re.fullmatch(r"streams +ok", line) for line in printed)


def test_what_one_gpu_cannot_show_is_said(check: ModuleType) -> None:
    step = check.STEPS["cannot"]
    said = values(step.run(CPU, step.sizes["full"], 0.0))
    assert {"NVLink", "NCCL between ranks", "two processes on one GPU"} <= said.keys()


def test_a_wrong_step_is_the_exit_status(check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"limits": check.Result(), "streams": check.Result(ok=False, failure="Traceback\nRuntimeError: broken")}
    monkeypatch.setattr(check.isolate, "isolated", lambda names, *rest: {name: results[name] for name in names})
    assert check.main(["--rehearse", "--only", "streams,limits"]) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: broken" in printed
    assert re.search(r"limits +measured", printed), "the other step still runs"


def test_an_unknown_step_is_refused(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--only", "limits,warmth"])
    assert "no step warmth: choose from limits, peer" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err


def test_the_document_has_every_step(check: ModuleType) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "gpu.md").read_text()
    shown, found = text.split("## Results")
    assert re.findall(r"^\| `(\w+)` \|", shown, re.MULTILINE) == list(check.STEPS)
    assert set(re.findall(r"^\| `(\w+)` \|", found, re.MULTILINE)) == set(check.STEPS) - {"cannot"}
