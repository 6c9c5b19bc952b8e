"""Say whether the host's memory has room for the buffers of all ranks that share it.

In: what the kernel says of this process (a root for /proc and /sys, in tests), and what every rank would take. Out: a
refusal with both numbers, or none. Knows no transport and no schedule.

A rank's buffers are pinned, so they are taken whole, at once, and never paged out: too many of them end a node, not a
process. What limits them is shared: a machine's memory by all ranks on it, a cgroup's by those in it. Every limit has a
name by which ranks find the others.
"""

from __future__ import annotations

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
    """A limit on the host's memory. `shared` is the same text in all processes under it."""

    shared: str
    name: str
    available_bytes: int


@dataclass(frozen=True)
class Buffers:
    """Buffers that a rank may keep in host memory: how many, and how large each can be; 0 where that is not known."""

    count: int = 1
    most_bytes: int = 0


@dataclass(frozen=True)
class LocalRank:
    """A rank on this machine: its buffers, and the limits it is under."""

    buffers: Buffers
    rooms: tuple[MemoryLimit, ...]


class Budget:
    """This rank's buffers among those of all ranks that share a limit with it."""

    def __init__(self, mine: LocalRank, everyone: Sequence[LocalRank]) -> None:
        self._mine = mine
        # Of this rank's buffers, what it holds, by whoever holds it: to several others it has several ways.
        self._held: dict[object, int] = {}
        self._sharing = {
            room: [
                each.buffers
                for each in everyone
                if each.buffers.count and room.shared in {other.shared for other in each.rooms}
            ]
            for room in mine.rooms
        }

    def at_most(self) -> str | None:
        """Return why buffers of the largest size would not fit, or None where they would."""
        return self._lacking(
            {room: sum(one.count * one.most_bytes for one in sharing) for room, sharing in self._sharing.items()}
        )

    def of(self, nbytes: int, holder: object = None) -> str | None:
        """Return why `nbytes` for a holder's buffers here, and as much for each of the others', would not fit, or
        None."""
        self._held[holder] = nbytes
        nbytes = sum(self._held.values())
        count = max(self._mine.buffers.count, 1)
        needed = {
            room: -(-nbytes * sum(one.count for one in sharing) // count) for room, sharing in self._sharing.items()
        }
        return self._lacking({room: max(total, nbytes) for room, total in needed.items()})

    def let_go(self, holder: object) -> None:
        """Forget a holder, which has no buffers any more."""
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
    return tuple(_rooms(root))


def _rooms(root: Path) -> Iterator[MemoryLimit]:
    boot = _text(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield MemoryLimit(boot, f"{socket.gethostname()}'s memory (MemAvailable)", int(line.split()[1]) << 10)
    namespace = _link(root / "proc/self/ns/cgroup")
    for controller, path in _own_groups(root):
        mounted = _mounted(root, controller)
        if mounted is None:
            continue
        base, point = (Path(place) for place in mounted)
        # In a container only its own part of the tree may be there, and its own group may be named from outside of it.
        inside = Path(path).relative_to(base) if Path(path).is_relative_to(base) and ".." not in path else Path()
        # A group's parents limit it too.
        for part in (inside, *inside.parents):
            found = _group(root / point.relative_to("/") / part, *_FILES[controller])
            if found is not None:
                limit, available = found
                shared = f"{boot} {namespace} {controller} {base / part}"
                yield MemoryLimit(
                    shared, f"the {_gib(limit)} of cgroup {base / part} ({_FILES[controller][0]})", available
                )


# By the controller's name, which version 2 does not give: the files of a group's limit and use, and what of the use can
# be given up.
_FILES = {
    "": ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


def _own_groups(root: Path) -> Iterator[tuple[str, str]]:
    """Of version 2 ("") and of version 1's memory controller: the path of this process's group."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            yield "memory" if controllers else "", path


def _mounted(root: Path, controller: str) -> tuple[str, str] | None:
    """Which part of a hierarchy is mounted, and where."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        _, _, _, base, point, *_ = place.split()
        filesystem, _, options = kind.split(" ", 2)
        if (filesystem == "cgroup" and controller in options.split(",")) if controller else filesystem == "cgroup2":
            return base, point
    return None


def _group(folder: Path, limit_name: str, usage_name: str, reclaimable: Sequence[str]) -> tuple[int, int] | None:
    """Return a group's limit and what is left of it, or None where it has none.

    What it keeps of files can be given up.
    """
    limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= _NO_LIMIT_BYTES:
        return None
    statistics = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return int(limit), max(int(limit) - int(usage) + sum(int(statistics.get(name, 0)) for name in reclaimable), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.4g} GiB"
