"""Every call around torch's runtime is needed where it stands: otherwise some test fails."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.runtime.mutations import ROOT
from tests.unit.runtime.test_mutations import NOTICED
from tests.unit.torch.mutations import TABLE


def test_every_line_of_the_table_is_in_the_code() -> None:
    for mutation in TABLE:
        compile(mutation.apply(), mutation.file, "exec")


@pytest.mark.parametrize("name", ["calls", "buffers"])
def test_the_table_leaves_out_no_call_that_is_made_for_what_it_does(name: str) -> None:
    """Statements that are nothing but a call: once eight of them stood in no table."""
    file = f"bpipe/torch/{name}.py"
    source = (ROOT / file).read_text()
    lines = source.splitlines()
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    made = [lines[one.lineno - 1].strip() for one in statements if isinstance(one.value, ast.Call)]
    taken = [mutation.line for mutation in TABLE if mutation.file == file]
    left = [line for line in set(made) if made.count(line) > taken.count(line)]
    assert [line for line in left if not line.startswith("super().__init__(")] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_any_one_of_them_a_test_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.torch.mutations", str(tmp_path / "codes.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes.pop("") == 0, "the tests fail without any mutation:\n" + ended.stdout[:3000]
    unnoticed = [
        f"{mutation.name} by {', '.join(mutation.tests)}: exit code {codes[str(place)]}"
        for place, mutation in enumerate(TABLE)
        if codes[str(place)] not in NOTICED
    ]
    assert unnoticed == []
