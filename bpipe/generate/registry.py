"""Name every schedule there is. In: a name and sizes. Out: a compute-only Schedule, or the bound at which it balances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bpipe.generate import gpipe, interleaved, one_f_one_b
from bpipe.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Generator:
    """A schedule's generator and the bound BPipe balances it to, both called with (num_ranks, num_microbatches, num_chunks)."""

    generate: Callable[[int, int, int], Schedule]
    balanced_bound: Callable[[int, int, int], int]
    min_chunks: int = 1
    max_chunks: int | None = 1


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(lambda p, m, v: gpipe.gpipe(p, m), lambda p, m, v: gpipe.balanced_bound(m)),
    "1f1b": Generator(lambda p, m, v: one_f_one_b.one_f_one_b(p, m), lambda p, m, v: one_f_one_b.balanced_bound(p)),
    "interleaved-1f1b": Generator(interleaved.interleaved, lambda p, m, v: interleaved.balanced_bound(p, v), 2, None),
}
