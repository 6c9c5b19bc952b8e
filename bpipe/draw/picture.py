"""Draw a schedule: as a `Picture` of boxes, lines and words in pixels, each with the name of its style; as SVG.

Time runs to the right. A lane is a rank: its computations, below them its transfers, below these the curve of the
micro-batches that it holds, with its bound as a dashed line. Nothing differs by colour alone: forwards are plain boxes,
backwards hatched, bubbles dotted outlines without a word, transfers pointed boxes with a letter, away (E, R) or towards
(L, H).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

from bpipe.schedule.action import SHARDS, Action, Kind
from bpipe.schedule.host_buffers import guests_of
from bpipe.schedule.hosts import write_host
from bpipe.schedule.memory import live_counts
from bpipe.schedule.schedule import Schedule, Slot

SLOT_WIDTH = 30
BOX_HEIGHT = 24
MOVE_HEIGHT = 16
CURVE_HEIGHT = 44
LANE_GAP = 18
MARGIN_LEFT = 70
MARGIN_RIGHT = 90
MARGIN_TOP = 56


@dataclass(frozen=True, slots=True)
class Style:
    """The look of a shape. `hatch` draws diagonal lines, `dash` breaks the outline."""

    fill: str
    stroke: str
    hatch: bool = False
    dash: bool = False


STYLES = {
    "forward": Style("#cfe3f7", "#1f5a94"),
    "backward": Style("#d6ecd2", "#2e6b2e", hatch=True),
    "weight": Style("#efe6c8", "#7a6420", hatch=True),
    "shard": Style("#d9e8e8", "#2f6668", hatch=True),
    "bubble": Style("none", "#b8b8b8", dash=True),
    "away": Style("#f6c9bd", "#a03018"),
    "towards": Style("#e6d4f2", "#5d2f86"),
    "curve": Style("none", "#202020"),
    "bound": Style("none", "#c00000", dash=True),
    "axis": Style("none", "#909090"),
}

STYLE_OF = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "weight",
    **dict.fromkeys(SHARDS, "shard"),
    **dict.fromkeys((Kind.EVICT, Kind.RETURN), "away"),
    **dict.fromkeys((Kind.HOST, Kind.LOAD), "towards"),
}
# Styles and what they mean.
_LEGEND = (
    *(("forward", "forward"), ("backward", "backward"), ("bubble", "bubble"), ("away", "evict, return")),
    *(("towards", "load, host"), ("curve", "held"), ("bound", "bound")),
)
_LEGEND_OF_SHARDS = (("shard", "shard of the vocabulary"),)


@dataclass(frozen=True, slots=True)
class Shape:
    """A line through points, closed or open."""

    style: str
    points: tuple[tuple[float, float], ...]
    closed: bool = True


@dataclass(frozen=True, slots=True)
class Word:
    """Text at a point, centred in height. `anchor`: the point is at its start, its middle or its end."""

    x: float
    y: float
    text: str
    size: int = 11
    anchor: str = "middle"


@dataclass(slots=True)
class Picture:
    """Shapes and words to draw, back to front, on a page of this size in pixels."""

    width: int
    height: int
    shapes: list[Shape] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)


def lay_out(schedule: Schedule, subtitle: str = "") -> Picture:
    """Return the picture of a schedule. `subtitle` follows its name and size."""
    num_slots = len(schedule.ranks[0])
    lane_height = BOX_HEIGHT + MOVE_HEIGHT + CURVE_HEIGHT + LANE_GAP
    width = MARGIN_LEFT + max(num_slots * SLOT_WIDTH, 14 * SLOT_WIDTH) + MARGIN_RIGHT
    picture = Picture(width, MARGIN_TOP + schedule.num_ranks * lane_height)
    title = f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_whole_microbatches} micro-batches"
    if schedule.num_chunks > 1:
        title += f", {schedule.num_chunks} chunks per rank"
    if subtitle:
        title += f", {subtitle}"
    picture.words.append(Word(MARGIN_LEFT, 16, title, 14, "start"))
    _draw_legend(picture, _LEGEND + (_LEGEND_OF_SHARDS if schedule.layout.shard_kinds else ()), MARGIN_LEFT, 36)
    curves = [live_counts(schedule, rank) for rank in range(schedule.num_ranks)]
    top = max(max(max(curve) for curve in curves), *(schedule.bounds or (1,)))
    for rank in range(schedule.num_ranks):
        y = MARGIN_TOP + rank * lane_height
        picture.words.append(Word(MARGIN_LEFT - 8, y + BOX_HEIGHT / 2, f"rank {rank}", 12, "end"))
        for line, text in enumerate(_pooled(schedule, rank)):
            picture.words.append(Word(MARGIN_LEFT - 8, y + BOX_HEIGHT + 8 + 10 * line, text, 8, "end"))
        for slot, cell in enumerate(schedule.ranks[rank]):
            x = MARGIN_LEFT + slot * SLOT_WIDTH
            _computation(picture, x, y, cell, schedule.num_chunks > 1)
            for index, action in enumerate(cell.transfers):
                _transfer(picture, x, y + BOX_HEIGHT + 2, index, len(cell.transfers), action)
        bound = None if schedule.bounds is None else schedule.bounds[rank]
        _curve(picture, y + BOX_HEIGHT + MOVE_HEIGHT + 4, curves[rank], top, bound)
    return picture


def _pooled(schedule: Schedule, rank: int) -> list[str]:
    """Return where a rank's activations go in a pool, and whose come to it."""
    hosts = schedule.hosts if schedule.is_pooled else None
    if hosts is None:
        return []
    targets, guests = ",".join(map(write_host, hosts[rank])), ",".join(map(str, guests_of(schedule, rank)))
    return [f"{word} {names}" for word, names in (("to", targets), ("for", guests)) if names]


def stack(pictures: Sequence[Picture]) -> Picture:
    """Stack pictures one below the other."""
    stacked = Picture(max(picture.width for picture in pictures), sum(picture.height for picture in pictures))
    y = 0
    for picture in pictures:
        for shape in picture.shapes:
            stacked.shapes.append(replace(shape, points=tuple((left, top + y) for left, top in shape.points)))
        stacked.words += [replace(word, y=word.y + y) for word in picture.words]
        y += picture.height
    return stacked


def box(x: float, y: float, width: float, height: float) -> tuple[tuple[float, float], ...]:
    return ((x, y), (x + width, y), (x + width, y + height), (x, y + height))


def pointed(x: float, y: float, width: float, height: float, away: bool) -> tuple[tuple[float, float], ...]:
    """Return a box with a point to the right for what leaves, to the left for what arrives."""
    tip = min(5.0, width / 3)
    left, right = (x, x + width - tip) if away else (x + tip, x + width)
    if away:
        return ((left, y), (right, y), (x + width, y + height / 2), (right, y + height), (left, y + height))
    return ((left, y), (right, y), (right, y + height), (left, y + height), (x, y + height / 2))


def _computation(picture: Picture, x: float, y: float, cell: Slot, with_stage: bool) -> None:
    """Draw one box, or two, one above the other, if a forward and a backward overlap."""
    actions = cell.computations
    if not actions:
        picture.shapes.append(Shape("bubble", box(x + 0.5, y, SLOT_WIDTH - 1, BOX_HEIGHT)))
        return
    height = BOX_HEIGHT / len(actions)
    for index, action in enumerate(actions):
        top = y + index * height
        picture.shapes.append(Shape(STYLE_OF[action.kind], box(x + 0.5, top, SLOT_WIDTH - 1, height)))
        text = str(action) if with_stage else f"{action.kind.value}{action.microbatch}"
        size = 11 if len(text) < 5 and len(actions) == 1 else 8
        picture.words.append(Word(x + SLOT_WIDTH / 2, top + height / 2, text, size))


def _transfer(picture: Picture, x: float, y: float, index: int, count: int, action: Action) -> None:
    width = (SLOT_WIDTH - 1) / count
    left = x + 0.5 + index * width
    style = STYLE_OF[action.kind]
    picture.shapes.append(Shape(style, pointed(left, y, width, MOVE_HEIGHT - 4, style == "away")))
    text = f"{action.kind.value[0]}{action.microbatch}"
    picture.words.append(Word(left + width / 2, y + MOVE_HEIGHT / 2 - 2, text, 9 if count == 1 else 6))


def _curve(picture: Picture, y: float, counts: Sequence[int], top: int, bound: int | None) -> None:
    bottom, scale = y + CURVE_HEIGHT, CURVE_HEIGHT / top
    right = MARGIN_LEFT + len(counts) * SLOT_WIDTH
    picture.shapes.append(Shape("axis", ((MARGIN_LEFT, bottom), (right, bottom)), closed=False))
    points: list[tuple[float, float]] = [(MARGIN_LEFT, bottom)]
    for slot, count in enumerate(counts):
        height = bottom - count * scale
        points += [(MARGIN_LEFT + slot * SLOT_WIDTH, height), (MARGIN_LEFT + (slot + 1) * SLOT_WIDTH, height)]
    points.append((right, bottom))
    picture.shapes.append(Shape("curve", tuple(points), closed=False))
    label = f"peak {max(counts)}"
    if bound is not None:
        height = bottom - bound * scale
        picture.shapes.append(Shape("bound", ((MARGIN_LEFT, height), (right, height)), closed=False))
        label += f" of {bound}"
    picture.words.append(Word(right + 6, bottom - CURVE_HEIGHT / 2, label, 11, "start"))


def _draw_legend(picture: Picture, entries: Sequence[tuple[str, str]], x: float, y: float) -> None:
    """Draw a legend that starts at `x` with its middle at `y`: lines for open styles, boxes for the others."""
    for style, text in entries:
        if style in ("curve", "bound"):
            picture.shapes.append(Shape(style, ((x, y), (x + 16, y)), closed=False))
        elif style in ("away", "towards"):
            picture.shapes.append(Shape(style, pointed(x, y - 6, 16, 12, style == "away")))
        else:
            picture.shapes.append(Shape(style, box(x, y - 6, 16, 12)))
        picture.words.append(Word(x + 20, y, text, 10, "start"))
        x += 34 + 6 * len(text)


def render_svg(picture: Picture) -> str:
    """Return a picture as one self-contained SVG document."""
    # Few schedules have shards.
    drawn = {shape.style for shape in picture.shapes}
    styles = {name: style for name, style in STYLES.items() if name != "shard" or name in drawn}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{picture.width}" height="{picture.height}" '
        f'viewBox="0 0 {picture.width} {picture.height}" font-family="sans-serif">',
        "<defs>",
        *(_pattern(name, style) for name, style in styles.items() if style.hatch),
        "</defs>",
        "<style>",
        *(_rule(name, style) for name, style in styles.items()),
        "text { dominant-baseline: central; fill: #111; }",
        "</style>",
        f'<rect width="{picture.width}" height="{picture.height}" fill="#fff"/>',
        *(_shape(shape) for shape in picture.shapes),
        *(_word(word) for word in picture.words),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _pattern(name: str, style: Style) -> str:
    return (
        f'<pattern id="hatch-{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{style.fill}"/>'
        f'<line x1="0" y1="0" x2="0" y2="6" stroke="{style.stroke}" stroke-width="1" opacity="0.35"/></pattern>'
    )


def _rule(name: str, style: Style) -> str:
    fill = f"url(#hatch-{name})" if style.hatch else style.fill
    dash = " stroke-dasharray: 3 2;" if style.dash else ""
    return f".{name} {{ fill: {fill}; stroke: {style.stroke};{dash} }}"


def _shape(shape: Shape) -> str:
    points = " ".join(f"{x:g},{y:g}" for x, y in shape.points)
    return f'<{"polygon" if shape.closed else "polyline"} class="{shape.style}" points="{points}"/>'


def _word(word: Word) -> str:
    return (
        f'<text x="{word.x:g}" y="{word.y:g}" font-size="{word.size}" '
        f'text-anchor="{word.anchor}">{escape(word.text)}</text>'
    )
