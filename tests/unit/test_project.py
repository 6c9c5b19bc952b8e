"""The project's outer shape: what the repository root may hold, and that the shared `megatron` namespace stays shared."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_megatron_is_a_namespace_shared_with_the_wheel() -> None:
    """An __init__.py, a core/ or a training/ here would hide the installed Megatron from whoever stands in the repository."""
    tracked = {path.name for path in (ROOT / "megatron").iterdir()} - {"__pycache__"}
    assert tracked == {"scheduling"}


@pytest.mark.parametrize("isolated", [False, True], ids=["from the checkout", "from elsewhere"])
def test_both_halves_of_megatron_are_found(isolated: bool, tmp_path: Path) -> None:
    program = "import importlib.util as u; print(*(u.find_spec(n).origin for n in ('megatron.scheduling', 'megatron.core', 'bpipe')))"
    command = [sys.executable, *(["-I"] if isolated else []), "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=tmp_path if isolated else ROOT)
    assert result.returncode == 0, result.stderr
    ours, theirs, bpipe = result.stdout.split()
    assert Path(ours).parts[-3:] == ("megatron", "scheduling", "__init__.py")
    assert "site-packages" in theirs
    assert Path(bpipe).parts[-2:] == ("bpipe", "__init__.py")


def test_megatron_core_is_the_version_whose_signatures_were_read() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "megatron-core==0.19.2" in project["dependencies"]
