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

from bpipe.schedule.files.text import (
    NAME,
    TextError,
    describe,
    read_computation,
    read_csv,
    read_partners,
    read_vocabulary,
    slot_of,
    write_computation,
)
from bpipe.schedule.hosts import Hosts, mirrored_pairs, read_hosts, write_hosts
from bpipe.schedule.layout import MOST_PIPES, TWO_PIPES, Layout, Vocabulary
from bpipe.schedule.memory import num_transfers, peak_counts
from bpipe.schedule.schedule import Schedule, Slot
from bpipe.values import load_json

_KEYS = ("schedule", "stages", "microbatches", "chunks", "balance", "bounds", "ranks")
_RANK_KEYS = ("rank", "peak", "evictions", "slots")
_OPTIONAL = ("partners", "hosts", "stage_to_rank", "vocabulary", "input", "slices")
# Keys about durations, which slots do not imply.
_TIMES = ("costs", "hop", "makespan", "bubble_percent")


def write_json(schedule: Schedule, times: Mapping[str, object] | None = None) -> str:
    """Return a schedule as JSON, one line per rank, keys in the order above.

    Args:
        schedule: The schedule to write.
        times: Values of the keys about durations.
    """
    durations = {key: times[key] for key in _TIMES if key in times} if times else {}
    head = {**_usual_head(schedule), **_special_head(schedule), **durations}
    lines = ",\n  ".join(json.dumps(_rank(schedule, rank, peak)) for rank, peak in enumerate(peak_counts(schedule)))
    return f'{json.dumps(head)[:-1]},\n "ranks": [\n  {lines}]}}\n'


def _usual_head(schedule: Schedule) -> dict[str, object]:
    """Return the fields that every document has."""
    placements = schedule.layout.placements
    return {
        "schedule": schedule.name,
        "stages": schedule.num_ranks,
        "microbatches": schedule.num_whole_microbatches,
        "chunks": schedule.num_chunks,
        "balance": "none" if schedule.hosts is None else "bpipe",
        "bounds": schedule.bounds,
        "partners": None if schedule.is_pooled else schedule.partners,
        "stage_to_rank": placements[0] if len(placements) == 1 else placements,
    }


def _special_head(schedule: Schedule) -> dict[str, object]:
    """Return the fields that a document has only if they differ from the default."""
    special: dict[str, object] = {}
    if schedule.layout.slices > 1:
        special["slices"] = schedule.layout.slices
    if schedule.layout.vocabulary is not Vocabulary.WHOLE:
        special["vocabulary"] = schedule.layout.vocabulary.value
    if schedule.layout.input_shards:
        special["input"] = "shards"
    if schedule.hosts is not None and schedule.is_pooled:
        special["hosts"] = write_hosts(schedule.hosts)
    return special


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
    """Read a schedule from JSON.

    Args:
        text: The JSON document.

    Returns:
        The checked schedule.

    Raises:
        TextError: Something is missing, unknown, of the wrong type, or contradictory.
    """
    try:
        document = load_json(text)
    except ValueError as error:
        raise TextError(f"{error}") from None
    fields = _object(document, "the document", _KEYS, (*_OPTIONAL, *_TIMES))
    name = fields["schedule"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise TextError(f"schedule: {repr(name)[:40]} is not a valid name: use letters, digits, '.', '_' and '-'")
    num_ranks, num_chunks, num_microbatches = (
        _number(fields[key], key, 1) for key in ("stages", "chunks", "microbatches")
    )
    entries = _list(fields["ranks"], "ranks")
    if len(entries) != num_ranks:
        raise TextError(f"ranks has {len(entries)} entries, but stages is {num_ranks}")
    ranks = tuple(_read_rank(entry, rank) for rank, entry in enumerate(entries))
    layout = _read_layout(fields, ranks)
    for placement in layout.placements:
        if len(placement) != num_ranks * num_chunks:
            raise TextError(f"there are {len(placement)} stages, but stages times chunks is {num_ranks * num_chunks}")
    bounds = None if fields["bounds"] is None else _numbers(fields["bounds"], "bounds")
    hosts = _hosts(fields, num_ranks)
    schedule = Schedule(name, num_microbatches * layout.slices, layout, ranks, hosts, bounds)
    _compare(schedule, entries)
    return schedule


def _read_layout(fields: dict[str, object], ranks: Sequence[Sequence[Slot]]) -> Layout:
    vocabulary, inputs = fields.get("vocabulary", "none"), fields.get("input", "shards")
    if inputs != "shards":
        raise TextError(f"input: {inputs!r:.40} must be 'shards'")
    if "stage_to_rank" not in fields:
        placements: list[list[object]] = [list(describe(ranks)[1])]
    else:
        listed = _list(fields["stage_to_rank"], "stage_to_rank")
        several = bool(listed) and isinstance(listed[0], list)
        placements = [_list(placement, "stage_to_rank") for placement in listed] if several else [listed]
    if len(placements) > MOST_PIPES:
        raise TextError(f"stage_to_rank places {len(placements)} pipes: {TWO_PIPES}")
    pipes = tuple(_numbers(placement, "stage_to_rank") for placement in placements)
    slices = _number(fields.get("slices", 1), "slices", 1)
    return Layout(pipes, read_vocabulary(str(vocabulary), "vocabulary"), "input" in fields, slices)


def _hosts(fields: dict[str, object], num_ranks: int) -> Hosts | None:
    if "hosts" in fields:
        try:
            return read_hosts(str(fields["hosts"]))
        except ValueError as error:
            raise TextError(f"hosts: {error}") from None
    balance = fields["balance"]
    if balance not in ("none", "bpipe"):
        raise TextError(f'balance: {balance!r} is neither "none" nor "bpipe"')
    usual = None if balance == "none" else list(mirrored_pairs(num_ranks))
    partners = fields.get("partners", usual)
    if (partners is None) != (balance == "none"):
        raise TextError(f"balance is {balance!r}, but partners is {partners!r}")
    return None if partners is None else read_partners(_numbers(partners, "partners"), num_ranks)


def _read_rank(entry: object, rank: int) -> tuple[Slot, ...]:
    place = f"ranks[{rank}]"
    fields = _object(entry, place, _RANK_KEYS)
    if _number(fields["rank"], f"{place}.rank", 0) != rank:
        raise TextError(f"{place}.rank is {fields['rank']!r}: ranks must be in order")
    slots = enumerate(_list(fields["slots"], f"{place}.slots"))
    return tuple(_read_slot(slot, f"{place}.slots[{index}]") for index, slot in slots)


def _read_slot(entry: object, place: str) -> Slot:
    fields = _object(entry, place, ("compute", "transfers"))
    compute, transfers = fields["compute"], _list(fields["transfers"], f"{place}.transfers")
    cells = transfers if compute is None else [compute, *transfers]
    try:
        if not all(isinstance(cell, str) for cell in cells):
            raise TextError(f"{cells!r:.60} must be actions as text")
        slot = slot_of([read_computation(str(cell)) for cell in cells])
        if (slot.compute is None) != (compute is None):
            raise TextError(f"compute is {compute!r}: write transfers under transfers, computations under compute")
        return slot
    except TextError as error:
        raise TextError(f"{place}: {error}") from None


def _compare(schedule: Schedule, entries: Sequence[object]) -> None:
    """Check that what a document says twice agrees."""
    actions = (action for row in schedule.ranks for slot in row for action in (*slot.computations, *slot.transfers))
    widest = max((action.stage for action in actions), default=-1)
    if widest >= schedule.num_stages:
        raise TextError(f"an action names stage {widest}, but there are {schedule.num_stages} stages")
    for rank, (entry, peak) in enumerate(zip(entries, peak_counts(schedule), strict=True)):
        fields = _object(entry, f"ranks[{rank}]", _RANK_KEYS)
        for key, actual in (("peak", peak), ("evictions", num_transfers(schedule, rank).evictions)):
            if _number(fields[key], f"ranks[{rank}].{key}", 0) != actual:
                raise TextError(f"ranks[{rank}].{key} is {fields[key]!r}, but its slots give {actual}")


def _object(value: object, place: str, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TextError(f"{place} must be an object with {', '.join(keys)}")
    for key in keys:
        if key not in value:
            raise TextError(f"{place} lacks {key!r}")
    for key in value:
        if key not in keys and key not in optional:
            raise TextError(f"{place} has an unknown {str(key)[:40]!r}")
    return value


def _list(value: object, place: str) -> list[object]:
    if not isinstance(value, list):
        raise TextError(f"{place} must be a list")
    return value


def _number(value: object, place: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 10**9:
        raise TextError(f"{place}: {value!r:.40} must be a whole number from {least} to 999999999")
    return value


def _numbers(value: object, place: str) -> tuple[int, ...]:
    return tuple(_number(number, f"{place}[{index}]", 0) for index, number in enumerate(_list(value, place)))


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
