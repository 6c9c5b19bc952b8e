"""Say which slice is computed, and cut from rows of tokens what is its own.

In: where slices begin and end. Out: `Cutting`.

A row is what a script's data iterator gives: tokens, labels, positions, a loss mask, of the whole sequence. Knows no
layers and no order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bpipe.runtime.errors import RuntimeFault


class SequenceSlice(NamedTuple):
    """One slice of one micro-batch, in one stage."""

    microbatch: int
    number: int
    stage: int


class Cutting:
    """Bounds of the slices of a sequence of `bounds[-1]` tokens, and the slice that is computed now.

    Bounds may be set later.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = tuple(bounds)
        self.now: SequenceSlice | None = None
        # By what was cut in this computation, which is held so that its id stays its own: the whole row.
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def slices(self) -> int:
        return len(self.bounds) - 1

    @property
    def length(self) -> int:
        return self.bounds[-1]

    @property
    def span(self) -> tuple[int, int]:
        """The first token of the slice that is computed, and the one behind its last."""
        assert self.now is not None, "no slice is computed now"
        return self.bounds[self.now.number], self.bounds[self.now.number + 1]

    @contextlib.contextmanager
    def at(self, number: int, stage: int = 0) -> Iterator[SequenceSlice]:
        """Mark the slice that a stage computes inside, forward or backward. Numbers are those of actions."""
        assert self.now is None, f"{self.now} is still computed"
        self.now = SequenceSlice(*divmod(number, self.slices), stage)
        try:
            yield self.now
        finally:
            self.now = None
            self._rows.clear()

    def cut(self, value: Any) -> Any:
        """Return a row's part that is the slice's own: tokens as (batch, sequence), masks as (..., sequence, sequence);
        the rest as it is.

        A mask comes as a view: a copy that is saved would be of another size in each slice.
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

        Raises RuntimeFault where it was not: what stands behind the slice's end is not known then.
        """
        found = self._rows.get(id(own))
        if found is None:
            raise RuntimeFault(
                f"a tensor of {tuple(own.shape)} was not cut from a row, so the tokens after this slice are not "
                "known: pass the model its tokens, labels and loss mask unchanged, or train without --bpipe-slices"
            )
        return found[1]

    def pad(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the losses of a slice's tokens, (batch, own), as a row, (batch, sequence), with zeros elsewhere.

        So any loss function that is linear in these gives the slice's part of the micro-batch's loss. Raises
        RuntimeFault for others.
        """
        begin, end = self.span
        if losses.dim() != 2 or losses.size(1) != end - begin:
            raise RuntimeFault(
                f"the last stage returned {tuple(losses.shape)}, but with slices it must return losses per token, "
                f"(batch, {end - begin}): pass the model its labels, or train without --bpipe-slices"
            )
        return torch.nn.functional.pad(losses, (begin, self.length - end))
