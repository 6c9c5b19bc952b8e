"""scripts/bench/transfer.py measures what it says, and says it in a table."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.gloo.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_transport_is_measured() -> None:
    sizes = "--sizes 0.5 --microbatch 0.5 --rounds 2".split()
    command = [sys.executable, str(ROOT / "scripts/bench/transfer.py"), *sizes]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    links = re.findall(r"^\| 0 \| (\d+) \| (\w+) \| \d", ended.stdout, re.MULTILINE)
    assert links == [(storages, name) for storages in ("1", "17") for name in ("memcpy", "gloo", "peer", "host")]
    modes = [f"{name}{how}" for name in ("gloo", "peer", "host") for how in ("", ", synchronous", ", verified")]
    assert all(f"| {name} |" in ended.stdout for name in ("none", *modes))
