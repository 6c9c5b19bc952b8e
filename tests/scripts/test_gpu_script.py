"""Around the steps of scripts/gpu_check.py: their processes, limits and results, and what stands in the document."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")


def ended(pid: int) -> bool:
    """Dead, or a zombie: a container's first process need not collect those whose parents died."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def check(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("gpu_check")


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
    result = check.isolate.isolated("limits", "rehearsal", 1.0 if "sleep" in program else 60.0, {})
    assert result.ok is False
    assert reason in result.failure


def test_a_hung_step_is_ended_with_its_children_and_the_next_one_runs(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A half hour on a GPU must not be spent on one step that hangs."""
    script = tmp_path / "step.py"
    script.write_text(
        "import json, subprocess, sys, time\n"
        "name, file = sys.argv[2], sys.argv[4]\n"
        "if name == 'limits':\n"
        f"    child = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'child')!r}, "
        f"'w').write(str(child.pid)); time.sleep(60)\n"
        "json.dump({'ok': True, 'rows': [['all', 'ok: well']]}, open(file, 'w'))\n"
    )
    monkeypatch.setattr(check.isolate, "SCRIPT", script)
    monkeypatch.setattr(check, "REHEARSAL_S", 0.0)
    found = tmp_path / "found.json"
    # Of six seconds the first step has four.
    steps = {
        "limits": replace(check.STEPS["limits"], limit_s=40),
        "streams": replace(check.STEPS["streams"], limit_s=20),
    }
    monkeypatch.setattr(check, "STEPS", steps)
    begin = time.monotonic()
    assert check.main(["--rehearse", "--minutes", "0.1", "--json", str(found)]) == 1
    assert time.monotonic() - begin < 30
    said = json.loads(found.read_text())["steps"]
    assert said["limits"]["failure"] == "it did not end within 4 s"
    assert said["streams"]["ok"] is True
    for _ in range(100):
        if ended(int((tmp_path / "child").read_text())):
            break
        time.sleep(0.1)
    else:
        pytest.fail("its child is still running")
    assert "it did not end within 4 s" in capsys.readouterr().out


def test_a_cut_run_leaves_what_it_had(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def isolated(name: str, *rest: Any) -> Any:
        if name == "memory":
            raise KeyboardInterrupt
        return check.Result(ok=True)

    monkeypatch.setattr(check.isolate, "isolated", isolated)
    found = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        check.main(["--rehearse", "--part", "1", "--json", str(found)])
    said = json.loads(found.read_text())
    assert list(said["steps"]) == said["asked"][: said["asked"].index("memory")]


def test_everything_ends_in_time(check: ModuleType) -> None:
    """25 minutes in all, and a part in one sitting of ten with some to spare for starting the machine's first
    process."""
    limits = {part: sum(step.limit_s for step in check.STEPS.values() if step.part == part) / 60 for part in (1, 2, 3)}
    assert all(minutes <= 9 for minutes in limits.values())
    assert sum(limits.values()) <= 25


def test_the_list(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*check.STEPS, "together"]
    assert check.main(["--list", "--part", "2"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][:2] == ["overhead", "overhead_one_queue"]


def test_what_a_shell_has_set_for_trainings_does_not_reach_a_step(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Megatron wants one connection in the environment: with it, "unset" would have been a second run with one."""
    script = tmp_path / "step.py"
    script.write_text("import json, os, sys\njson.dump({'facts': dict(os.environ)}, open(sys.argv[4], 'w'))\n")
    monkeypatch.setattr(check.isolate, "SCRIPT", script)
    for name in check.isolate.OURS:
        monkeypatch.setenv(name, "1")
    assert not check.isolate.isolated("limits", "rehearsal", 60.0, {}).facts.keys() & set(check.isolate.OURS)
    given = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert check.isolate.isolated("limits", "rehearsal", 60.0, given).facts.items() >= given.items()


@pytest.mark.timeout(180)
def test_the_script_writes_everything_down(
    check: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
    said = dict(step.run(CPU, step.sizes["full"], 0.0).rows)
    assert {"NVLink", "NCCL between GPUs", "two processes on one GPU"} <= said.keys()


def test_a_wrong_step_is_the_exit_status(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"limits": check.Result(), "streams": check.Result(ok=False, failure="Traceback\nRuntimeError: broken")}
    monkeypatch.setattr(check.isolate, "isolated", lambda name, *rest: results[name])
    assert check.main(["--rehearse", "--only", "streams,limits"]) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: broken" in printed
    assert re.search(r"limits +measured", printed), "the other step still runs"


def test_an_unknown_step_is_refused(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--only", "limits,warmth"])
    assert "no step warmth: choose from versions, counts" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err


def test_the_document_has_every_step(check: ModuleType) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "gpu.md").read_text()
    shown, found = text.split("## Results")
    assert re.findall(r"^\| `(\w+)` \|", shown, re.MULTILINE) == list(check.STEPS)
    assert set(re.findall(r"^\| `(\w+)` \|", found, re.MULTILINE)) == set(check.STEPS) - {"cannot"}
