"""What is said of micro-batches that found too little room: of the first iterations one by one, and of all in the
report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bpipe.runtime.sizing import Sizing, Unmoved
from megatron.scheduling.memory import differing
from megatron.scheduling.memory.differing import MOST_TOLD, Differing


def engine(stayed: Unmoved, differs: bool = True) -> Any:
    sizing = Sizing(differs)
    sizing.stayed, sizing.most_bytes, sizing.num_grown = stayed, {0: 4096}, 1
    return SimpleNamespace(sizing=sizing)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(differing, "say", lambda line, everywhere: said.append(line))
    monkeypatch.setattr(differing, "pipeline_begins_with_rank_0", lambda: True)
    return said


def test_not_every_iteration_is_told(lines: list[str]) -> None:
    found = Differing()
    for _ in range(MOST_TOLD + 3):
        found.ended(engine(Unmoved(1, 10, 1, 10)), 2)
    assert len(lines) == MOST_TOLD
    assert lines[-1].endswith("; the report lists further ones")
    assert found.sums.microbatches == MOST_TOLD + 3


def test_nothing_is_said_where_sizes_are_alike(lines: list[str]) -> None:
    found = Differing()
    found.ended(engine(Unmoved(), differs=False), 0)
    found.ended(SimpleNamespace(sizing=None), 0)  # type: ignore[arg-type]
    assert (lines, found) == ([], Differing())
