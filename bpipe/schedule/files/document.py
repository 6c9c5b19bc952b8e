"""Schedules as JSON, exact both ways, and files of schedules in JSON or CSV.

    {"schedule": "1f1b", "stages": 4, "microbatches": 8, "chunks": 1, "balance": "bpipe", "bounds": [3, 3, 3, 3],
     "partners": [3, 2, 1, 0], "stage_to_rank": [0, 1, 2, 3],
     "ranks": [{"rank": 0, "peak": 3, "evictions": 3, "slots": [{"compute": "0F0", "transfers": []}, ...]}, ...]}

`stages` is the number of ranks p; with chunks the stage of a cell is below p*v, and `stage_to_rank` places it. `peak`
and `evictions` follow from the slots and must agree with them. `costs`, `hop`, `makespan` and `bubble_percent` may
follow: the durations that the writer assumed, for readers of the data. `partners` and `stage_to_rank` may be omitted if
they are the usual ones. If micro-batches are cut, `slices` is the number of slices; numbers in slots are then of slices, and `peak` and
`bounds` count slices of a chunk.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bpipe.schedule.files.text import (
    TextError,
    assemble,
    describe,
    head_of,
    read_computation,
    read_csv,
    slot_of,
    write_computation,
)
from bpipe.schedule.hosts import mirrored_pairs
from bpipe.schedule.memory import num_transfers, peak_counts
from bpipe.schedule.schedule import Schedule, Slot
from bpipe.values import a_list, a_text, a_whole, an_object, load_json

_KEYS = ("schedule", "stages", "microbatches", "chunks", "balance", "bounds", "ranks")
_RANK_KEYS = ("rank", "peak", "evictions", "slots")
# Keys of fields that a document has only if they differ from the default.
_SPECIAL = ("slices", "vocabulary", "input", "hosts")
# Keys about durations, which slots do not imply.
_TIMES = ("costs", "hop", "makespan", "bubble_percent")
_MOST = 10**9 - 1


def write_json(schedule: Schedule, times: Mapping[str, object] | None = None) -> str:
    """Return a schedule as JSON, one line per rank, keys in the order above.

    Args:
        schedule: The schedule to write.
        times: Values of the keys about durations.
    """
    fields, placements = head_of(schedule), schedule.layout.placements
    head = {
        "schedule": schedule.name,
        "stages": schedule.num_ranks,
        "microbatches": schedule.num_whole_microbatches,
        "chunks": schedule.num_chunks,
        "balance": "none" if schedule.hosts is None else "bpipe",
        "bounds": schedule.bounds,
        "partners": fields.get("partners"),
        "stage_to_rank": placements[0] if len(placements) == 1 else placements,
        **{key: fields[key] for key in _SPECIAL if key in fields},
        **{key: times[key] for key in _TIMES if times and key in times},
    }
    lines = ",\n  ".join(json.dumps(_rank(schedule, rank, peak)) for rank, peak in enumerate(peak_counts(schedule)))
    return f'{json.dumps(head)[:-1]},\n "ranks": [\n  {lines}]}}\n'


def _rank(schedule: Schedule, rank: int, peak: int) -> dict[str, object]:
    return {
        "rank": rank,
        "peak": peak,
        "evictions": num_transfers(schedule, rank).evictions,
        "slots": [
            {"compute": write_computation(slot) or None, "transfers": [str(action) for action in slot.transfers]}
            for slot in schedule.ranks[rank]
        ],
    }


def read_json(text: str) -> Schedule:
    """Read a schedule from JSON. Raises TextError for what is missing, unknown, of the wrong type, or contradictory."""
    try:
        return _read(load_json(text))
    except ValueError as error:
        raise TextError(f"{error}") from None


def _read(document: object) -> Schedule:
    fields = _object(document, "the document", _KEYS, ("partners", "stage_to_rank", *_SPECIAL, *_TIMES))
    texts = ("schedule", "vocabulary", "input", "hosts")
    head: dict[str, Any] = {key: a_text(fields[key], key) for key in texts if key in fields}
    num_ranks, num_chunks = (a_whole(fields[key], key, 1, _MOST) for key in ("stages", "chunks"))
    head["microbatches"] = a_whole(fields["microbatches"], "microbatches", 1, _MOST)
    head["slices"] = a_whole(fields.get("slices", 1), "slices", 1, _MOST)
    entries = a_list(fields["ranks"], "ranks")
    if len(entries) != num_ranks:
        raise ValueError(f"ranks has {len(entries)} entries, but stages is {num_ranks}")
    ranks = tuple(_read_rank(entry, rank) for rank, entry in enumerate(entries))
    usual = [] if "stage_to_rank" in fields else list(describe(ranks)[1])
    listed = a_list(fields.get("stage_to_rank", usual), "stage_to_rank")
    several = bool(listed) and isinstance(listed[0], list)
    head["stage_to_rank"] = [_numbers(placement, "stage_to_rank") for placement in (listed if several else [listed])]
    for placement in head["stage_to_rank"]:
        if len(placement) != num_ranks * num_chunks:
            raise ValueError(f"there are {len(placement)} stages, but stages times chunks is {num_ranks * num_chunks}")
    if fields["bounds"] is not None:
        head["bounds"] = _numbers(fields["bounds"], "bounds")
    if "hosts" not in fields:
        head["partners"] = _partners(fields, num_ranks)
    schedule = assemble(ranks, head)
    _compare(schedule, entries)
    return schedule


def _partners(fields: Mapping[str, object], num_ranks: int) -> tuple[int, ...] | None:
    balance = fields["balance"]
    if balance not in ("none", "bpipe"):
        raise ValueError(f'balance: {balance!r} is neither "none" nor "bpipe"')
    partners = fields.get("partners", None if balance == "none" else list(mirrored_pairs(num_ranks)))
    if (partners is None) != (balance == "none"):
        raise ValueError(f"balance is {balance!r}, but partners is {partners!r}")
    return None if partners is None else _numbers(partners, "partners")


def _read_rank(entry: object, rank: int) -> tuple[Slot, ...]:
    place = f"ranks[{rank}]"
    fields = _object(entry, place, _RANK_KEYS)
    if a_whole(fields["rank"], f"{place}.rank") != rank:
        raise ValueError(f"{place}.rank is {fields['rank']!r}: ranks must be in order")
    slots = enumerate(a_list(fields["slots"], f"{place}.slots"))
    return tuple(_read_slot(slot, f"{place}.slots[{index}]") for index, slot in slots)


def _read_slot(entry: object, place: str) -> Slot:
    fields = _object(entry, place, ("compute", "transfers"))
    compute, transfers = fields["compute"], a_list(fields["transfers"], f"{place}.transfers")
    cells = transfers if compute is None else [compute, *transfers]
    try:
        if not all(isinstance(cell, str) for cell in cells):
            raise TextError(f"{cells!r:.60} must be actions as text")
        slot = slot_of([read_computation(cell) for cell in cells])
        if (slot.compute is None) != (compute is None):
            raise TextError(f"compute is {compute!r}: write transfers under transfers, computations under compute")
        return slot
    except TextError as error:
        raise TextError(f"{place}: {error}") from None


def _compare(schedule: Schedule, entries: Sequence[Mapping[str, object]]) -> None:
    """Check that what a document says twice agrees."""
    actions = (action for row in schedule.ranks for slot in row for action in (*slot.computations, *slot.transfers))
    widest = max((action.stage for action in actions), default=-1)
    if widest >= schedule.num_stages:
        raise ValueError(f"an action names stage {widest}, but there are {schedule.num_stages} stages")
    for rank, (entry, peak) in enumerate(zip(entries, peak_counts(schedule), strict=True)):
        for key, actual in (("peak", peak), ("evictions", num_transfers(schedule, rank).evictions)):
            if a_whole(entry[key], f"ranks[{rank}].{key}") != actual:
                raise ValueError(f"ranks[{rank}].{key} is {entry[key]!r}, but its slots give {actual}")


def _object(value: object, place: str, keys: Sequence[str], optional: Sequence[str] = ()) -> Mapping[str, Any]:
    fields = an_object(value, place)
    for key in keys:
        if key not in fields:
            raise ValueError(f"{place} lacks {key!r}")
    for key in fields:
        if key not in keys and key not in optional:
            raise ValueError(f"{place} has an unknown {key[:40]!r}")
    return fields


def _numbers(value: object, place: str) -> tuple[int, ...]:
    return tuple(a_whole(number, f"{place}[{index}]", 0, _MOST) for index, number in enumerate(a_list(value, place)))


STANDARD_INPUT = "-"


def read(text: str) -> Schedule:
    """Read a schedule from CSV or JSON, told apart by how they begin."""
    if text.lstrip(" \n\r\t").startswith("{"):
        return read_json(text)
    first, _, rest = text.partition("\n")
    if first.startswith("#") and rest.startswith("slot"):
        raise TextError("line 2: 'slot' begins a grid, which is not read: write the schedule with --format csv or json")
    return read_csv(text)


def read_file(name: str) -> Schedule:
    """Read a schedule from a file; `-` is standard input.

    Args:
        name: The file; its ending says whether it is CSV or JSON.

    Returns:
        The checked schedule.

    Raises:
        OSError: The file cannot be read.
        TextError: It is not a schedule; names the file.
    """
    if name == STANDARD_INPUT and sys.stdin is None:
        raise ValueError("--input -: standard input is closed")
    source = source_of(name)
    try:
        data = sys.stdin.buffer.read() if name == STANDARD_INPUT else Path(name).read_bytes()
        return read(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TextError(f"{source}: byte {error.start} is not UTF-8 text") from None
    except ValueError as error:
        raise TextError(f"{source}: {error}") from None


def source_of(name: str) -> str:
    """Return a file's name in words."""
    return "standard input" if name == STANDARD_INPUT else name
