"""Lay a simulation out to scale, with a lane per rank: computations, transfers, bytes held.

Styles and shapes are those of `picture`; here a box is as wide as its action is long, over an axis of seconds. The
bound of a balanced rank is in bytes: the micro-batches that it may hold, each of the largest size that it ever holds.
"""

import math

from bpipe.draw.picture import (
    BACKWARD,
    FORWARD,
    LEGEND_OF_SHARDS,
    LEGEND_OF_TRANSFERS,
    STYLE_OF,
    Picture,
    Shape,
    Word,
    box,
    draw_legend,
    pointed,
)
from bpipe.schedule.action import SHARDS, Kind
from bpipe.schedule.host_buffers import guests_of
from bpipe.simulate.report import Simulation, Timed

WIDTH = 1600
MARGIN = 80
MARGIN_RIGHT = 150
TOP = 84
BOX_HEIGHT = 22
MOVE_HEIGHT = 14
CURVE_HEIGHT = 40
LANE_HEIGHT = BOX_HEIGHT + MOVE_HEIGHT + CURVE_HEIGHT + 16
AXIS_HEIGHT = 44
# More would have no room for their numbers.
MAX_TICKS = 16
# The width of a transfer's word of two letters; a computation's needs half of it per letter.
LETTER_WIDTH = 14


def lay_out_simulation(
    simulation: Simulation, name: str = "", width_s: float | None = None, width: int = WIDTH
) -> Picture:
    """Return the picture of a simulation, called `name`. `width` pixels are `width_s` seconds, by default all of it."""
    ranks = range(simulation.schedule.num_ranks)
    picture = Picture(MARGIN + width + MARGIN_RIGHT, TOP + len(ranks) * LANE_HEIGHT + AXIS_HEIGHT)
    scale = width / float(width_s or simulation.makespan_s or 1)
    picture.words.append(Word(MARGIN, 18, name or simulation.schedule.name, 15, "start"))
    picture.words.append(Word(MARGIN, 40, _summary(simulation), 12, "start"))
    draw_legend(picture, _legend_entries(simulation), MARGIN, 64)
    bounds = [_bound_bytes(simulation, rank) for rank in ranks]
    top = max(*(simulation.peak_bytes(rank) for rank in ranks), *(bound or 0 for bound in bounds)) or 1
    _axis(picture, simulation, scale, width)
    for rank in ranks:
        y = TOP + rank * LANE_HEIGHT
        picture.words.append(Word(MARGIN - 8, y + BOX_HEIGHT / 2, f"rank {rank}", 12, "end"))
        for timed in simulation.computations[rank]:
            _computation(picture, timed, y, scale, simulation.schedule.num_chunks > 1)
        for timed in simulation.transfers[rank]:
            _transfer(picture, timed, y + BOX_HEIGHT + 2, scale)
        bottom = y + BOX_HEIGHT + MOVE_HEIGHT + CURVE_HEIGHT + 2
        _curve(picture, simulation, rank, bottom, scale, CURVE_HEIGHT / top, bounds[rank])
    return picture


def _summary(simulation: Simulation) -> str:
    schedule = simulation.schedule
    chunks = f", {schedule.num_chunks} chunks per rank" if schedule.num_chunks > 1 else ""
    exposed = float(simulation.exposed_transfer_s)
    waits = f", exposed transfer time {_seconds(exposed)}" if exposed else ""
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_whole_microbatches} micro-batches{chunks}; iteration "
        f"{_seconds(float(simulation.makespan_s))}, bubble {100 * float(simulation.bubble_of_makespan):.1f} %{waits}"
    )


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value >= 1 or not value else f"{1e3 * value:.4g} ms"


def _legend_entries(simulation: Simulation) -> tuple[tuple[str, str], ...]:
    """Return entries for what the simulation has."""
    kinds = {timed.action.kind for row in simulation.computations for timed in row}
    entries = [FORWARD, BACKWARD]
    if Kind.BACKWARD_WEIGHT in kinds:
        entries.append(("weight", "backward of weights"))
    if kinds & SHARDS:
        entries += LEGEND_OF_SHARDS
    if any(simulation.transfers):
        entries += LEGEND_OF_TRANSFERS
    entries.append(("curve", "activations held"))
    if simulation.schedule.bounds:
        entries.append(("bound", "bound"))
    return tuple(entries)


def _bound_bytes(simulation: Simulation, rank: int) -> int | None:
    """Return the bound of a rank, if it has one."""
    schedule, of_stage = simulation.schedule, simulation.costs.of_stage
    if schedule.bounds is None:
        return None
    own = [cost.saved_bytes for stage in schedule.layout.stages_of(rank) for cost in of_stage(stage)]
    hosted = [
        cost.moved_bytes
        for guest in guests_of(schedule, rank)
        for stage in schedule.layout.stages_of(guest)
        for cost in of_stage(stage)
    ]
    return schedule.bounds[rank] * max(*own, *hosted, 0)


def _ticks(span: float) -> tuple[float, list[float]]:
    """Return the distance of ticks, 1, 2 or 5 times a power of ten, and their times."""
    rough = span / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return step, [number * step for number in range(math.floor(span / step + 1e-9) + 1)]


def _axis(picture: Picture, simulation: Simulation, scale: float, width: int) -> None:
    """Draw seconds below all lanes, a line at every tick, and the end of the pipeline."""
    span = float(simulation.makespan_s)
    if not span:
        return
    step, times = _ticks(span)
    unit, factor = ("s", 1.0) if span >= 1 else ("ms", 1e3)
    digits = max(0, -math.floor(math.log10(step * factor) + 1e-9))
    bottom = picture.height - AXIS_HEIGHT + 6
    for time in times:
        x = MARGIN + time * scale
        picture.shapes.append(Shape("grid", ((x, TOP - 6), (x, bottom)), closed=False))
        picture.words.append(Word(x, bottom + 10, f"{time * factor:.{digits}f}", 11))
    picture.shapes.append(Shape("axis", ((MARGIN, bottom), (MARGIN + width, bottom)), closed=False))
    picture.words.append(Word(MARGIN + width / 2, bottom + 28, f"time, {unit}", 12))
    ends = float(simulation.pipeline_s)
    if (span - ends) * scale > 60:
        x = MARGIN + ends * scale
        picture.words.append(Word(x + 4, TOP - 10, "reduction and update", 10, "start"))
        picture.shapes.append(Shape("axis", ((x, TOP - 14), (x, bottom)), closed=False))


def _computation(picture: Picture, timed: Timed, y: float, scale: float, with_stage: bool) -> None:
    x, width = _place(timed, scale)
    picture.shapes.append(Shape(STYLE_OF[timed.action.kind], box(x, y, width, BOX_HEIGHT)))
    text = str(timed.action) if with_stage else f"{timed.action.kind.value}{timed.action.microbatch}"
    if width > LETTER_WIDTH / 2 * len(text):
        picture.words.append(Word(x + width / 2, y + BOX_HEIGHT / 2, text, 9))


def _transfer(picture: Picture, timed: Timed, y: float, scale: float) -> None:
    x, width = _place(timed, scale)
    style = STYLE_OF[timed.action.kind]
    picture.shapes.append(Shape(style, pointed(x, y, width, MOVE_HEIGHT - 4, style == "away")))
    if width > LETTER_WIDTH:
        text = f"{timed.action.kind.value[0]}{timed.action.microbatch}"
        picture.words.append(Word(x + width / 2, y + MOVE_HEIGHT / 2 - 2, text, 8))


def _place(timed: Timed, scale: float) -> tuple[float, float]:
    return MARGIN + float(timed.start_s) * scale, float(timed.end_s - timed.start_s) * scale


def _curve(
    picture: Picture, simulation: Simulation, rank: int, bottom: float, scale: float, height: float, bound: int | None
) -> None:
    points: list[tuple[float, float]] = [(MARGIN, bottom)]
    for level in simulation.levels(rank):
        x = MARGIN + float(level.start_s) * scale
        points += [(x, points[-1][1]), (x, bottom - level.held_bytes * height)]
    right = picture.width - MARGIN_RIGHT
    points.append((right, points[-1][1]))
    picture.shapes.append(Shape("axis", ((MARGIN, bottom), (right, bottom)), closed=False))
    picture.shapes.append(Shape("curve", tuple(points), closed=False))
    middle = bottom - CURVE_HEIGHT / 2
    if peak := simulation.peak_bytes(rank):
        picture.words.append(Word(right + 6, middle - 7, f"peak {peak / 2**30:.2f} GiB", 11, "start"))
    if bound:
        line = bottom - bound * height
        picture.shapes.append(Shape("bound", ((MARGIN, line), (right, line)), closed=False))
        picture.words.append(Word(right + 6, middle + 8, f"bound {bound / 2**30:.2f} GiB", 11, "start"))
