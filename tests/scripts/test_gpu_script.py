"""scripts/gpu_check.py: the processes of its steps, their limits and results."""

import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


def ended(pid: int) -> bool:
    """Whether a process is dead, or a zombie: a container's first process need not collect orphans."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def check(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("gpu_check")


@pytest.fixture
def replace_program(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that makes a case's process run another program, with `name` and `file` as its arguments."""

    def put(program: str) -> None:
        script = tmp_path / "case.py"
        script.write_text(f"import json, os, subprocess, sys, time\nname, file = sys.argv[1], sys.argv[5]\n{program}\n")
        monkeypatch.setattr(check.isolate, "PROGRAM", (str(script),))

    return put


def isolated(check: ModuleType, limit_s: float = 60.0, environment: Mapping[str, str] | None = None) -> Any:
    return check.isolate.isolated("versions", "late", "small", limit_s, environment or {})


def test_a_case_that_raises_is_a_failure_with_its_place(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no such device")

    monkeypatch.setattr(check.isolate.CASES["versions"].__class__, "run", broken)
    result = check.isolate.run_case("versions", None, "small", 0.0)
    assert result.ok is False
    assert "in broken" in result.failure
    assert "no such device" in result.failure


@pytest.mark.parametrize(
    ("program", "reason"),
    [("os._exit(3)", "status 3"), ("os.kill(os.getpid(), 11)", "status -11"), ("time.sleep(60)", "did not end")],
)
def test_a_process_that_dies_or_hangs_is_a_failure(
    check: ModuleType, replace_program: Callable[[str], None], program: str, reason: str
) -> None:
    replace_program(program)
    result = isolated(check, 1.0 if "sleep" in program else 60.0)
    assert result.ok is False
    assert reason in result.failure


def test_a_hung_step_is_ended_with_its_children_and_the_next_one_runs(
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    replace_program: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A half hour on a GPU must not be spent on one hanging step."""
    child, results = tmp_path / "child", tmp_path / "found.json"
    replace_program(
        "if name == 'versions':\n"
        f"    open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); time.sleep(60)\n"
        "json.dump({'ok': True, 'rows': [['all', 'ok: well']]}, open(file, 'w'))"
    )
    monkeypatch.setattr(check, "STEPS", {"versions": check.Step(4), "streams": check.Step(20, alone=True)})
    begin = time.monotonic()
    assert check.main(["--device", "late", "--minutes", "0.5", "--json", str(results)]) == 1
    assert time.monotonic() - begin < 30
    steps = json.loads(results.read_text())["steps"]
    assert steps["versions"]["failure"] == "it did not end within 4 s"
    assert steps["streams"]["ok"] is True
    for _ in range(100):
        if ended(int(child.read_text())):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the step's child is still running")
    assert "it did not end within 4 s" in capsys.readouterr().out


def test_what_is_not_reached_in_time_is_skipped(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, replace_program: Callable[[str], None], tmp_path: Path
) -> None:
    results = tmp_path / "found.json"
    replace_program("json.dump({'ok': True}, open(file, 'w'))")
    monkeypatch.setattr(check, "STEPS", {name: check.Step(20, alone=True) for name in ("versions", "streams")})
    monkeypatch.setattr(check, "LEAST_S", 60.0)
    assert check.main(["--device", "late", "--minutes", "0.5", "--json", str(results)]) == 0
    steps = json.loads(results.read_text())["steps"]
    assert {step["skipped"] for step in steps.values()} == {"the 0.5 minutes were over"}


def test_only_steps_that_are_not_alone_run_side_by_side(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running: list[str] = []
    others: dict[str, set[str]] = {}

    def run(name: str, *rest: Any) -> Any:
        running.append(name)
        time.sleep(0.2)
        others[name] = set(running) - {name}
        time.sleep(0.2)
        running.remove(name)
        return check.Result(ok=True)

    monkeypatch.setattr(check, "find_out", run)
    assert check.main(["--device", "late", "--only", "peer,streams,overhead,memory,abandon"]) == 0
    assert others == {"peer": {"streams"}, "streams": {"peer"}, "overhead": set(), "memory": set(), "abandon": set()}
    printed = re.findall(r"^--- (\w+):", capsys.readouterr().out, re.MULTILINE)
    assert printed[2:] == ["overhead", "memory", "abandon"]


def test_a_cut_run_leaves_what_it_had(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cut(name: str, *rest: Any) -> Any:
        if name == "memory":
            raise KeyboardInterrupt
        return check.Result(ok=True)

    monkeypatch.setattr(check.isolate, "isolated", cut)
    file = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        check.main(["--device", "late", "--only", "overhead,true_size,memory,nearly_full", "--json", str(file)])
    results = json.loads(file.read_text())
    assert list(results["steps"]) == results["asked"][: results["asked"].index("memory")]


def test_everything_ends_in_time(check: ModuleType) -> None:
    """If every step takes as long as it may, a quarter of an hour of one GPU is enough."""
    total_s = 0.0
    for alone, names in itertools.groupby(check.STEPS, key=lambda name: check.STEPS[name].alone):
        limits = [check.STEPS[name].limit_s for name in names]
        total_s += sum(limits) if alone else max(sum(limits) / check.SIDE_BY_SIDE["cuda"], *limits)
    assert total_s <= 15.5 * 60


def test_every_case_is_a_step(check: ModuleType) -> None:
    assert check.CASES.keys() == {case for name, step in check.STEPS.items() for _, case in step.runs(name)}


def test_what_a_shell_has_set_for_trainings_does_not_reach_a_case(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, replace_program: Callable[[str], None]
) -> None:
    """Megatron requires one connection in the environment; with it, "unset" would be a second run with one."""
    replace_program("json.dump({'facts': dict(os.environ)}, open(file, 'w'))")
    for name in check.isolate.OURS:
        monkeypatch.setenv(name, "1")
    assert not isolated(check).facts.keys() & set(check.isolate.OURS)
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert isolated(check, environment=environment).facts.items() >= environment.items()


# The cases that a step starts, and the value of the variable.
SEVERAL = {
    "overhead_one_queue": [("overhead", ("1",))],
    "connections": [(name, (number,)) for number in "18" for name in ("peer", "streams")],
    "allocators": [
        *((name, ("expandable_segments:True",)) for name in ("versions", "peer", "streams", "memory")),
        *((name, ("backend:cudaMallocAsync",)) for name in ("versions", "streams")),
    ],
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_step_of_several_runs(check: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A failed case is named, and one that only measures keeps its lines."""
    calls: list[tuple[Any, ...]] = []

    def answered(case: str, device: str, size: str, limit_s: float, environment: Mapping[str, str], lines: Any) -> Any:
        calls.append((case, tuple(environment.values())))
        if case == "streams":
            return check.Result(ok=False, rows=[("gradients", "FAILED: 3 of 4"), ("other", "ok: yes")])
        if case == "peer":
            return check.Result(ok=False, failure="Traceback\nits process ended with status -11")
        return check.Result(rows=[("with / without", "1.01")])

    monkeypatch.setattr(check.isolate, "isolated", answered)
    result = check.find_out(name, "cuda", "small", 1.0)
    assert calls == SEVERAL[name]
    rows = dict(result.rows)
    if name == "connections":
        assert result.ok is False
        assert rows["streams, 1 connection"] == "FAILED: not right: gradients"
        assert rows["peer, 8 connections"] == "FAILED: its process ended with status -11"
    elif name == "overhead_one_queue":
        assert result.ok is None
        assert rows == {"1 connection: with / without": "1.01"}


def test_the_script_writes_everything_down(
    check: ModuleType, replace_program: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_program("json.dump({'ok': True, 'facts': {'argv': sys.argv[1:4]}}, open(file, 'w'))")
    file = tmp_path / "found.json"
    assert check.main(["--device", "late", "--only", "abandon", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert results["header"]["torch"] == torch.__version__
    assert results["header"]["command"].endswith(f"--device late --only abandon --json {file}")
    assert results["steps"]["abandon"]["facts"] == {"argv": ["abandon", "late", "small"]}
    printed = capsys.readouterr().out.splitlines()
    assert check.ON_LATE in printed[-1]
    assert any(re.fullmatch(r"abandon +ok", line) for line in printed)


def test_a_wrong_step_is_the_exit_status(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"versions": check.Result(), "streams": check.Result(ok=False, failure="Traceback\nRuntimeError: broken")}
    monkeypatch.setattr(check.isolate, "isolated", lambda name, *rest: results[name])
    assert check.main(["--device", "late", "--only", "streams,versions"]) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: broken" in printed
    assert re.search(r"versions +measured", printed), "the other step still runs"


def test_without_a_gpu_it_says_so(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert "--device late" in capsys.readouterr().err
