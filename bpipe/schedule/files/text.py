"""Actions and schedules as text, exact both ways.

A cell is `<stage><KIND><microbatch>`, as in torch.distributed.pipelining's CSV: `2F0`, `0EVICT1`;
`(0F5;7B2)OVERLAP_F_B` is a forward and a backward that run together. CSV has a row per rank and a column per slot; a
slot with several actions separates them by spaces, computation first, and an empty cell is a bubble. A schedule with
partners or bounds starts with one line of header; without it, the file is what torch's own reader takes, and has no
name. Torch's runtime form, which has messages between the computations, is refused, and so is whatever is not
understood to the last character. The rules that a schedule must keep are left to `check`.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from bpipe.schedule.action import COMPUTE, Action, Kind
from bpipe.schedule.hosts import in_pairs, pairing, partners_of, read_hosts, write_hosts
from bpipe.schedule.layout import MOST_PIPES, TWO_PIPES, Layout, Vocabulary, one_pipe
from bpipe.schedule.schedule import Schedule, Slot

_NUMBER = "(0|[1-9][0-9]{0,8})"
_CELL = re.compile(f"{_NUMBER}({'|'.join(kind.value for kind in Kind)}){_NUMBER}")
_RUNTIME = re.compile("[0-9]+((WAIT_)?SEND_|RECV_|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD).*")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_KINDS = {kind.value: kind for kind in Kind}
_EMPTY = Slot()
_HEADER = "# bpipe"
_REQUIRED = ("schedule", "microbatches", "stage_to_rank")
_FIELDS = (*_REQUIRED, "vocabulary", "input", "partners", "hosts", "bounds", "slices")

# A file may not make us allocate what it does not contain.
MAX_SLOTS = 10_000_000


class TextError(ValueError):
    """Text that is no schedule: the message names line and cell, what is there, and what may be."""


def read_action(text: str) -> Action:
    """Read a cell such as `2F0`; TextError if the text is not exactly a cell."""
    match = _CELL.fullmatch(text)
    if match is None:
        if _RUNTIME.fullmatch(text):
            raise TextError(
                f"{text[:40]!r} belongs to torch's runtime form, which is not read: give the computations alone "
                "(pipeline_order, `_dump_csv(file, 'compute_only')`)"
            )
        raise TextError(
            f"{text[:40]!r} is not an action: expected <stage><kind><microbatch> with a kind of {', '.join(_KINDS)}, "
            "such as 2F0"
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), _KINDS[kind], int(microbatch))


def read_computation(text: str) -> tuple[Action, ...]:
    """Read one action, or the forward and the backward of an overlapped cell."""
    match = _PAIR.fullmatch(text)
    if match is None:
        return (read_action(text),)
    forward, backward = (read_action(part) for part in match.groups())
    if forward.kind is not Kind.FORWARD or backward.kind not in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        raise TextError(f"{text[:40]!r} overlaps something other than a forward and a backward, in this order")
    return forward, backward


def write_computation(slot: Slot) -> str:
    """Return what the slot computes as text, empty for a bubble."""
    if slot.overlapped is not None:
        return f"({slot.compute};{slot.overlapped})OVERLAP_F_B"
    return "" if slot.compute is None else str(slot.compute)


def write_csv(schedule: Schedule) -> str:
    """Return a schedule as CSV, one line per rank.

    Compute-only schedules are written as torch.distributed.pipelining writes its own.
    """
    in_rows = schedule.layout == one_pipe(schedule.layout.placements[0])
    needs_header = schedule.hosts is not None or schedule.bounds is not None or not in_rows
    return f"{header(schedule)}\n{write_rows(schedule)}" if needs_header else write_rows(schedule)


def write_rows(schedule: Schedule) -> str:
    """Return the lines of a CSV without its header."""
    return "".join(
        ",".join(" ".join([*filter(None, [write_computation(slot)]), *map(str, slot.transfers)]) for slot in row) + "\n"
        for row in schedule.ranks
    )


def read_csv(text: str, name: str = "csv") -> Schedule:
    """Read a schedule from CSV. Shorter rows end in bubbles.

    Args:
        text: Rows of torch.distributed.pipelining's format, one per rank.
        name: The schedule's name if the text has no header.

    Returns:
        The checked schedule.
    """
    lines = text.removesuffix("\n").split("\n")
    fields: dict[str, str] = {}
    first = 1
    if lines[0].startswith("#"):
        fields = _read_header(lines[0].rstrip("\r"))
        lines, first = lines[1:], 2
    rows = [
        [
            _read_csv_cell(cell, f"line {number}, cell {column}")
            for column, cell in enumerate(line.removesuffix("\r").split(","), 1)
        ]
        for number, line in enumerate(lines, first)
    ]
    return _assemble(rows, fields, name)


def _read_csv_cell(text: str, place: str) -> Slot:
    try:
        return slot_of([read_computation(cell) for cell in text.strip(" ").split(" ") if cell])
    except TextError as error:
        raise TextError(f"{place}: {error}") from None


def slot_of(cells: Sequence[tuple[Action, ...]]) -> Slot:
    """Return the slot of at most one computation, or two that overlap, and the transfers after it."""
    if not cells:
        return _EMPTY
    computed = cells[0] if cells[0][0].kind in COMPUTE else ()
    transfers = tuple(action for cell in (cells[1:] if computed else cells) for action in cell)
    for action in transfers:
        if action.kind in COMPUTE:
            raise TextError(
                f"{action} is a second computation or comes after a transfer: "
                "a slot has one computation, and it comes first"
            )
    return Slot(computed[0] if computed else None, transfers, computed[1] if len(computed) == 2 else None)


def head_of(schedule: Schedule) -> dict[str, object]:
    """Return what the cells of a schedule do not say, by the name of its field in files.

    Raises ValueError for a name that files cannot have.
    """
    if not NAME.fullmatch(schedule.name):
        raise ValueError(f"schedule name {schedule.name!r} cannot be written: use letters, digits, '.', '_' and '-'")
    layout, hosts = schedule.layout, schedule.hosts
    fields: dict[str, object] = {"schedule": schedule.name, "microbatches": schedule.num_whole_microbatches}
    if layout.slices > 1:
        fields["slices"] = layout.slices
    fields["stage_to_rank"] = layout.placements
    if layout.vocabulary is not Vocabulary.WHOLE:
        fields["vocabulary"] = layout.vocabulary.value
    if layout.input_shards:
        fields["input"] = "shards"
    if hosts is not None:
        partners = partners_of(hosts)
        fields |= {"hosts": write_hosts(hosts)} if partners is None else {"partners": partners}
    if schedule.bounds is not None:
        fields["bounds"] = schedule.bounds
    return fields


def header(schedule: Schedule) -> str:
    """Return the header line of a CSV or a grid."""
    return " ".join([_HEADER, *(f"{name}={_field(value)}" for name, value in head_of(schedule).items())])


def _field(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return ("/" if any(isinstance(part, tuple) for part in value) else ",").join(map(_field, value))


def _read_header(line: str) -> dict[str, str]:
    """Return the text of each field of a header line."""
    if not line.startswith(_HEADER + " "):
        raise TextError(f"line 1: a header starts with {_HEADER!r}, not with {line[:20]!r}")
    fields: dict[str, str] = {}
    for field in line.removeprefix(_HEADER + " ").split(" "):
        name, sign, value = field.partition("=")
        if not sign or name in fields or name not in _FIELDS:
            raise TextError(f"line 1: {field[:40]!r} is not a header field, or appears twice")
        fields[name] = value
    for name in _REQUIRED:
        if name not in fields:
            raise TextError(f"line 1: the header lacks {name}=")
    return fields


def _assemble(rows: Sequence[Sequence[Slot]], fields: Mapping[str, str], name: str) -> Schedule:
    """Return the schedule of these rows, described by the header or, without one, by the computations."""
    length = max((len(row) for row in rows), default=0)
    if length * len(rows) > MAX_SLOTS:
        raise TextError(f"{len(rows)} ranks of up to {length} slots: more than {MAX_SLOTS} slots in all are not read")
    ranks = tuple((*row, *[_EMPTY] * (length - len(row))) for row in rows)
    if not fields:
        num_microbatches, stage_to_rank = describe(ranks)
        return Schedule(name, num_microbatches, one_pipe(stage_to_rank), ranks)
    head: dict[str, Any] = dict(fields)
    try:
        head["stage_to_rank"] = [_numbers(pipe, "stage_to_rank") for pipe in fields["stage_to_rank"].split("/")]
        for field in ("microbatches", "slices", "partners", "bounds"):
            if field in fields:
                head[field] = _numbers(fields[field], field)
        for field in ("microbatches", "slices"):
            if field in fields:
                if len(head[field]) > 1:
                    raise TextError(f"{field}= takes one number")
                (head[field],) = head[field]
        return assemble(ranks, head)
    except TextError as error:
        raise TextError(f"line 1: {error}") from None


def assemble(ranks: tuple[tuple[Slot, ...], ...], head: Mapping[str, Any]) -> Schedule:
    """Return the schedule of these rows.

    Args:
        ranks: A row of slots per rank.
        head: As `head_of` returns it; a missing field has its default.

    Raises:
        TextError: A field has a value that no schedule has.
    """
    placements, slices, partners = tuple(map(tuple, head["stage_to_rank"])), head.get("slices", 1), head.get("partners")
    if not NAME.fullmatch(head["schedule"]):
        name = head["schedule"][:40]
        raise TextError(f"schedule={name!r} is not a valid name: use letters, digits, '.', '_' and '-'")
    if len(placements) > MOST_PIPES:
        raise TextError(f"stage_to_rank places {len(placements)} pipes: {TWO_PIPES}")
    if len(set(map(len, placements))) > 1:
        raise TextError(f"stage_to_rank={_field(placements)[:40]} has pipes of different numbers of stages")
    if head.get("input", "shards") != "shards":
        raise TextError(f"input={head['input'][:40]!r} is not shards")
    if slices < 1:
        raise TextError(f"slices={slices} must be at least 1")
    try:
        hosts = None if partners is None else in_pairs(pairing(len(ranks), partners))
        hosts = read_hosts(head["hosts"]) if "hosts" in head else hosts
    except ValueError as error:
        raise TextError(f"{'hosts=' if 'hosts' in head else 'partners: '}{error}") from None
    try:
        vocabulary = Vocabulary(head.get("vocabulary", "none"))
    except ValueError:
        names = ", ".join(vocabulary.value for vocabulary in Vocabulary)
        raise TextError(f"vocabulary {head['vocabulary'][:40]!r} is not one of {names}") from None
    layout = Layout(placements, vocabulary, "input" in head, slices)
    return Schedule(head["schedule"], head["microbatches"] * slices, layout, ranks, hosts, head.get("bounds"))


def read_costs(text: str, least: int, limit: int) -> tuple[Fraction, ...]:
    """Read between `least` and `limit` durations, such as `1,1.5,1/2`, exactly."""
    number = r"([0-9]{1,9}(\.[0-9]{1,9})?|[0-9]{1,18}/0*[1-9][0-9]{0,17})"
    if not re.fullmatch(f"{number}(,{number}){{{least - 1},{limit - 1}}}", text):
        counts = " or ".join(map(str, sorted({least, limit})))
        raise TextError(f"{text[:40]!r} is not {counts} numbers such as 1, 1.5 or 1/2")
    return tuple(map(Fraction, text.split(",")))


def read_numbers(text: str) -> tuple[int, ...]:
    """Read `3` or `3,3,2,1`: one number for all ranks, or one for each."""
    if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise TextError(f"{text[:40]!r} is neither a number nor a list of numbers such as 3,3,2,1")
    return tuple(map(int, text.split(",")))


def describe(ranks: Sequence[Sequence[Slot]]) -> tuple[int, tuple[int, ...]]:
    """Return the number of micro-batches and the rank of every stage, as the computations show them."""
    owners: dict[int, int] = {}
    last = -1
    for rank, row in enumerate(ranks):
        for slot in row:
            for action in slot.computations:
                last = max(last, action.microbatch)
                owner = owners.setdefault(action.stage, rank)
                if owner != rank:
                    remedy = "for several pipes, give a header that places each, such as stage_to_rank=0,1/1,0"
                    raise TextError(f"{action} is on rank {rank}, but rank {owner} computes the stage too; {remedy}")
    if not owners:
        raise TextError("it has no computations")
    missing = next((stage for stage in range(len(owners)) if stage not in owners), None)
    if missing is not None:
        raise TextError(f"no rank computes stage {missing}, but there is a stage {max(owners)}")
    return last + 1, tuple(owners[stage] for stage in range(len(owners)))


def _numbers(text: str, name: str) -> tuple[int, ...]:
    if not re.fullmatch(f"{_NUMBER}(,{_NUMBER})*", text):
        raise TextError(f"{name}={text[:40]!r} is not a list of numbers such as 3,2,1,0")
    return tuple(map(int, text.split(",")))
