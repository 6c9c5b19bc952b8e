"""The arrows of the architecture: who may import whom, read from the source and tried in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import bpipe


@dataclass(frozen=True)
class Arrow:
    """No file of `place` imports one of `never`."""

    place: str
    never: frozenset[str] | set[str]
    but: tuple[str, ...] = ()


PACKAGE = Path(bpipe.__file__).parent
WITHOUT_TORCH = [
    "ir",
    "generate",
    "passes",
    "simulate",
    "models",
    "plan",
    "draw",
    "record",
    "report",
    "commands",
    "compare",
    "program.py",
    "cli.py",
    "__main__.py",
    "__init__.py",
]
# Inside the package: who must not know whom. `but` are parts of a place that may.
ARROWS = [
    # What judges a run does not know how it is printed.
    Arrow("report", {"bpipe.report.out"}, but=("report/out",)),
    # Nor does what reads and judges two runs know of a command line or of text.
    Arrow("compare", {"bpipe.commands", "bpipe.cli"}),
    Arrow("compare", {"bpipe.compare.show"}, but=("compare/show.py",)),
    # A record is what was measured; who reads it comes after it.
    Arrow("record", {"bpipe.report", "bpipe.simulate", "bpipe.plan", "bpipe.draw", "bpipe.compare", "bpipe.commands"}),
]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def sources(place: str) -> list[Path]:
    path = PACKAGE / place
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


@pytest.mark.parametrize("place", WITHOUT_TORCH)
def test_the_schedule_side_knows_no_torch_and_no_runtime(place: str) -> None:
    assert sources(place)
    for path in sources(place):
        for name in imported(path):
            assert name.split(".")[0] not in ("torch", "megatron", "numpy"), f"{path} imports {name}"
            assert not name.startswith(("bpipe.runtime", "bpipe.transport")), f"{path} imports {name}"


def test_nothing_in_bpipe_imports_megatron() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not any(name.split(".")[0] == "megatron" for name in imported(path)), path


def test_generators_passes_and_simulators_do_not_know_the_door() -> None:
    for place in ("ir", "generate", "passes", "simulate"):
        for path in sources(place):
            assert not set(imported(path)) & {"bpipe.program", "bpipe.cli"}, path


@pytest.mark.parametrize("arrow", ARROWS, ids=lambda arrow: f"{arrow.place}: no {', '.join(sorted(arrow.never))}")
def test_arrows_run_one_way(arrow: Arrow) -> None:
    spared = {path for place in arrow.but for path in sources(place)}
    held = [path for path in sources(arrow.place) if path not in spared]
    assert held
    for path in held:
        for name in imported(path):
            assert not any(name == other or name.startswith(f"{other}.") for other in arrow.never), f"{path} imports {name}"


def test_the_command_loads_nothing_heavy() -> None:
    program = (
        "import sys; import bpipe.cli as cli; "
        "cli.main(['schedule', '--schedule', '1f1b', '--stages', '4', '--microbatches', '4', '--format', 'svg']); "
        "heavy = {'torch', 'megatron', 'matplotlib', 'numpy'} & set(sys.modules); sys.exit(' '.join(heavy) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stderr
