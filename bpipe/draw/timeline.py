"""Lay a simulation out to scale.

In: a Simulation and its name. Out: a `Picture`. A lane is a rank: computations, transfers, bytes held.

Styles and shapes are those of `picture`; here a box is as wide as its action is long, over an axis of seconds. The
bound of a balanced rank is drawn in bytes: as many micro-batches as it may hold, each of the largest size that it ever
holds. Knows no file format.
"""

from __future__ import annotations

import math

from bpipe.draw.picture import Picture, Shape, Word, draw_legend, pointed
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
# As many ticks as have room for their numbers.
MAX_TICKS = 16
# A transfer narrower than this has no room for its word of two letters, a computation not for half of it a letter.
LETTER_WIDTH = 14

_STYLES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "weight",
    **dict.fromkeys(SHARDS, "shard"),
    Kind.EVICT: "away",
    Kind.RETURN: "away",
    Kind.HOST: "towards",
    Kind.LOAD: "towards",
}
_COMPUTED = (("forward", "forward"), ("backward", "backward"))
_SPLIT = (("weight", "backward of weights"),)
_SHARDED = (("shard", "shard of the vocabulary"),)
_MOVED = (("away", "evict, return"), ("towards", "load, host"))
_HELD = (("curve", "activations held"),)
_BOUND = (("bound", "bound"),)


def lay_out_simulation(
    simulation: Simulation, name: str = "", width_s: float | None = None, width: int = WIDTH
) -> Picture:
    """Return the picture of a simulation.

    `name` says of what. `width_s` seconds are `width` pixels wide, by default all of it, however long it took.
    """
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
        _curve(
            picture,
            simulation,
            rank,
            y + BOX_HEIGHT + MOVE_HEIGHT + CURVE_HEIGHT + 2,
            scale,
            CURVE_HEIGHT / top,
            bounds[rank],
        )
    return picture


def _summary(simulation: Simulation) -> str:
    schedule = simulation.schedule
    chunks = f", {schedule.num_chunks} chunks per rank" if schedule.num_chunks > 1 else ""
    exposed = float(simulation.exposed_transfer_s)
    waits = f", exposed transfer time {_seconds(exposed)}" if exposed else ""
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_whole_microbatches} micro-batches{chunks}; "
        f"iteration "
        f"{_seconds(float(simulation.makespan_s))}, bubble {100 * float(simulation.bubble_of_makespan):.1f} %{waits}"
    )


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value >= 1 or not value else f"{1e3 * value:.4g} ms"


def _legend_entries(simulation: Simulation) -> tuple[tuple[str, str], ...]:
    """Of what there is."""
    kinds = {timed.action.kind for row in simulation.computations for timed in row}
    computed = (*_COMPUTED, *(_SPLIT if Kind.BACKWARD_WEIGHT in kinds else ()), *(_SHARDED if kinds & SHARDS else ()))
    moves = any(simulation.transfers)
    return (*computed, *(_MOVED if moves else ()), *_HELD, *(_BOUND if simulation.schedule.bounds else ()))


def _bound_bytes(simulation: Simulation, rank: int) -> int | None:
    """None for a rank without a bound."""
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
    """Their distance and places: 1, 2 or 5 times a power of ten."""
    rough = span / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return step, [number * step for number in range(math.floor(span / step + 1e-9) + 1)]


def _axis(picture: Picture, simulation: Simulation, scale: float, width: int) -> None:
    """Seconds below all lanes, a line through them at every tick, and where the pipeline ends."""
    span = float(simulation.makespan_s)
    if not span:
        return
    step, places = _ticks(span)
    unit, factor = ("s", 1.0) if span >= 1 else ("ms", 1e3)
    digits = max(0, -math.floor(math.log10(step * factor) + 1e-9))
    bottom = picture.height - AXIS_HEIGHT + 6
    for place in places:
        x = MARGIN + place * scale
        picture.shapes.append(Shape("grid", ((x, TOP - 6), (x, bottom)), closed=False))
        picture.words.append(Word(x, bottom + 10, f"{place * factor:.{digits}f}", 11))
    picture.shapes.append(Shape("axis", ((MARGIN, bottom), (MARGIN + width, bottom)), closed=False))
    picture.words.append(Word(MARGIN + width / 2, bottom + 28, f"time, {unit}", 12))
    ends = float(simulation.pipeline_s)
    if (span - ends) * scale > 60:
        picture.words.append(Word(MARGIN + ends * scale + 4, TOP - 10, "reduction and update", 10, "start"))
        picture.shapes.append(
            Shape("axis", ((MARGIN + ends * scale, TOP - 14), (MARGIN + ends * scale, bottom)), closed=False)
        )


def _computation(picture: Picture, timed: Timed, y: float, scale: float, with_stage: bool) -> None:
    x, width = _place(timed, scale)
    _box(picture, _STYLES[timed.action.kind], x, y, width, BOX_HEIGHT)
    text = str(timed.action) if with_stage else f"{timed.action.kind.value}{timed.action.microbatch}"
    if width > LETTER_WIDTH / 2 * len(text):
        picture.words.append(Word(x + width / 2, y + BOX_HEIGHT / 2, text, 9))


def _transfer(picture: Picture, timed: Timed, y: float, scale: float) -> None:
    x, width = _place(timed, scale)
    style = _STYLES[timed.action.kind]
    picture.shapes.append(Shape(style, pointed(x, y, width, MOVE_HEIGHT - 4, style == "away")))
    if width > LETTER_WIDTH:
        text = f"{timed.action.kind.value[0]}{timed.action.microbatch}"
        picture.words.append(Word(x + width / 2, y + MOVE_HEIGHT / 2 - 2, text, 8))


def _place(timed: Timed, scale: float) -> tuple[float, float]:
    return MARGIN + float(timed.start_s) * scale, float(timed.end_s - timed.start_s) * scale


def _box(picture: Picture, style: str, x: float, y: float, width: float, height: float) -> None:
    picture.shapes.append(Shape(style, ((x, y), (x + width, y), (x + width, y + height), (x, y + height))))


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
    peak = simulation.peak_bytes(rank)
    if peak:
        picture.words.append(
            Word(right + 6, bottom - CURVE_HEIGHT / 2 - 7, f"peak {peak / 2**30:.2f} GiB", 11, "start")
        )
    if bound:
        line = bottom - bound * height
        picture.shapes.append(Shape("bound", ((MARGIN, line), (right, line)), closed=False))
        picture.words.append(
            Word(right + 6, bottom - CURVE_HEIGHT / 2 + 8, f"bound {bound / 2**30:.2f} GiB", 11, "start")
        )
