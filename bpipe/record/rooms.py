"""Write down for which bytes a schedule was balanced. In: `Rooms`. Out: a JSON object, and the same read strictly. Reads no file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from bpipe.ir.memory import memory_of
from bpipe.passes.room import Rooms
from bpipe.record.keys import Rule, each, values_of, whole, written
from bpipe.values import a_flag

_Flag = Annotated[bool, Rule(a_flag)]
_Sizes = Annotated[tuple[int, ...], each(whole())]


@dataclass(frozen=True, slots=True)
class _Keys:
    """By rank, what there is room for; by stage, what one micro-batch holds; and what a shard of the vocabulary holds of one.

    `reserved`: host buffers have a reserve.
    """

    room_bytes: _Sizes
    saved_bytes: _Sizes
    moved_bytes: _Sizes
    after_input_bytes: _Sizes
    shard_bytes: Annotated[int, whole()] = 0
    reserved: _Flag = False


def _read(found: object, name: str) -> Rooms:
    keys = _Keys(**values_of(_Keys, found, name, f"{name}."))
    memory = memory_of(keys.saved_bytes, keys.moved_bytes, keys.after_input_bytes, keys.shard_bytes)
    return Rooms(keys.room_bytes, replace(memory, reserved=keys.reserved))


def _write(rooms: Rooms) -> dict[str, Any]:
    stages = rooms.memory.stages
    saved, moved, after = ((*(size[name] for size in map(asdict, stages)),) for name in ("saved_bytes", "moved_bytes", "after_input_bytes"))
    return written(_Keys(rooms.room_bytes, saved, moved, after, rooms.memory.shard_bytes, rooms.memory.reserved))


RoomsKeys = Annotated[Rooms, Rule(_read, _write)]
