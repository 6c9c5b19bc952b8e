"""Schedules: for every rank, what it computes in each slot of the unit grid and which transfers start with that
slot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    """One column of the grid on one rank.

    Attributes:
        compute: The computation; None for a bubble.
        transfers: Transfers that start with the computation and end by its end.
        overlapped: The backward that runs together with `compute`, a forward, as one operation: neither begins before
            both have their inputs, nor passes its output on before both are over.
    """

    compute: Action | None = None
    transfers: tuple[Action, ...] = ()
    overlapped: Action | None = None

    @property
    def computations(self) -> tuple[Action, ...]:
        return computed_together(self.compute, self.overlapped)


_SINGLE_SLOTS: dict[tuple[int, Kind], list[Slot]] = {}


def single_slots(stage: int, kind: Kind, num_microbatches: int) -> Sequence[Slot]:
    """Return the slots with one action each by micro-batch, at least `num_microbatches`; each is made once."""
    slots = _SINGLE_SLOTS.setdefault((stage, kind), [])
    slots.extend(map(Slot, by_microbatch(stage, kind, num_microbatches)[len(slots) : num_microbatches]))
    return slots


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: what every rank does, in order.

    Attributes:
        name: Name of its family, or its own.
        num_microbatches: Number of micro-batches, or of slices if micro-batches are cut; all counts are then of slices.
        layout: Which rank computes which stage.
        ranks: `ranks[rank][slot]` is a `Slot`; all ranks have equally many.
        hosts: `hosts[rank]` is where the rank may evict to (`schedule.hosts`); None without transfers.
        bounds: Per rank, the most saved chunk micro-batches it may hold in any slot, hosted ones included.
    """

    name: str
    num_microbatches: int
    layout: Layout
    ranks: tuple[tuple[Slot, ...], ...]
    hosts: Hosts | None = None
    bounds: tuple[int, ...] | None = None

    @property
    def partners(self) -> tuple[int, ...] | None:
        """The other rank of each one's pair, or the rank itself; None if nobody hosts.

        Raises:
            ValueError: The hosts are a pool.
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
        """Whether ranks host in any other way than in pairs."""
        return self.hosts is not None and partners_of(self.hosts) is None

    def computations(self, rank: int) -> Iterator[tuple[int, Action]]:
        """Yield a rank's computations in order, each with its slot."""
        return ((slot, action) for slot, cell in enumerate(self.ranks[rank]) for action in cell.computations)

    def transfers(self, rank: int) -> Iterator[tuple[int, Action]]:
        """Yield a rank's transfers in order, each with its slot."""
        return ((slot, action) for slot, cell in enumerate(self.ranks[rank]) for action in cell.transfers)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages over all chunks, p*v."""
        return self.layout.num_stages

    @property
    def num_whole_microbatches(self) -> int:
        """Number of micro-batches, all slices of one together."""
        return self.num_microbatches // self.layout.slices

    @property
    def split_stages(self) -> tuple[int, ...]:
        """Stages with a split backward, ascending."""
        computed = (cell.compute for row in self.ranks for cell in row if cell.compute is not None)
        return tuple(sorted({action.stage for action in computed if action.kind is Kind.BACKWARD_WEIGHT}))

    @property
    def num_chunks(self) -> int:
        return self.layout.num_stages // len(self.ranks)
