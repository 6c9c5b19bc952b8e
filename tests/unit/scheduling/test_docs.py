"""The pages on Megatron say what the code does: its flags, what it refuses and how it says so, what it replaces, and
which test shows what.

Nothing here imports Megatron, and neither may what it reads.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bpipe.features.feature import Feature, State
from bpipe.features.sliced import SLICED
from bpipe.features.table import FEATURES, PLACED, SHARDED
from megatron.scheduling.hooks.patches import PATCHES
from megatron.scheduling.hooks.repairs import REPAIRS
from megatron.scheduling.hooks.upstream import TRIED_VERSIONS

ROOT = Path(__file__).resolve().parents[3]
# Headings that stand in no two of these.
PAGES = ("megatron", "supported", "refused", "hooks", "placed", "vocabulary", "slices")
TEXT = "\n".join((ROOT / f"docs/{page}.md").read_text() for page in PAGES)


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    lines = TEXT.split(f"\n## {heading}\n", 1)[1].splitlines()
    rows = []
    for line in lines:
        if line.startswith("|"):
            rows.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            break
    assert all(len(row) == len(rows[0]) for row in rows)
    return rows[2:]


def plain(cell: str) -> str:
    return cell.replace("`", "")


@pytest.mark.parametrize(
    ("heading", "refusals"),
    [
        ("What is refused", tuple(one for one in FEATURES if one.state is State.REFUSED)),
        ("What is guarded", tuple(one for one in FEATURES if one.state is State.GUARDED)),
        ("Stages placed as a V", PLACED),
        ("The output layer in shards", SHARDED),
        ("Sequences in slices", tuple(one for one in SLICED if one.state is State.REFUSED)),
    ],
)
def test_every_refusal_is_in_the_table_as_it_is_said(heading: str, refusals: tuple[Feature, ...]) -> None:
    documented = {row[0]: (plain(row[1]), plain(row[2])) for row in table(heading)}
    assert documented == {refusal.name: (refusal.reason, refusal.remedy) for refusal in refusals}
    assert len(documented) == len(refusals), "two refusals have one name"


def test_every_replaced_function_is_in_the_table() -> None:
    assert {plain(row[0]) for row in table("Wrapped functions")} == {
        f"{patch.module}.{patch.name}" for patch in PATCHES
    }
    assert f"pip install megatron-core=={TRIED_VERSIONS[-1]}" in TEXT


def test_every_repair_is_in_the_table() -> None:
    documented = [(tuple(re.findall(r"`([\w.]+)`", row[0])), row[1]) for row in table("What is mended")]
    assert documented == [(repair.names, repair.mends) for repair in REPAIRS]


def test_reading_the_table_of_refusals_loads_nothing_heavy() -> None:
    """A fresh interpreter, because other tests may have loaded torch into this one."""
    program = (
        "import sys, megatron.scheduling.options.arguments; sys.exit(' '.join({'torch', 'megatron.core'} & "
        "set(sys.modules)) or 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, cwd=ROOT, check=False
    )
    assert ended.returncode == 0, ended.stderr
