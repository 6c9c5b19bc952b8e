"""The slice that is computed now, its parts of rows of tokens, and the reports of all slices of a micro-batch.

A row is what a script's data iterator returns for the whole sequence: tokens, labels, positions, a loss mask. A script gets
the whole row for every slice, so its forward step runs once per slice, and nothing is counted twice. Tensor-parallel ranks
allocate a whole sequence before they receive one, so rows are cut after the script, before the model (`stages`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bpipe.runtime import RuntimeFault


class SequenceSlice(NamedTuple):
    """One slice of one micro-batch, in one stage."""

    microbatch: int
    number: int
    stage: int


class Cutting:
    """Bounds of the slices of a sequence of `bounds[-1]` tokens, which may be set later, and the current slice."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = tuple(bounds)
        self.now: SequenceSlice | None = None
        # By the id of a part that was cut in this computation: the part, so that its id stays its own, and the whole row.
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def slices(self) -> int:
        return len(self.bounds) - 1

    @property
    def length(self) -> int:
        return self.bounds[-1]

    @property
    def span(self) -> tuple[int, int]:
        """The first token of the current slice, and the one after its last."""
        assert self.now is not None, "no slice is computed now"
        return self.bounds[self.now.number], self.bounds[self.now.number + 1]

    @contextlib.contextmanager
    def at(self, number: int, stage: int = 0) -> Iterator[SequenceSlice]:
        """Mark the slice that a stage computes inside, forward or backward; `number` is the action's."""
        assert self.now is None, f"{self.now} is still computed"
        self.now = SequenceSlice(*divmod(number, self.slices), stage)
        try:
            yield self.now
        finally:
            self.now = None
            self._rows.clear()

    def cut(self, value: Any) -> Any:
        """Return the slice's own part of a row [batch, sequence] or a mask [..., sequence, sequence]; other values as
        they are.

        A mask's part is a view: a copy, if it is saved, would have another size in each slice.
        """
        if self.now is None or not isinstance(value, torch.Tensor):
            return value
        begin, end = self.span
        if value.dim() == 4 and value.shape[-2:] == (self.length, self.length):
            return value[..., begin:end, :end]
        if value.dim() == 2 and value.shape[-1] == self.length:
            own = value[:, begin:end].contiguous()
            self._rows[id(own)] = own, value
            return own
        return value

    def row_of(self, own: torch.Tensor) -> torch.Tensor:
        """Return the whole row that a tensor was cut from in this computation.

        Raises RuntimeFault if it was not: then the tokens after the slice's end are not known.
        """
        if id(own) not in self._rows:
            raise RuntimeFault(
                f"a tensor of {tuple(own.shape)} was not cut from a row, so the tokens after this slice are not "
                "known: pass the model its tokens, labels and loss mask unchanged, or train without --bpipe-slices"
            )
        return self._rows[id(own)][1]

    def pad(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the losses [batch, own] of a slice's tokens as a row [batch, sequence] with zeros elsewhere.

        So any loss function that is linear in these returns the slice's part of the micro-batch's loss. Raises
        RuntimeFault for other shapes.
        """
        begin, end = self.span
        if losses.dim() != 2 or losses.size(1) != end - begin:
            raise RuntimeFault(
                f"the last stage returned {tuple(losses.shape)}, but with slices it must return losses per token, "
                f"(batch, {end - begin}): pass the model its labels, or train without --bpipe-slices"
            )
        return torch.nn.functional.pad(losses, (begin, self.length - end))


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


def joined(reports: list[Any]) -> Any:
    """Return a micro-batch's report of a loss function from the reports of its slices."""
    if isinstance(reports[0], Mapping):
        return {name: joined([report[name] for report in reports]) for name in reports[0]}
    if isinstance(reports[0], tuple):
        # A sum over tokens and their number, as in older scripts.
        return tuple(
            joined(list(parts)) if place == 0 else parts[0] for place, parts in enumerate(zip(*reports, strict=True))
        )
    if isinstance(reports[0], torch.Tensor) and reports[0].numel() == 2:
        # A sum over the slice's tokens, and the number of tokens of the whole micro-batch.
        return torch.stack([torch.stack([report[0] for report in reports]).sum(), reports[0][1]])
    return sum(reports[1:], reports[0])
