"""Give a script the whole row for every slice, and join the reports of its slices.

So the forward step of any script runs once per slice, and nothing is counted twice. Tensor-parallel ranks allocate a whole
sequence before they receive one, so rows are cut after the script, before the model (`stages`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.scheduling.slices.cuts import Cutting, SequenceSlice


class RepeatedRows:
    """A data iterator whose rows are repeated for each slice of a micro-batch."""

    def __init__(self, iterator: Iterator[Any], cutting: Cutting) -> None:
        self._iterator, self._cutting = iterator, cutting
        self._rows: list[Any] = []
        self._now: SequenceSlice | None = None
        self._place = 0

    def __iter__(self) -> RepeatedRows:
        return self

    def __next__(self) -> Any:
        now = self._cutting.now
        assert now is not None, "data is requested outside of a slice"
        if now != self._now:
            self._now, self._place = now, 0
            if now.number == 0:
                self._rows = []
        if now.number == 0:
            self._rows.append(next(self._iterator))
        row = self._rows[self._place]
        self._place += 1
        # Scripts change their rows.
        return dict(row) if isinstance(row, dict) else row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class Reports:
    """Reports of the loss functions of a micro-batch's slices, until the last one's."""

    def __init__(self) -> None:
        self._reports: list[Any] = []

    def add(self, report: Any, is_last: bool) -> list[Any]:
        """Add a slice's report. Return the micro-batch's report after its last slice, and nothing before."""
        self._reports.append(report)
        if not is_last:
            return []
        reports, self._reports = self._reports, []
        return [_joined(reports)]

    def clear(self) -> None:
        self._reports.clear()


def _joined(reports: list[Any]) -> Any:
    if isinstance(reports[0], Mapping):
        return {name: _joined([report[name] for report in reports]) for name in reports[0]}
    if isinstance(reports[0], tuple):
        # A sum over tokens and their number, as in older scripts.
        return tuple(
            _joined(list(parts)) if place == 0 else parts[0] for place, parts in enumerate(zip(*reports, strict=True))
        )
    if isinstance(reports[0], torch.Tensor) and reports[0].numel() == 2:
        # A sum over the slice's tokens, and the number of tokens of the whole micro-batch.
        return torch.stack([torch.stack([report[0] for report in reports]).sum(), reports[0][1]])
    return sum(reports[1:], reports[0])
