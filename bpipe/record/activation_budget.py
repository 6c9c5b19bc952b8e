"""Write down for which bytes per schedule was balanced, and for which seconds.

In: `RankBudgets`, `Windows`. Out: JSON objects, and the same read strictly. Reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Annotated, Any

from bpipe.balance.budget import ActivationBudget
from bpipe.balance.deadlines import Windows
from bpipe.record.keys import Rule, by_name, each, number, values_of, whole, written
from bpipe.schedule.action import Kind
from bpipe.schedule.memory import KeptMemory, memory_of
from bpipe.values import a_flag

_Flag = Annotated[bool, Rule(a_flag)]
_Sizes = Annotated[tuple[int, ...], each(whole())]


@dataclass(frozen=True, slots=True)
class _Keys:
    """By rank, what there is room for; by stage, what one micro-batch holds; and what a shard of the vocabulary holds
    of one.

    `reserved`: host buffers have a reserve. Of `slices` a stage's stand one behind the other, and by stage there are
    the keys and values that it keeps, and their gradients.
    """

    room_bytes: _Sizes
    saved_bytes: _Sizes
    moved_bytes: _Sizes
    after_input_bytes: _Sizes
    shard_bytes: Annotated[int, whole()] = 0
    reserved: _Flag = False
    slices: Annotated[int, whole(1)] = 1
    keys_bytes: _Sizes = ()
    gradients_bytes: _Sizes = ()


def _read(found: object, name: str) -> ActivationBudget:
    keys = _Keys(**values_of(_Keys, found, name, f"{name}."))
    memory = memory_of(keys.saved_bytes, keys.moved_bytes, keys.after_input_bytes, keys.shard_bytes)
    kept = tuple(starmap(KeptMemory, zip(keys.keys_bytes, keys.gradients_bytes, strict=True)))
    memory = replace(memory, reserved=keys.reserved, slices=keys.slices, kept=kept)
    return ActivationBudget(keys.room_bytes, memory)


def _write(activation_budget: ActivationBudget) -> dict[str, Any]:
    memory = activation_budget.memory
    return written(
        _Keys(
            room_bytes=activation_budget.room_bytes,
            saved_bytes=tuple(size.saved_bytes for size in memory.stages),
            moved_bytes=tuple(size.moved_bytes for size in memory.stages),
            after_input_bytes=tuple(size.after_input_bytes for size in memory.stages),
            shard_bytes=memory.shard_bytes,
            reserved=memory.reserved,
            slices=memory.slices,
            keys_bytes=tuple(kept.keys_bytes for kept in memory.kept),
            gradients_bytes=tuple(kept.gradients_bytes for kept in memory.kept),
        )
    )


ACTIVATION_BUDGET = Rule(_read, _write)

_Seconds = Annotated[float, number()]
_SecondsByStage = Annotated[tuple[float, ...], each(number())]


@dataclass(frozen=True, slots=True)
class _WindowsKeys:
    """What things take: computations by kind and stage, a message, and by stage a transfer in a node, between two,
    and to its memory."""

    lasts_s: Annotated[Mapping[str, tuple[float, ...]], by_name(each(number()), "{key} of what lasts")]
    hop_s: _Seconds
    inside_s: _SecondsByStage
    between_s: _SecondsByStage
    nodes: _Sizes = ()
    own_s: _SecondsByStage = ()
    slices: Annotated[int, whole(1)] = 1


def _read_windows(found: object, name: str) -> Windows:
    keys = _WindowsKeys(**values_of(_WindowsKeys, found, name, f"{name}."))
    lasts = tuple((Kind(kind), seconds) for kind, seconds in keys.lasts_s.items())
    return Windows(lasts, keys.hop_s, keys.inside_s, keys.between_s, keys.nodes, keys.own_s, keys.slices)


def _write_windows(windows: Windows) -> dict[str, Any]:
    lasts = {kind.value: tuple(map(float, seconds)) for kind, seconds in windows.lasts_s}
    inside, between, own = (
        tuple(map(float, seconds)) for seconds in (windows.inside_s, windows.between_s, windows.own_s)
    )
    return written(_WindowsKeys(lasts, float(windows.hop_s), inside, between, windows.nodes, own, windows.slices))


WINDOWS = Rule(_read_windows, _write_windows)
