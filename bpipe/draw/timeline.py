"""Lay a simulation out to scale. In: a Report. Out: a `Picture`. A lane is a rank: what it computes, below what it moves, below its bytes.

Styles and shapes are those of `picture`; here a box is as wide as its action is long. Knows no file format.
"""

from __future__ import annotations

from bpipe.draw.picture import Picture, Shape, Word
from bpipe.ir.action import Kind
from bpipe.simulate.report import Report

WIDTH = 1600
MARGIN = 80
TOP = 48
BOX_HEIGHT = 22
MOVE_HEIGHT = 12
CURVE_HEIGHT = 34
LANE_HEIGHT = BOX_HEIGHT + MOVE_HEIGHT + CURVE_HEIGHT + 16

_STYLES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "weight",
    Kind.EVICT: "away",
    Kind.RETURN: "away",
    Kind.HOST: "towards",
    Kind.LOAD: "towards",
}


def lay_out_report(report: Report) -> Picture:
    """The picture of a simulation, as wide as a page however long it took."""
    ranks = range(report.schedule.num_ranks)
    picture = Picture(WIDTH + 2 * MARGIN, TOP + len(ranks) * LANE_HEIGHT)
    scale = WIDTH / float(report.makespan_s or 1)
    title = f"{report.schedule.name}: {float(report.makespan_s):.4g} s, bubble {100 * float(report.bubble_of_makespan):.1f} %"
    picture.words.append(Word(MARGIN, 18, title, 14, "start"))
    top = max(report.peak_bytes(rank) for rank in ranks) or 1
    for rank in ranks:
        y = TOP + rank * LANE_HEIGHT
        picture.words.append(Word(MARGIN - 8, y + BOX_HEIGHT / 2, f"rank {rank}", 12, "end"))
        for timed in report.computations[rank]:
            x, width = MARGIN + float(timed.start_s) * scale, float(timed.end_s - timed.start_s) * scale
            _box(picture, _STYLES[timed.action.kind], x, y, width, BOX_HEIGHT)
            if width > 22:
                name = f"{timed.action.kind.value}{timed.action.microbatch}"
                picture.words.append(Word(x + width / 2, y + BOX_HEIGHT / 2, name, 9))
        for timed in report.transfers[rank]:
            x, width = MARGIN + float(timed.start_s) * scale, float(timed.end_s - timed.start_s) * scale
            _box(picture, _STYLES[timed.action.kind], x, y + BOX_HEIGHT + 2, width, MOVE_HEIGHT - 4)
        _curve(picture, report, rank, y + BOX_HEIGHT + MOVE_HEIGHT + CURVE_HEIGHT, scale, CURVE_HEIGHT / top)
    return picture


def _box(picture: Picture, style: str, x: float, y: float, width: float, height: float) -> None:
    picture.shapes.append(Shape(style, ((x, y), (x + width, y), (x + width, y + height), (x, y + height))))


def _curve(picture: Picture, report: Report, rank: int, bottom: float, scale: float, height: float) -> None:
    points: list[tuple[float, float]] = [(MARGIN, bottom)]
    for level in report.levels(rank):
        x = MARGIN + float(level.start_s) * scale
        points += [(x, points[-1][1]), (x, bottom - level.held_bytes * height)]
    points.append((MARGIN + WIDTH, points[-1][1]))
    picture.shapes.append(Shape("axis", ((MARGIN, bottom), (MARGIN + WIDTH, bottom)), closed=False))
    picture.shapes.append(Shape("curve", tuple(points), closed=False))
    peak = report.peak_bytes(rank)
    if peak:
        picture.words.append(Word(MARGIN + WIDTH + 4, bottom - CURVE_HEIGHT / 2, f"{peak / 2**30:.1f} GiB", 10, "start"))
