"""Grids: schedules printed for people. Nothing reads them back.

    # bpipe schedule=1f1b microbatches=8 stage_to_rank=0,1,2,3 partners=3,2,1,0 bounds=3,3,3,3
    slot      0  1  2  3  4  5  6  7  8  9
    rank 0 C F0 F1 F2 F3  .  .  . B0 F4 B1
           T  .  . E1  .  .  .  . E3 L1  .

A lane is a rank: line C has what it computes (`.` is a bubble) and line T, if it transfers anything, what it moves
meanwhile. A cell is the kind's initial and the micro-batch: F forward, B backward, I and W its halves, E evict, H host,
R return, L load. The stage's number comes first if a rank has several stages, or if the lane implies another one.
`0F5&7B2` are a forward and a backward that run together. A grid wider than the page continues in blocks.
"""

from collections.abc import Sequence

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

# Initials of transfers; those of computations are their names.
_INITIALS = {Kind.EVICT: "E", Kind.HOST: "H", Kind.RETURN: "R", Kind.LOAD: "L"}


def write_grid(schedule: Schedule, width: int | None = None) -> str:
    """Return the whole schedule as text, in blocks of columns that fit `width` characters; None is one block."""
    lines = _lines(schedule)
    widths = [len(str(slot)) for slot in range(len(schedule.ranks[0]))]
    for _, cells in lines:
        widths = [max(width, len(cell)) for width, cell in zip(widths, cells, strict=True)]
    margin = max(len(label) for label, _ in lines)
    blocks = []
    for columns in _pages(widths, None if width is None else width - margin):
        block = ["slot".ljust(margin) + "".join(f" {slot:>{widths[slot]}}" for slot in columns)]
        for label, cells in lines:
            block.append(label.rjust(margin) + "".join(f" {cells[slot]:>{widths[slot]}}" for slot in columns))
        blocks.append("\n".join(block))
    return header(schedule) + "\n" + "\n\n".join(blocks) + "\n"


def _lines(schedule: Schedule) -> list[tuple[str, list[str]]]:
    """Return every line of the grid: its label and its cells."""
    own, hosted = _implied(schedule.layout, schedule.num_ranks, schedule.hosts)
    digits = len(str(schedule.num_ranks - 1))
    lines: list[tuple[str, list[str]]] = []
    for rank, row in enumerate(schedule.ranks):
        lines.append((f"rank {rank:<{digits}} C", [_computed(slot, own[rank]) for slot in row]))
        if any(slot.transfers for slot in row):
            lines.append(("T", [_moved(slot, own[rank], hosted[rank]) or BUBBLE for slot in row]))
    return lines


def window(schedule: Schedule, rank: int, slot: int, ranks: Sequence[int] = (), radius: int = 4) -> str:
    """Return the grid around one slot of one rank, with the slot marked.

    Args:
        schedule: The schedule to show.
        rank: The rank of the marked slot.
        slot: The marked slot.
        ranks: Lanes to show besides the rank's and its hosts'.
        radius: Slots to show on either side.
    """
    hosts = () if schedule.hosts is None else device_ranks(schedule.hosts[rank])
    lanes = sorted({rank, *ranks, *hosts})
    last = max(len(schedule.ranks[lane]) for lane in lanes) - 1
    columns = range(max(0, slot - radius), max(slot, min(last, slot + radius)) + 1)
    own, hosted = _implied(schedule.layout, schedule.num_ranks, schedule.hosts)
    table = [(-1, ["slot", "", *map(str, columns)])]
    for lane in lanes:
        cells = schedule.ranks[lane][columns.start : columns.stop]
        padding = [""] * (len(columns) - len(cells))
        table.append((lane, [f"rank {lane}", "C", *(_computed(cell, own[lane]) for cell in cells), *padding]))
        table.append((lane, ["", "T", *(_moved(cell, own[lane], hosted[lane]) for cell in cells), *padding]))
    widths = [max(map(len, cells)) for cells in zip(*(row for _, row in table), strict=True)]
    marked = 2 + slot - columns[0]
    lines = []
    for lane, row in table:
        padded = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        padded[marked] = f"[{padded[marked]}]" if lane == rank else f" {padded[marked]} "
        lines.append(" ".join(padded).rstrip())
    return "\n".join(lines)


def _implied(layout: Layout, num_ranks: int, hosts: Hosts | None) -> tuple[list[int], list[int]]:
    """Return each lane's implied stage: its own, and its partner's for H and R; -1 for none."""
    own = [-1] * num_ranks
    if layout.num_stages == num_ranks and layout.num_pipes == 1:
        for stage, rank in enumerate(layout.placements[0]):
            if rank < num_ranks:
                own[rank] = stage
    partners = None if hosts is None else partners_of(hosts)
    if partners is None or len(partners) != num_ranks:
        return own, [-1] * num_ranks
    return own, [own[partner] for partner in partners]


def _computed(slot: Slot, own: int) -> str:
    return BESIDE.join(_short(action, own, -1) for action in slot.computations) or BUBBLE


def _moved(slot: Slot, own: int, hosted: int) -> str:
    return JOIN.join(_short(action, own, hosted) for action in slot.transfers)


def _short(action: Action, own: int, hosted: int) -> str:
    text = f"{_INITIALS.get(action.kind, action.kind.value)}{action.microbatch}"
    implied = hosted if action.kind in (Kind.HOST, Kind.RETURN) else own
    return text if action.stage == implied else f"{action.stage}{text}"


def _pages(widths: Sequence[int], room: int | None) -> list[list[int]]:
    """Return the columns of each block, which has at least one."""
    pages: list[list[int]] = [[]]
    used = 0
    for slot, width in enumerate(widths):
        if room is not None and pages[-1] and used + width + 1 > room:
            pages.append([])
            used = 0
        pages[-1].append(slot)
        used += width + 1
    return pages
