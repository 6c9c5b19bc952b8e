"""The table of torch's names: the installed torch has them all, the code uses no other, and a torch without one is
refused in words."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bpipe.torch
from bpipe.torch import upstream

ROOM = Path(bpipe.torch.__file__).parent
SOURCES = sorted(ROOM.glob("*.py"))


def test_the_installed_torch_lacks_nothing() -> None:
    assert upstream.lacking() == []
    assert torch.__version__.startswith(upstream.READ_VERSIONS)


def test_a_torch_without_a_name_or_a_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = upstream.NAMES[0]
    changed = (row._replace(name="_Gone.method"), row._replace(parameters=("schedule_name", "rank")))
    monkeypatch.setattr(upstream, "NAMES", changed)
    assert upstream.lacking() == [
        "_Gone.method (torch's schedules by name)",
        "get_schedule_class(rank) (torch's schedules by name)",
    ]
    with pytest.raises(
        upstream.UnfitTorch,
        match=r"torch 2\.\S+ cannot be used by bpipe\.torch: torch\.distributed\.pipelining has no _Gone\.method "
        r"\(torch's schedules by name\), .*Install one of torch 2\.11, .*, or use its own schedules",
    ):
        upstream._require(upstream.lacking())


def test_a_stage_without_an_attribute_is_refused() -> None:
    schedule = SimpleNamespace(**dict.fromkeys(upstream.OF_SCHEDULE))
    stage = SimpleNamespace(**dict.fromkeys(upstream.OF_STAGE))
    upstream.require_attributes(schedule, [stage])
    del stage.fwd_cache, schedule._internal_losses
    with pytest.raises(upstream.UnfitTorch, match=r"has no _internal_losses, stage\.fwd_cache\. "):
        upstream.require_attributes(schedule, [stage])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_only_one_module_imports_torchs_pipelining(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.startswith("torch.distributed.pipelining") for name in names), path


def test_what_is_read_of_stages_stands_in_the_table() -> None:
    """And nothing stands there that nobody reads."""
    read = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and (
                (isinstance(node.value, ast.Name) and node.value.id == "stage")
                or (isinstance(node.value, ast.Subscript) and ast.unparse(node.value.value) == "stages")
            ):
                read.add(node.attr)
    methods = {name.name.split(".")[1] for name in upstream.NAMES if name.name.startswith("_PipelineStageBase.")}
    assert read == set(upstream.OF_STAGE) | methods
