"""Draw a Pareto front: memory to the right, seconds upwards. Groups differ by colour and by marker."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bpipe.draw.picture import Picture, Shape, Word

WIDTH = 900
LEFT, TOP, RIGHT, BOTTOM = 70, 24, WIDTH - 20, 396
GIB = 2**30
# Most lines of the grid in one direction.
_MOST_TICKS = 10
# Corners of markers, and the degrees by which they are turned; with four colours no two of 20 groups look alike.
_MARKERS = ((16, 0), (4, 45), (3, -90), (4, 0), (3, 90))
_NUM_COLOURS = 4
_LEGEND_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One configuration on a front."""

    peak_bytes: int
    """Bytes that a device needs."""

    iteration_s: float
    """Seconds of an iteration."""

    group: str
    """Its schedule; points of one group have the same colour and marker."""


def lay_out_front(points: Sequence[FrontPoint], limit_bytes: int, winner: int | None) -> Picture:
    """Return the picture of a front, with `limit_bytes` as a dashed line and a ring around the winner."""
    if not points:
        raise ValueError("there is no point to draw")
    groups = list(dict.fromkeys(point.group for point in points))
    picture = Picture(WIDTH, BOTTOM + 60 + 16 * -(-len(groups) // _LEGEND_COLUMNS))
    gib, limit = [point.peak_bytes / GIB for point in points], limit_bytes / GIB
    across = _Axis((*gib, limit), LEFT, RIGHT)
    up = _Axis([point.iteration_s for point in points], BOTTOM, TOP)
    for tick in across.ticks():
        picture.shapes.append(Shape("grid", ((across.at(tick), TOP), (across.at(tick), BOTTOM)), closed=False))
        picture.words.append(Word(across.at(tick), BOTTOM + 12, f"{tick:g}", 11))
    for tick in up.ticks():
        picture.shapes.append(Shape("grid", ((LEFT, up.at(tick)), (RIGHT, up.at(tick))), closed=False))
        picture.words.append(Word(LEFT - 6, up.at(tick), f"{tick:g}", 11, "end"))
    picture.shapes.append(Shape("axis", ((LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)), closed=False))
    picture.words.append(Word((LEFT + RIGHT) / 2, BOTTOM + 32, "memory of the fullest rank, GiB per device", 12))
    picture.words.append(Word(LEFT, TOP - 12, "iteration, s", 12))
    places = [(across.at(size), up.at(point.iteration_s)) for size, point in zip(gib, points, strict=True)]
    corners = ((after[0], before[1]) for before, after in itertools.pairwise(places))
    steps = [place for pair in zip(places, [*corners, places[-1]], strict=True) for place in pair]
    picture.shapes.append(Shape("axis", tuple(steps), closed=False))
    for point, place in zip(points, places, strict=True):
        picture.shapes.append(_marker(*place, groups.index(point.group)))
    named: list[tuple[float, float]] = []
    # Numbers must not overlap; the table has all.
    for index, (x, y) in sorted(enumerate(places), key=lambda place: place[0] != winner):
        if all(abs(x - other) > 20 or abs(y - level) > 14 for other, level in named):
            named.append((x, y))
            picture.words.append(Word(x + 8, y - 8, str(index + 1), 13 if index == winner else 10, "start"))
    if winner is not None:
        picture.shapes.append(Shape("winner", _polygon(*places[winner], 32, 0, 10)))
    picture.shapes.append(Shape("bound", ((across.at(limit), TOP), (across.at(limit), BOTTOM)), closed=False))
    picture.words.append(Word(across.at(limit) - 4, TOP + 8, f"{limit:.1f} GiB per device", 10, "end"))
    for number, group in enumerate(groups):
        line, column = divmod(number, _LEGEND_COLUMNS)
        x, y = LEFT + 6 + column * (RIGHT - LEFT) / _LEGEND_COLUMNS, BOTTOM + 56 + 16 * line
        picture.shapes.append(_marker(x, y, number))
        picture.words.append(Word(x + 10, y, group, 10, "start"))
    return picture


class _Axis:
    """A scale from values to pixels, with some space at both ends."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        space = 0.06 * (max(values) - min(values)) or 1
        self.least, self.most = min(values) - space, max(values) + space
        self.begin, self.scale = begin, (end - begin) / (self.most - self.least)

    def at(self, value: float) -> float:
        return self.begin + (value - self.least) * self.scale

    def ticks(self) -> list[float]:
        """Return multiples of 1, 2 or 5 times a power of ten."""
        rough = (self.most - self.least) / _MOST_TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        return [number * step for number in range(math.ceil(self.least / step), math.floor(self.most / step) + 1)]


def _marker(x: float, y: float, group: int) -> Shape:
    return Shape(f"group-{group % _NUM_COLOURS}", _polygon(x, y, *_MARKERS[group % len(_MARKERS)], 5))


def _polygon(x: float, y: float, corners: int, turn: float, radius: float) -> tuple[tuple[float, float], ...]:
    angles = (math.radians(turn + 360 * corner / corners) for corner in range(corners))
    return tuple((x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles)
