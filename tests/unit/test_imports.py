"""Who may import whom: the contracts of pyproject.toml, and what a command loads in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[2]


def test_the_contracts_are_kept() -> None:
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_the_command_loads_nothing_heavy() -> None:
    program = (
        "import sys; import bpipe.cli as cli; "
        "cli.main(['schedule', '--schedule', '1f1b', '--pp', '4', '--microbatches', '4', '--format', 'svg']); "
        "heavy = {'torch', 'megatron', 'matplotlib', 'numpy'} & set(sys.modules); sys.exit(' '.join(heavy) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stderr
