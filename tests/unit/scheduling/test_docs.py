"""The pages on Megatron say what the code does: what it supports, guards, refuses and repairs.

Nothing here imports Megatron, and neither may what it reads.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.config.features.feature import Feature, State
from bpipe.config.features.table import FEATURES, PLACED, SHARDED, SLICED
from bpipe.plan.launch_states import SUPPORTED
from bpipe.schedule.families.families import FAMILIES
from megatron.scheduling.hooks.repairs import REPAIRS
from megatron.scheduling.hooks.upstream import TRIED_VERSIONS
from megatron.scheduling.options.arguments import SchedulingConfig

ROOT = Path(__file__).resolve().parents[3]
# Headings that stand in no two of these.
PAGES = ("supported", "megatron", "vocabulary", "slices")
TEXT = "\n".join((ROOT / f"docs/{page}.md").read_text() for page in PAGES)


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    lines = TEXT.split(f"# {heading}\n", 1)[1].splitlines()
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
    ],
)
def test_every_refusal_is_in_the_table_as_it_is_said(heading: str, refusals: tuple[Feature, ...]) -> None:
    documented = {row[0]: (plain(row[1]), plain(row[2])) for row in table(heading)}
    assert documented == {refusal.name: (refusal.reason, refusal.remedy) for refusal in refusals}
    assert len(documented) == len(refusals), "two refusals have one name"


@pytest.mark.parametrize(
    ("heading", "refusals"),
    [
        ("The output layer in shards", SHARDED),
        ("Sequences in slices", tuple(feature for feature in SLICED if feature.state is State.REFUSED)),
    ],
)
def test_every_refusal_is_in_the_table_with_its_remedy(heading: str, refusals: tuple[Feature, ...]) -> None:
    documented = [(row[0], plain(row[1])) for row in table(heading)]
    assert documented == [(refusal.name, refusal.remedy) for refusal in refusals]


def test_what_is_refused_in_our_own_loop_only_is_said_to_be() -> None:
    (named,) = re.findall(r"Some are refused in our own loop only:\n(.*)\.$", TEXT, re.MULTILINE)
    assert named == ", ".join(one.name for one in FEATURES if one.own_loop)


def functions_of(*paths: str) -> set[str]:
    """The tests of files, where these are."""
    sources = [(ROOT / path).read_text() for path in paths if (ROOT / path).exists()]
    return {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}


def test_what_is_supported_or_guarded_names_what_shows_it() -> None:
    assert {one.proof for one in SUPPORTED} <= names_in_gloo_tests()
    stand_ins = functions_of("tests/unit/runtime/test_stand_ins.py", "tests/late/test_stand_ins.py")
    guarded = {one.name: one.proof for one in FEATURES if one.state is State.GUARDED}
    assert set(guarded.values()) <= stand_ins


def names_in_gloo_tests() -> set[str]:
    """Test functions, and the rows of the tables that they are parametrized with."""
    names = set()
    for path in (ROOT / "tests/gloo").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                names.add(node.name)
            elif (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Dict)
                and ast.unparse(node.targets[0]).endswith("ROWS")
            ):
                names.update(ast.literal_eval(key) for key in node.value.keys if key is not None)
    return names


def test_every_schedule_is_trained_by_a_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests/gloo").glob("test_*.py"))
    # Megatron's own loop runs it, for a flag of Megatron's: test_combined.py.
    assert [name for name in FAMILIES if f'"{name}' not in tests] == ["combined-1f1b"]


def test_nothing_is_supported_and_refused_at_once() -> None:
    supported = {flag for row in table("By Megatron's loops") for flag in re.findall(r"`(--[\w-]+)", row[1])}
    # "drop X / Y" takes flags away; "use X" and "drop a value from X" leave them.
    dropped = [
        dropped for row in table("What is refused") for dropped in re.findall(r"drop ((?:`--[\w-]+`(?: / )?)+)", row[2])
    ]
    refused = {flag for flags in dropped for flag in re.findall(r"--[\w-]+", flags)}
    assert "--use-megatron-fsdp" in refused
    assert not supported & refused


def test_every_repair_is_in_the_table() -> None:
    documented = [(tuple(re.findall(r"`([\w.]+)`", row[0])), row[1]) for row in table("Repaired defects")]
    assert documented == [(repair.names, repair.mends) for repair in REPAIRS]


def test_the_remedy_installs_the_version_that_was_tried() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    assert f"pip install megatron-core=={TRIED_VERSIONS[-1]}" in page


def test_the_example_gives_the_configuration_all_it_needs() -> None:
    block = next(block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "SchedulingConfig" in block)
    (call,) = [
        node
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == SchedulingConfig.__name__
    ]
    model = SimpleNamespace(pipeline_model_parallel_size=8, virtual_pipeline_model_parallel_size=None)
    names = {value.__name__: value for value in (SchedulingConfig, BalanceConfig)}
    config = eval(ast.unparse(call), names | {"model": model})
    assert config.active


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


def test_every_scalar_that_is_written_is_explained() -> None:
    source = (ROOT / "megatron/scheduling/record/metrics.py").read_text()
    by_stage = {f"{name}/stage-{{stage}}" for name in re.findall(r'^    "(bpipe-[\w-]+)": ', source, re.MULTILINE)}
    by_stage |= {f"{name}/stage-{{stage}}" for name in re.findall(r'own\["(bpipe-[^"]+)"\]', source)}
    written = by_stage | set(re.findall(r'scalars\["(bpipe-[^"]+)"\]', source))
    section = (ROOT / "docs/report.md").read_text().split("## While it runs\n", 1)[1].split("\n## ")[0]
    explained = {
        name.replace("stage-0", "stage-{stage}")
        for cell in re.findall(r"^\| (`bpipe-[^|]+) \|", section, re.MULTILINE)
        for name in re.findall(r"`(bpipe-[^`]+)`", cell)
    }
    assert explained == written
    assert len(written) == 11
