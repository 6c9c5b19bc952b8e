"""Print a schedule as a grid for people: one lane a rank, one column a slot. In: a Schedule. Out: text.

The compute line of a lane shows what the rank computes (`.` is a bubble), the transfer line below it what it moves beside that. A cell is
the kind's initial and the micro-batch: F forward, B backward, I and W its halves, E evict, H host, R return, L load. With several stages a
rank, and for the rare action of a stage that is not the lane's, the stage number stands in front. Knows no colours and no terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.ir.action import Action
from bpipe.ir.schedule import Schedule

BUBBLE = "."
# Joins the transfers of one slot.
JOIN = "+"


def short(action: Action, implied_stages: Sequence[int]) -> str:
    """`F3` where the stage is one of the lane's own and cannot be mistaken, else `0F3`."""
    text = f"{action.kind.value[0]}{action.microbatch}"
    return text if action.stage in implied_stages else f"{action.stage}{text}"


def implied_stages(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Stages a cell of this lane need not name: with one stage a rank, the rank's own and the one it hosts for."""
    if schedule.num_chunks != 1:
        return ()
    partner = rank if schedule.partners is None else schedule.partners[rank]
    return tuple(stage for stage, owner in enumerate(schedule.stage_to_rank) if owner in (rank, partner))


def window(schedule: Schedule, rank: int, slot: int, ranks: Sequence[int] | None = None, radius: int = 4) -> str:
    """The grid around one slot of one rank, with the slot marked. `ranks` are further lanes beside the rank's and its partner's."""
    lanes = sorted({rank, *(ranks or ()), *(() if schedule.partners is None else (schedule.partners[rank],))})
    first = max(0, slot - radius)
    last = max(first, min(max(len(row) for row in schedule.ranks), slot + radius + 1))
    columns = range(first, max(last, slot + 1))
    table = [["slot", "", *(str(column) for column in columns)]]
    for lane in lanes:
        table.append([f"rank {lane}", "C", *(_window_cell(schedule, lane, column, 0) for column in columns)])
        table.append(["", "T", *(_window_cell(schedule, lane, column, 1) for column in columns)])
    marked = 2 + slot - first
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for index, row in enumerate(table):
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        if index and lanes[(index - 1) // 2] == rank:
            cells[marked] = f"[{cells[marked]}]"
        else:
            cells[marked] = f" {cells[marked]} "
        lines.append(" ".join(cells).rstrip())
    return "\n".join(lines)


def _window_cell(schedule: Schedule, rank: int, slot: int, line: int) -> str:
    if slot >= len(schedule.ranks[rank]):
        return ""
    cell, implied = schedule.ranks[rank][slot], implied_stages(schedule, rank)
    if line == 0:
        return BUBBLE if cell.compute is None else short(cell.compute, implied)
    return JOIN.join(short(action, implied) for action in cell.transfers)
