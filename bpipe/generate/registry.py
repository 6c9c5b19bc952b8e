"""Name every schedule there is. In: a name and sizes. Out: a compute-only Schedule, or the bound at which it balances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bpipe.generate import gpipe, interleaved, one_f_one_b
from bpipe.ir.schedule import Schedule


class OfSizes[T](Protocol):
    """Called with num_ranks, num_microbatches, num_chunks and, by a schedule that goes in groups, the micro-batches of one."""

    def __call__(self, p: int, m: int, v: int, g: int | None = None, /) -> T: ...


@dataclass(frozen=True, slots=True)
class Generator:
    """A schedule's generator and the bound BPipe balances it to."""

    generate: OfSizes[Schedule]
    balanced_bound: OfSizes[int]
    min_chunks: int = 1
    max_chunks: int | None = 1
    takes_groups: bool = False


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(lambda p, m, v, g=None: gpipe.gpipe(p, m), lambda p, m, v, g=None: gpipe.balanced_bound(m)),
    "1f1b": Generator(lambda p, m, v, g=None: one_f_one_b.one_f_one_b(p, m), lambda p, m, v, g=None: one_f_one_b.balanced_bound(p)),
    "interleaved-1f1b": Generator(
        interleaved.interleaved,
        lambda p, m, v, g=None: interleaved.balanced_bound(p, v, g),
        min_chunks=2,
        max_chunks=None,
        takes_groups=True,
    ),
}
