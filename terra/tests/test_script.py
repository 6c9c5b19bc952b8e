"""`python -m terra audit SCRIPT` reports on a script that trains, and says why if there is nothing to report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TRAINING = """
import sys, torch
net = torch.nn.Linear(4, 2)
first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
batch = torch.randn(3, 4)
for step in range(int(sys.argv[1])):
    for optimizer in (first, second):
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()
    DEFECT
open(sys.argv[2], "w").write("trained to the end")
"""


def audit(
    folder: Path, content: str, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(content)
    command = [sys.executable, "-m", "terra", "audit", *options, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)


def test_without_torch_one_line_says_what_to_install(tmp_path: Path) -> None:
    program = (
        f"import runpy, sys; sys.path = [{str(ROOT)!r}, *(path for path in sys.path if 'site-packages' not in path)]; "
        "sys.argv = ['', 'audit', 'step.py']; runpy._run_module_as_main('terra')"
    )
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert 'terra needs torch, which is not installed: pip install "torch>=2.11"' in ended.stderr


def test_a_script_is_run_for_a_few_steps_of_its_first_optimizer(tmp_path: Path) -> None:
    content = TRAINING.replace("DEFECT", "batch.mul_(1 / (step + 1))")
    ended = audit(tmp_path, content, "1000000", str(tmp_path / "end"), options=("--json", str(tmp_path / "found.json")))
    assert ended.returncode == 1, ended.stderr
    assert "3 steps of" in ended.stdout
    (entry,) = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert (entry["kind"], entry["operation"], entry["line"]) == ("scalar", "mul_", 11)
    assert not (tmp_path / "end").exists()


def test_what_a_script_prints_and_asserts_is_found(tmp_path: Path) -> None:
    """A print, an allclose assertion and an alternating option gave "nothing found" and status 0."""
    lines = (
        "print(batch)",
        "assert torch.allclose(batch, batch)",
        "torch.nn.functional.gelu(batch, approximate=('none', 'tanh')[step % 2])",
    )
    ended = audit(tmp_path, TRAINING.replace("DEFECT", "\n    ".join(lines)), "5", str(tmp_path / "end"))
    assert ended.returncode == 1, ended.stderr
    report = ended.stdout[ended.stdout.index("3 steps of") :]
    assert "train.py:11\n  host reads: <repr>: repr of float32 [3, 4] (" in report
    assert "train.py:12\n  host reads: allclose: a value of float32 [3, 4]\n" in report
    assert "train.py:13\n  setting changes: gelu: approximate is none then tanh\n" in report


def test_a_script_that_ends_by_itself_is_judged_by_what_it_did(tmp_path: Path) -> None:
    ended = audit(tmp_path, TRAINING.replace("DEFECT", "pass"), "3", str(tmp_path / "end"), options=("--json", "-"))
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["format"], report["version"], report["steps"], report["findings"]) == ("terra-audit", 1, 2, [])
    assert (tmp_path / "end").read_text() == "trained to the end"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("import torch\ntorch.ones(3)\n", "no torch.optim optimizer stepped in it"),
        (TRAINING, "stepped 2 times, but finding what changes"),
    ],
    ids=["none", "too few"],
)
def test_where_nothing_can_be_said_that_is_said(tmp_path: Path, content: str, words: str) -> None:
    ended = audit(tmp_path, content.replace("DEFECT", "pass"), "2", str(tmp_path / "end"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_error_of_the_script_is_its_own(tmp_path: Path) -> None:
    ended = audit(tmp_path, "raise OSError('on purpose')\n")
    assert ended.returncode == 1
    assert ended.stderr.endswith("OSError: on purpose\n")
