"""Hosts: where evicted activations may go.

`hosts[rank]` are the devices that may hold what the rank evicts, and its own host memory if that may. Balancing makes
pairs, in which each rank's device is the other's only host; any other arrangement is a pool, host memory included.
"""

import enum
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple


class Tier(enum.IntEnum):
    """A rank's memory: its device's, or the host memory of its node. The first is preferred."""

    DEVICE = 0
    HOST_MEMORY = 1


class Host(NamedTuple):
    """The memory that takes what a rank evicts: another rank's device, or the rank's own host memory."""

    rank: int
    tier: Tier = Tier.DEVICE

    @property
    def on_device(self) -> bool:
        """Whether the host is a device: then its rank has the other end of every transfer."""
        return self.tier is Tier.DEVICE


# Two ranks. Of a link the sender, then the receiver; one rank twice for the link to its own host memory.
Pair = tuple[int, int]
# By rank: the memories that it may evict to.
Hosts = tuple[tuple[Host, ...], ...]


def host_memory_of(rank: int) -> Host:
    """Return a rank's own host memory."""
    return Host(rank, Tier.HOST_MEMORY)


def device_ranks(hosts: Iterable[Host]) -> tuple[int, ...]:
    """Return the ranks whose devices are among the hosts."""
    return tuple(host.rank for host in hosts if host.on_device)


# Where a rank may evict to, in the words of commands and files: the other rank of a pair; any rank with room; its own
# node's memory; or any rank with room and, if none has any, its own node's memory.
PAIR, POOL, HOST, ALL = ARRANGEMENTS = ("pair", "pool", "host", "all")
# Arrangements that evict to a node's memory.
IN_NODES = (HOST, ALL)

# In text: joins the hosts of one rank; a rank's own host memory; a rank without hosts.
_JOIN, _OWN, _NOBODY = "+", "own", "none"


def in_pairs(partners: Sequence[int]) -> Hosts:
    """Return the hosts of ranks that host for each other; `partners[rank]` is the rank itself if it has none."""
    return tuple(() if partner == rank else (Host(partner),) for rank, partner in enumerate(partners))


def partners_of(hosts: Hosts) -> tuple[int, ...] | None:
    """Return each rank's partner, or the rank itself if it has none; None for a pool."""
    partners = tuple(of_rank[0].rank if of_rank else rank for rank, of_rank in enumerate(hosts))
    mutual = all(0 <= partner < len(hosts) and partners[partner] == rank for rank, partner in enumerate(partners))
    return partners if mutual and hosts == in_pairs(partners) else None


def mirrored_pairs(num_ranks: int) -> tuple[int, ...]:
    """Return the pairs s and p-1-s: the default if later ranks hold less, and the meaning of a file without hosts."""
    return tuple(reversed(range(num_ranks)))


def halved_pairs(num_ranks: int) -> tuple[int, ...]:
    """Return pairs within each half: its first rank with its last, and so on.

    These are the `default_partners` if mirror images hold alike and the middle holds most. With an odd number of ranks
    in a half its middle has no partner there, and the two differ a little.
    """
    half = num_ranks // 2
    return tuple((half if rank < half else half + num_ranks) - 1 - rank for rank in range(num_ranks))


def default_partners(peaks: Sequence[int | Fraction]) -> tuple[int, ...]:
    """Pair the heaviest rank with one of the lightest, preferably the rank opposite, else the nearest; then the next.

    Of equally heavy ranks the first chooses first. The last of an odd number is its own partner and never transfers.

    Args:
        peaks: The most that each rank holds.

    Returns:
        The partner of each rank.
    """
    partners = list(range(len(peaks)))
    free = set(partners)
    for rank in sorted(free, key=lambda rank: (-peaks[rank], rank)):
        others = free - {rank}
        if rank not in free or not others:
            continue
        opposite = len(peaks) - 1 - rank
        chosen = min(others, key=lambda other: (peaks[other], other != opposite, abs(other - rank), other))
        partners[rank], partners[chosen] = chosen, rank
        free -= {rank, chosen}
    return tuple(partners)


def pairing(num_ranks: int, partners: Sequence[int]) -> tuple[int, ...]:
    """Return a pairing; ValueError unless every rank has a partner, and is its partner's."""
    if len(partners) != num_ranks:
        raise ValueError(f"{len(partners)} partners for {num_ranks} ranks: give one for each rank")
    for rank, partner in enumerate(partners):
        if not 0 <= partner < num_ranks:
            raise ValueError(f"rank {rank}: partner {partner} is not a rank, ranks are 0 to {num_ranks - 1}")
    for rank, partner in enumerate(partners):
        if partners[partner] != rank:
            theirs = f"rank {partner} has partner {partners[partner]}"
            raise ValueError(f"rank {rank} has partner {partner}, but {theirs}: pair them both ways")
    return tuple(partners)


def uses_host_memory(hosts: Hosts | None) -> bool:
    """Whether some rank may keep what it evicts in its own host memory."""
    return any(not host.on_device for of_rank in hosts or () for host in of_rank)


def write_hosts(hosts: Hosts) -> str:
    """Write hosts as one word: `1+2,3+own,none`."""
    return ",".join(_JOIN.join(map(write_host, of_rank)) or _NOBODY for of_rank in hosts)


def write_host(host: Host) -> str:
    """Write one host as text."""
    return str(host.rank) if host.on_device else _OWN


def read_hosts(text: str) -> Hosts:
    """Read what `write_hosts` writes. Raises ValueError for anything else."""
    try:
        return tuple(
            tuple(_host(rank, part) for part in word.split(_JOIN)) if word != _NOBODY else ()
            for rank, word in enumerate(text.split(","))
        )
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a list of hosts such as 1+2,{_OWN},{_NOBODY}") from None


def _host(rank: int, word: str) -> Host:
    if word == _OWN:
        return host_memory_of(rank)
    if not (word.isascii() and word.isdecimal() and str(int(word)) == word and len(word) < 10):
        raise ValueError(word)
    return Host(int(word))
