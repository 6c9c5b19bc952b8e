"""Print a schedule as a grid for people. In: a Schedule. Out: text that nothing reads back.

    # bpipe schedule=1f1b microbatches=8 stage_to_rank=0,1,2,3 partners=3,2,1,0 bounds=3,3,3,3
    slot      0  1  2  3  4  5  6  7  8  9
    rank 0 C F0 F1 F2 F3  .  .  . B0 F4 B1
           T  .  . E1  .  .  .  . E3 L1  .

A lane is a rank: on its line C what it computes (`.` is a bubble), on line T, if it transfers anything, what it moves
beside that. A cell is the kind's initial and the micro-batch: F forward, B backward, I and W its halves, E evict, H
host, R return, L load. With several stages per rank, or where the stage is not the one the lane implies, its number
stands in front. `0F5&7B2` are a forward and a backward that run together. A grid wider than the page goes on in blocks.
`after_input=0.5` in the header: of a micro-batch whose backward is split, half is counted between its halves. Knows no
terminal: width and paint come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.files.text import header
from bpipe.schedule.hosts import Hosts, device_ranks, partners_of
from bpipe.schedule.layout import Layout
from bpipe.schedule.schedule import Schedule, Slot

BUBBLE = "."
# Joins the transfers of one slot.
JOIN = "+"
# Joins the two computations of one slot.
BESIDE = "&"

_LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.SHARD_FORWARD: "S",
    Kind.SHARD_BACKWARD: "T",
    Kind.INPUT_FORWARD: "IF",
    Kind.INPUT_BACKWARD: "IB",
    Kind.EVICT: "E",
    Kind.HOST: "H",
    Kind.RETURN: "R",
    Kind.LOAD: "L",
}
_PARTNERS_KINDS = (Kind.HOST, Kind.RETURN)

# Colours a cell: the padded text and the slot it belongs to.
Paint = Callable[[str, Action | None], str]


def write_grid(schedule: Schedule, width: int | None = None, paint: Paint | None = None) -> str:
    """Return the whole schedule, in blocks of columns that fit `width` characters; None is one block."""
    lines = _lines(schedule)
    widths = [len(str(slot)) for slot in range(len(schedule.ranks[0]))]
    for _, cells, _ in lines:
        widths = [max(width, len(cell)) for width, cell in zip(widths, cells, strict=True)]
    margin = max(len(label) for label, _, _ in lines)
    blocks = []
    for columns in _pages(widths, None if width is None else width - margin):
        block = ["slot".ljust(margin) + "".join(f" {slot:>{widths[slot]}}" for slot in columns)]
        for label, cells, actions in lines:
            padded = ((cells[slot].rjust(widths[slot]), actions[slot]) for slot in columns)
            block.append(
                label.rjust(margin)
                + "".join(f" {text if paint is None else paint(text, action)}" for text, action in padded)
            )
        blocks.append("\n".join(block))
    return header(schedule) + "\n" + "\n\n".join(blocks) + "\n"


def _lines(schedule: Schedule) -> list[tuple[str, list[str], list[Action | None]]]:
    """Return every line of the grid: its label, its cells, and the action that colours each."""
    own, hosted = _implied(schedule.layout, schedule.num_ranks, schedule.hosts)
    digits = len(str(schedule.num_ranks - 1))
    lines: list[tuple[str, list[str], list[Action | None]]] = []
    for rank, row in enumerate(schedule.ranks):
        computed = [_computed(slot, own[rank]) for slot in row]
        lines.append((f"rank {rank:<{digits}} C", computed, [slot.compute for slot in row]))
        if any(slot.transfers for slot in row):
            moved = [
                JOIN.join(_short(action, own[rank], hosted[rank]) for action in slot.transfers) or BUBBLE
                for slot in row
            ]
            lines.append(("T", moved, [slot.transfers[0] if slot.transfers else None for slot in row]))
    return lines


def window(schedule: Schedule, rank: int, slot: int, ranks: Sequence[int] = (), radius: int = 4) -> str:
    """Return the grid around one slot of one rank, with the slot marked.

    `ranks` are further lanes beside the rank's and its partner's.
    """
    hosts = () if schedule.hosts is None else device_ranks(schedule.hosts[rank])
    lanes = sorted({rank, *ranks, *hosts})
    last = max(len(schedule.ranks[lane]) for lane in lanes) - 1
    columns = range(max(0, slot - radius), max(slot, min(last, slot + radius)) + 1)
    table = [(-1, ["slot", "", *(str(column) for column in columns)])]
    for lane in lanes:
        table.append((lane, [f"rank {lane}", "C", *(_window_cell(schedule, lane, column, "C") for column in columns)]))
        table.append((lane, ["", "T", *(_window_cell(schedule, lane, column, "T") for column in columns)]))
    widths = [max(map(len, cells)) for cells in zip(*(row for _, row in table), strict=True)]
    marked = 2 + slot - columns[0]
    lines = []
    for lane, row in table:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        cells[marked] = f"[{cells[marked]}]" if lane == rank else f" {cells[marked]} "
        lines.append(" ".join(cells).rstrip())
    return "\n".join(lines)


def _window_cell(schedule: Schedule, rank: int, slot: int, line: str) -> str:
    if slot >= len(schedule.ranks[rank]):
        return ""
    own, hosted = _implied(schedule.layout, schedule.num_ranks, schedule.hosts)
    cell = schedule.ranks[rank][slot]
    if line == "C":
        return _computed(cell, own[rank])
    return JOIN.join(_short(action, own[rank], hosted[rank]) for action in cell.transfers)


def _implied(layout: Layout, num_ranks: int, hosts: Hosts | None) -> tuple[list[int], list[int]]:
    """For each lane the stage a cell without a number means: its own, and for H and R its partner's. -1 is none, as
    with several."""
    own = [-1] * num_ranks
    if layout.num_stages == num_ranks and layout.num_pipes == 1:
        for stage, rank in enumerate(layout.placements[0]):
            if rank < num_ranks:
                own[rank] = stage
    partners = None if hosts is None else partners_of(hosts)
    return own, [-1] * num_ranks if partners is None or len(partners) != num_ranks else [
        own[partner] for partner in partners
    ]


def _computed(slot: Slot, own: int) -> str:
    """What stands on line C."""
    return BESIDE.join(_short(action, own, -1) for action in slot.computations) or BUBBLE


def _short(action: Action, own: int, hosted: int) -> str:
    text = f"{_LETTERS.get(action.kind, action.kind.value)}{action.microbatch}"
    implied = hosted if action.kind in _PARTNERS_KINDS else own
    return text if action.stage == implied else f"{action.stage}{text}"


def _pages(widths: Sequence[int], room: int | None) -> list[list[int]]:
    """Return the columns by block; a block takes at least one."""
    pages: list[list[int]] = [[]]
    used = 0
    for slot, width in enumerate(widths):
        if room is not None and pages[-1] and used + width + 1 > room:
            pages.append([])
            used = 0
        pages[-1].append(slot)
        used += width + 1
    return pages
