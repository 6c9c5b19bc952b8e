"""What is said of micro-batches that found too little room: of the first iterations one by one, and of all in the
report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bpipe.runtime.sizing import Sizing, Unmoved
from megatron.scheduling.loop import log
from megatron.scheduling.loop.log import MOST_TOLD, Differing


def engine(stayed: Unmoved, differs: bool = True) -> Any:
    sizing = Sizing(differs)
    sizing.stayed, sizing.most_bytes, sizing.num_grown = stayed, {0: 4096}, 1
    return SimpleNamespace(sizing=sizing)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(log, "say", lambda line, everywhere: said.append(line))
    monkeypatch.setattr(log, "pipeline_begins_with_rank_0", lambda: True)
    return said


def test_what_stayed_is_told_and_added_up(lines: list[str]) -> None:
    found = Differing()
    found.ended(engine(Unmoved(2, 5_000_000, 1, 3_000_000)), 0)
    found.ended(engine(Unmoved()), 0)
    found.ended(engine(Unmoved(1, 2_000_000, 2, 2_000_000)), 0)
    assert lines[0] == (
        "stage 0: 2 micro-batches (5 MB in all) were too large for their host buffers and stayed here; the next "
        "iteration has room for them. The bound was exceeded by at most 1 micro-batch (3 MB)"
    )
    assert len(lines) == 2
    assert (
        found.sums.stayed_microbatches,
        found.sums.stayed_bytes,
        found.sums.passed_microbatches,
        found.sums.passed_bytes,
    ) == (3, 7_000_000, 2, 3_000_000)
    assert (found.sums.largest_bytes, found.sums.times_grown) == ({0: 4096}, 1)


def test_not_every_iteration_is_told(lines: list[str]) -> None:
    found = Differing()
    for _ in range(MOST_TOLD + 3):
        found.ended(engine(Unmoved(1, 10, 1, 10)), 2)
    assert len(lines) == MOST_TOLD
    assert lines[-1].endswith("; the report lists further ones")
    assert found.sums.stayed_microbatches == MOST_TOLD + 3


def test_nothing_is_said_where_sizes_are_alike(lines: list[str]) -> None:
    found = Differing()
    found.ended(engine(Unmoved(), differs=False), 0)
    found.ended(SimpleNamespace(sizing=None), 0)  # type: ignore[arg-type]
    assert (lines, found) == ([], Differing())
