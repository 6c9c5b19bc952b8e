"""Whether the host's memory has room for the buffers of all ranks that share it.

A rank's buffers are pinned, so they are taken whole, at once, and never paged out: too many of them end a node, not a
process. The limits on them are shared: a machine's memory by all ranks on it, a cgroup's by those in it.
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The kernel, the trainer and its data loaders go on needing some of what is available now.
KEPT_FREE = 0.1
# Version 1 writes "no limit" as the largest multiple of a page that fits.
_NO_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the host's memory."""

    shared: str
    """The same text in all processes under it."""

    name: str
    available_bytes: int


@dataclass(frozen=True)
class Buffers:
    """Buffers that a rank may keep in host memory."""

    count: int = 1

    most_bytes: int = 0
    """The most that each can take; 0 if that is not known."""


@dataclass(frozen=True)
class LocalRank:
    """A rank on this machine: its buffers, and the limits it is under."""

    buffers: Buffers
    rooms: tuple[MemoryLimit, ...]


class Budget:
    """This rank's buffers among those of all ranks that share a limit with it."""

    def __init__(self, mine: LocalRank, everyone: Sequence[LocalRank]) -> None:
        self._mine = mine
        # Bytes of this rank's buffers, by holder: it has one for each rank that it is connected to.
        self._held: dict[object, int] = {}
        self._sharing = {
            room: [
                rank.buffers
                for rank in everyone
                if rank.buffers.count and room.shared in {other.shared for other in rank.rooms}
            ]
            for room in mine.rooms
        }

    def at_most(self) -> str | None:
        """Return why buffers of the largest size would not fit, or None if they would."""
        return self._lacking(
            {
                room: sum(buffers.count * buffers.most_bytes for buffers in sharing)
                for room, sharing in self._sharing.items()
            }
        )

    def of(self, nbytes: int, holder: object = None) -> str | None:
        """Return why `nbytes` for a holder's buffers here, and as much for each buffer of others, would not fit, or
        None if they would."""
        self._held[holder] = nbytes
        nbytes = sum(self._held.values())
        count = max(self._mine.buffers.count, 1)
        needed = {
            room: -(-nbytes * sum(buffers.count for buffers in sharing) // count)
            for room, sharing in self._sharing.items()
        }
        return self._lacking({room: max(total, nbytes) for room, total in needed.items()})

    def let_go(self, holder: object) -> None:
        """Forget a holder, which has no buffers any longer."""
        self._held.pop(holder, None)

    def _lacking(self, needed: Mapping[MemoryLimit, int]) -> str | None:
        for room, nbytes in needed.items():
            if nbytes > (1 - KEPT_FREE) * room.available_bytes:
                ranks = max(len(self._sharing[room]), 1)
                return (
                    f"the host buffers of {ranks} rank{'s' if ranks > 1 else ''} need {_gib(nbytes)}, but "
                    f"{room.name} has {_gib(room.available_bytes)} available, of which a tenth must stay free"
                )
        return None


def memory_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Return the limits on this process, the machine's memory first. What cannot be read limits nothing."""
    limits = []
    boot = read_text(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()
    for line in read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            name = f"{socket.gethostname()}'s memory (MemAvailable)"
            limits.append(MemoryLimit(boot, name, int(line.split()[1]) << 10))
    namespace = read_link(root / "proc/self/ns/cgroup")
    for controller, path in _own_groups(root):
        mounted = _mounted(root, controller)
        if mounted is None:
            continue
        base, point = (Path(place) for place in mounted)
        # In a container only its own part of the tree may be mounted, and its group may be named from outside of it.
        inside = Path(path).relative_to(base) if Path(path).is_relative_to(base) and ".." not in path else Path()
        # A group's parents limit it too.
        for part in (inside, *inside.parents):
            group = _group(root / point.relative_to("/") / part, *_FILES[controller])
            if group is not None:
                limit, available = group
                shared = f"{boot} {namespace} {controller} {base / part}"
                name = f"the {_gib(limit)} of cgroup {base / part} ({_FILES[controller][0]})"
                limits.append(MemoryLimit(shared, name, available))
    return tuple(limits)


# By the controller's name, which is empty in version 2: the files of a group's limit and use, and the statistics of
# what can be reclaimed.
_FILES = {
    "": ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


def _own_groups(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the path of this process's group for version 2 ("") and for version 1's memory controller."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            yield "memory" if controllers else "", path


def _mounted(root: Path, controller: str) -> tuple[str, str] | None:
    """Return which part of a hierarchy is mounted, and where."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        _, _, _, base, point, *_ = place.split()
        filesystem, _, options = kind.split(" ", 2)
        if (filesystem == "cgroup" and controller in options.split(",")) if controller else filesystem == "cgroup2":
            return base, point
    return None


def _group(folder: Path, limit_name: str, usage_name: str, reclaimable: Sequence[str]) -> tuple[int, int] | None:
    """Return a group's limit and what is left of it, or None if it has none. Pages of files count as left."""
    limit, usage = read_text(folder / limit_name), read_text(folder / usage_name)
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= _NO_LIMIT_BYTES:
        return None
    statistics = dict(line.split(" ", 1) for line in read_text(folder / "memory.stat").splitlines() if " " in line)
    return int(limit), max(int(limit) - int(usage) + sum(int(statistics.get(name, 0)) for name in reclaimable), 0)


def read_text(path: Path) -> str:
    """Return a file's text without outer white space, empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_link(path: Path) -> str:
    """Return a link's target, empty if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.4g} GiB"
