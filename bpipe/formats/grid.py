"""Write a schedule as a grid for people, and read it back exactly. In: a Schedule or such text. Out: the other.

    # bpipe schedule=1f1b microbatches=8 stage_to_rank=0,1,2,3 partners=3,2,1,0 bounds=3,3,3,3
    slot      0  1  2  3  4  5  6  7  8  9
    rank 0 C F0 F1 F2 F3  .  .  . B0 F4 B1
           T  .  . E1  .  .  .  . E3 L1  .

A lane is a rank: on its line C what it computes (`.` is a bubble), on line T, if it transfers anything, what it moves
beside that. A cell is the kind's initial and the micro-batch: F forward, B backward, I and W its halves, E evict, H
host, R return, L load. With several stages per rank, or where the stage is not the one the lane implies, its number
stands in front. `0F5&7B2` are a forward and a backward that run together. A grid wider than the page goes on in blocks.
`after_input=0.5` in the header: of a micro-batch whose backward is split, half is counted between its halves. Further
lines that start with `#` are remarks. Knows no terminal: width and paint come from the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from bpipe.formats.text import NUMBER, TextError, assemble, header, read_header, slot_of
from bpipe.ir.action import Action, Kind
from bpipe.ir.hosts import Hosts, device_ranks, partners_of
from bpipe.ir.layout import Layout
from bpipe.ir.schedule import Schedule, Slot

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
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_CELL = re.compile(f"{NUMBER}?(IF|IB|[FBIWSTEHRL]){NUMBER}")
_LANE = re.compile(f"rank {NUMBER} C (.*)")
_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
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


def read_grid(text: str) -> Schedule:
    """Read a schedule from its grid. Raises TextError with line and cell for whatever is not exactly one."""
    first, *lines = text.split("\n")
    fields = read_header(first)
    reader = _Reader()
    for number, line in enumerate(lines, 2):
        if line.split() and not line.startswith("#"):
            reader.take(line, number)
    return reader.schedule(fields)


class _Reader:
    """The cells read so far, with the lines they stand on, and the block that is being read."""

    def __init__(self) -> None:
        self.computed: dict[int, list[tuple[str, int]]] = {}
        self.moved: dict[int, dict[int, tuple[str, int]]] = {}
        self.start = self.columns = 0
        self.rank = -1

    def take(self, line: str, number: int) -> None:
        """One line: the slots of a block, what a rank computes in it, or what it moves."""
        words = line.split()
        lane = _LANE.fullmatch(re.sub(" +", " ", line))
        if words[0] == "slot":
            self._open_block(words[1:], number)
        elif lane is not None:
            self.rank = int(lane[1])
            cells = self.computed.setdefault(self.rank, [])
            cells.extend((cell, number) for cell in words[3:])
            if len(cells) != self.start + self.columns:
                raise TextError(
                    f"line {number}: {len(words) - 3} cells under {self.columns} slots, or rank {self.rank} twice in "
                    f"a block"
                )
        elif words[0] == "T" and self.rank >= 0 and len(words) == self.columns + 1:
            before = self.moved.setdefault(self.rank, {})
            if self.start in before:
                raise TextError(f"line {number}: rank {self.rank} has a second line of transfers")
            before.update({self.start + index: (cell, number) for index, cell in enumerate(words[1:])})
        else:
            raise TextError(f"line {number}: expected 'rank N C' or, under it, 'T', each with {self.columns} cells")

    def _open_block(self, slots: list[str], number: int) -> None:
        self.start += self.columns
        self.columns = len(slots)
        self.rank = -1
        if slots != [str(slot) for slot in range(self.start, self.start + self.columns)]:
            raise TextError(f"line {number}: the slot numbers of a block must continue from {self.start}")

    def schedule(self, fields: dict[str, str]) -> Schedule:
        """What was read, once the header says which stages the lanes imply."""
        computed = self.computed
        if sorted(computed) != list(range(len(computed))) or len({len(cells) for cells in computed.values()}) != 1:
            raise TextError("every rank needs a lane, and all lanes the same number of slots")
        head = assemble([[] for _ in computed], fields, "")
        own, hosted = _implied(head.layout, len(computed), head.hosts)
        return assemble([self._lane(rank, own[rank], hosted[rank]) for rank in range(len(computed))], fields, "")

    def _lane(self, rank: int, own: int, hosted: int) -> list[Slot]:
        lane = []
        for slot, (cell, number) in enumerate(self.computed[rank]):
            transfers, below = self.moved.get(rank, {}).get(slot, (BUBBLE, number))
            parts = [] if cell == BUBBLE else [_long(one, own, hosted, number, slot) for one in cell.split(BESIDE)]
            moved = (
                [] if transfers == BUBBLE else [_long(one, own, hosted, below, slot) for one in transfers.split(JOIN)]
            )
            try:
                found = _slot(cell, parts, moved)
            except TextError as error:
                raise TextError(f"line {number}, slot {slot}: {error}") from None
            lane.append(found)
        return lane


def _slot(cell: str, parts: Sequence[Action], moved: Sequence[Action]) -> Slot:
    """Return the slot of what `cell`, on line C, and the one below it name.

    Raises TextError for what cannot stand so.
    """
    overlaps = len(parts) == 2 and parts[0].kind is Kind.FORWARD and parts[1].kind in _BACKWARDS
    if len(parts) > 1 and not overlaps:
        raise TextError(f"{cell[:40]!r} overlaps something other than a forward and a backward, in this order")
    found = slot_of([*([tuple(parts)] if parts else []), *((action,) for action in moved)])
    if (found.compute is None) != (cell == BUBBLE):
        raise TextError("computations go on line C, transfers on line T")
    return found


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


def _long(cell: str, own: int, hosted: int, line: int, slot: int) -> Action:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise TextError(f"line {line}, slot {slot}: {cell[:40]!r} is neither a cell such as F3, 4B0 or E1, nor '.'")
    stage, letter, microbatch = match.groups()
    kind = _KINDS[letter]
    implied = hosted if kind in _PARTNERS_KINDS else own
    if stage is None and implied < 0:
        raise TextError(f"line {line}, slot {slot}: {cell} must name its stage")
    return Action(implied if stage is None else int(stage), kind, int(microbatch))


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
