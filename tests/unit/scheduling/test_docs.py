"""The pages on Megatron agree with the code: what it supports, guards, refuses and repairs. Imports no Megatron."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.config.features.table import FEATURES, PLACED, SHARDED, SLICED, Feature, State
from megatron.scheduling.hooks.repairs import REPAIRS
from megatron.scheduling.options.arguments import SchedulingConfig

ROOT = Path(__file__).resolve().parents[3]
# No heading occurs on two of these pages.
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
        ("What is refused", tuple(feature for feature in FEATURES if feature.state is State.REFUSED)),
        ("What is guarded", tuple(feature for feature in FEATURES if feature.state is State.GUARDED)),
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
    assert named == ", ".join(feature.name for feature in FEATURES if feature.own_loop)


def test_every_proof_is_a_test_or_a_row_of_one() -> None:
    paths = [
        path for folder in ("gloo", "late", "unit/runtime") for path in (ROOT / "tests" / folder).glob("test_*.py")
    ]
    tests = "".join(path.read_text() for path in paths)
    proofs = {row.proof for row in FEATURES if row.state is State.GUARDED}
    assert [proof for proof in proofs if f"def {proof}(" not in tests and f'"{proof}": ' not in tests] == []


def test_every_repair_is_in_the_table() -> None:
    documented = [(tuple(re.findall(r"`([\w.]+)`", row[0])), row[1]) for row in table("Repaired defects")]
    assert documented == [(repair.names, repair.mends) for repair in REPAIRS]


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
