"""Hold a schedule: for every rank, what it computes in each slot of the unit grid and which transfers start with that
slot.

In: actions. Out: frozen `Slot` and `Schedule` values. Knows no tensors, no seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from bpipe.schedule.action import Action, Kind, by_microbatch
from bpipe.schedule.hosts import Hosts, partners_of, write_hosts
from bpipe.schedule.layout import Layout


def computed_together(compute: Action | None, overlapped: Action | None) -> tuple[Action, ...]:
    """Return what is computed at once: nothing, one computation, or two that overlap."""
    if compute is None:
        return ()
    return (compute,) if overlapped is None else (compute, overlapped)


@dataclass(frozen=True, slots=True)
class Slot:
    """One column of the grid on one rank: a computation or a bubble, and the transfers that start with it and end by
    its end.

    `overlapped` is the backward that runs together with `compute`, a forward, as one operation: neither begins before
    both have their inputs, nor passes its output on before both are over.
    """

    compute: Action | None = None
    transfers: tuple[Action, ...] = ()
    overlapped: Action | None = None

    @property
    def computations(self) -> tuple[Action, ...]:
        return computed_together(self.compute, self.overlapped)


_ALONE: dict[tuple[int, Kind], list[Slot]] = {}


def single_slots(stage: int, kind: Kind, num_microbatches: int) -> Sequence[Slot]:
    """Return the slots with one action each, by micro-batch, these or more: each is made once, as its action is
    (`by_microbatch`)."""
    known = _ALONE.get((stage, kind))
    if known is None:
        known = _ALONE[stage, kind] = []
    known.extend(map(Slot, by_microbatch(stage, kind, num_microbatches)[len(known) : num_microbatches]))
    return known


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: what every rank does, in order.

    `ranks[rank][slot]` is a `Slot`; all ranks have equally many. `layout` says which stages each computes. A schedule
    with transfers also has `hosts[rank]` (`schedule.hosts`), where what the rank evicts may go, and `bounds[rank]`, the most
    saved chunk micro-batches the rank may hold in any slot, hosted ones included. `after_input` is the share of a
    micro-batch that is counted between the halves of a split backward: what its bounds, and all its counts, are meant
    by. Where micro-batches are cut into slices, `num_microbatches` counts slices, and so do bounds and all other
    counts.
    """

    name: str
    num_microbatches: int
    layout: Layout
    ranks: tuple[tuple[Slot, ...], ...]
    hosts: Hosts | None = None
    bounds: tuple[int, ...] | None = None
    after_input: Fraction = Fraction(1)

    @property
    def partners(self) -> tuple[int, ...] | None:
        """The other rank of each one's pair, or the rank itself; None where nobody hosts.

        Raises ValueError for a pool of hosts.
        """
        if self.hosts is None:
            return None
        partners = partners_of(self.hosts)
        if partners is None:
            raise ValueError(
                f"hosts are {write_hosts(self.hosts)}: only pairs are supported here, in which each rank is the "
                "other's only host"
            )
        return partners

    @property
    def is_pooled(self) -> bool:
        """Whether ranks host otherwise than in pairs."""
        return self.hosts is not None and partners_of(self.hosts) is None

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages over all chunks, p*v."""
        return self.layout.num_stages

    @property
    def num_whole_microbatches(self) -> int:
        """Micro-batches, all slices of one together."""
        return self.num_microbatches // self.layout.slices

    @property
    def split_stages(self) -> tuple[int, ...]:
        """Stages with a split backward, ascending."""
        computed = (cell.compute for row in self.ranks for cell in row)
        return tuple(sorted({one.stage for one in computed if one is not None and one.kind is Kind.BACKWARD_WEIGHT}))

    @property
    def num_chunks(self) -> int:
        return self.layout.num_stages // len(self.ranks)
