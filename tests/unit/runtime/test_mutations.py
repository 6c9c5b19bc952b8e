"""Every wait of the runtime is needed: without any one of them some test fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.late.every_wait import late_waits
from tests.unit.runtime.mutations import LATE, MODULES, ROOT, TABLE, waiting_lines

# Tests that failed; or a signal, where a copy used memory that had been freed.
NOTICED = (1, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)


def test_every_wait_of_the_code_is_in_the_table() -> None:
    known = {(mutation.file, mutation.line, mutation.nth) for mutation in TABLE}
    missing = [f"{file}: {line}" for file, line, nth in waiting_lines() if (file, line, nth) not in known]
    assert missing == []


def test_every_line_of_the_table_is_in_the_code_and_waits() -> None:
    waiting = set(waiting_lines())
    for mutation in TABLE:
        assert (mutation.file, mutation.line, mutation.nth) in waiting, (
            f"{mutation.file} no longer has a wait {mutation.line!r}"
        )
        compile(mutation.apply(), mutation.file, "exec")
    assert {mutation.file for mutation in TABLE} == set(MODULES)


def test_late_devices_take_out_what_only_they_notice() -> None:
    only = {mutation for mutation in TABLE if LATE in mutation.tests}
    assert only
    assert only <= {*late_waits()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_any_one_wait_a_test_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.runtime.mutations", str(tmp_path / "codes.json")]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes.pop("") == 0, "the tests fail without any mutation:\n" + ended.stdout[:3000]
    unnoticed = [
        f"{mutation.name} by {', '.join(mutation.tests)}: exit code {codes[str(place)]}"
        for place, mutation in enumerate(TABLE)
        if LATE not in mutation.tests and codes[str(place)] not in NOTICED
    ]
    assert unnoticed == []
