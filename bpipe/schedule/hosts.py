"""Say where evicted activations may go.

In: peaks, partners, or text. Out: hosts by rank, or the partners they are. Knows no placement.

`hosts[rank]` are the devices that may hold what the rank evicts, and its own host memory where that may. Pairs, in
which each rank's device is the other's one host, are what balancing makes; any other arrangement is a pool, host memory
included.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple


class Tier(enum.IntEnum):
    """Name a rank's memory: its device's, or the host memory of its node. What stands first is preferred."""

    DEVICE = 0
    HOST_MEMORY = 1


class Host(NamedTuple):
    """Name the memory that takes what a rank evicts: another rank's device, or the rank's own host memory."""

    rank: int
    tier: Tier = Tier.DEVICE

    @property
    def on_device(self) -> bool:
        """Return whether the host is a device: then its rank has the other end of every transfer."""
        return self.tier is Tier.DEVICE


# Two ranks. Of a link the sender, then the receiver; one rank twice for the link to its own host memory.
Pair = tuple[int, int]
# By rank: where what it evicts may go.
Hosts = tuple[tuple[Host, ...], ...]


def host_memory_of(rank: int) -> Host:
    """Return a rank's own host memory, the one host that it has besides devices."""
    return Host(rank, Tier.HOST_MEMORY)


def device_ranks(hosts: Iterable[Host]) -> tuple[int, ...]:
    """Return the ranks whose devices are among a rank's hosts, without its own host memory."""
    return tuple(host.rank for host in hosts if host.on_device)


# Where what leaves a rank may go, as commands and files say it: to the other rank of a pair; to any rank with room;
# into its own node's memory; or to any rank with room and, what none has room for, into its own node's memory.
PAIR, POOL, HOST, ALL = ARRANGEMENTS = ("pair", "pool", "host", "all")
# Those with which a node's memory takes what leaves.
IN_NODES = (HOST, ALL)

# In text: joins the hosts of one rank; a rank's own host memory; a rank without hosts.
_BESIDE, _OWN, _NOBODY = "+", "own", "none"


def in_pairs(partners: Sequence[int]) -> Hosts:
    """Return the hosts of ranks that host for each other: `partners[rank]` is the other one, or the rank itself,
    which then has none."""
    return tuple(() if partner == rank else (Host(partner),) for rank, partner in enumerate(partners))


def partners_of(hosts: Hosts) -> tuple[int, ...] | None:
    """Return the other rank of each one's pair, or the rank itself. None for a pool."""
    partners = tuple(of_rank[0].rank if of_rank else rank for rank, of_rank in enumerate(hosts))
    mutual = all(0 <= partner < len(hosts) and partners[partner] == rank for rank, partner in enumerate(partners))
    return partners if mutual and hosts == in_pairs(partners) else None


def mirrored_pairs(num_ranks: int) -> tuple[int, ...]:
    """Return the mirrored pairs, s with p-1-s: the default wherever later ranks hold less, and what a file without
    hosts means."""
    return tuple(reversed(range(num_ranks)))


def halved_pairs(num_ranks: int) -> tuple[int, ...]:
    """Return the first rank with the last of the same half, and so on: `default_partners` where mirror images hold
    alike and the middle most.

    With an odd number of ranks in a half its middle has nobody there, and they differ a little.
    """
    half = num_ranks // 2
    return tuple((half if rank < half else half + num_ranks) - 1 - rank for rank in range(num_ranks))


def default_partners(peaks: Sequence[int | Fraction]) -> tuple[int, ...]:
    """Return the heaviest rank with one of the lightest, then the next: the rank opposite, if it is of those, else the
    nearest.

    `peaks[rank]`: what it holds at its fullest. Of equally heavy ranks the first chooses first. The last of an odd
    number is its own partner and never transfers.
    """
    partners = list(range(len(peaks)))
    free = set(partners)
    for rank in sorted(free, key=lambda one: (-peaks[one], one)):
        others = free - {rank}
        if rank not in free or not others:
            continue
        least = min(peaks[one] for one in others)
        opposite = len(peaks) - 1 - rank
        chosen = min(
            (one for one in others if peaks[one] == least), key=lambda one: (one != opposite, abs(one - rank), one)
        )
        partners[rank], partners[chosen] = chosen, rank
        free -= {rank, chosen}
    return tuple(partners)


def pairing(num_ranks: int, partners: Sequence[int]) -> tuple[int, ...]:
    """Check a pairing and return it. Raises ValueError unless every rank has one partner and is its partner's."""
    if len(partners) != num_ranks:
        raise ValueError(f"{len(partners)} partners for {num_ranks} ranks: give one for each rank")
    for rank, partner in enumerate(partners):
        if not 0 <= partner < num_ranks:
            raise ValueError(f"rank {rank}: partner {partner} is not a rank, ranks are 0 to {num_ranks - 1}")
    for rank, partner in enumerate(partners):
        if partners[partner] != rank:
            raise ValueError(
                f"rank {rank} has partner {partner}, but rank {partner} has partner {partners[partner]}: pair them "
                f"both ways"
            )
    return tuple(partners)


def uses_host_memory(hosts: Hosts | None) -> bool:
    """Return whether some rank may keep what it evicts in its own host memory."""
    return any(not host.on_device for of_rank in hosts or () for host in of_rank)


def write_hosts(hosts: Hosts) -> str:
    """Write hosts in one word: `1+2,3+own,none`."""
    return ",".join(_BESIDE.join(map(write_host, of_rank)) or _NOBODY for of_rank in hosts)


def write_host(host: Host) -> str:
    """Write one host as text."""
    return str(host.rank) if host.on_device else _OWN


def read_hosts(text: str) -> Hosts:
    """Read what `write_hosts` writes. Raises ValueError for anything else."""
    try:
        hosts = tuple(
            tuple(_host(rank, one) for one in word.split(_BESIDE)) if word != _NOBODY else ()
            for rank, word in enumerate(text.split(","))
        )
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a list of hosts such as 1+2,{_OWN},{_NOBODY}") from None
    return hosts


def _host(rank: int, word: str) -> Host:
    if word == _OWN:
        return host_memory_of(rank)
    if not (word.isascii() and word.isdecimal() and str(int(word)) == word and len(word) < 10):
        raise ValueError(word)
    return Host(int(word))
