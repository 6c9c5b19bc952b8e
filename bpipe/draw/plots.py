"""Charts of what was predicted or measured, and files of them that are the same each time.

The colours are those of Okabe and Ito. Bars also differ by hatching, and lines by marker and dashes, so nothing differs
by colour alone. Every bar and point has an id in the svg.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, SKY, VERMILION, GREEN, BLACK = "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#000000"
GIB = 2**30
# Text stays text, and ids are the same in each drawing.
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bpipe",
    "font.family": "sans-serif",
    "font.size": 10,
    "hatch.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One configuration on a front."""

    peak_bytes: int  # that a device needs
    iteration_s: float
    group: str  # those of one group have the same colour and marker


def _coordinates(points: Sequence[FrontPoint]) -> tuple[list[float], list[float]]:
    return [point.peak_bytes / 2**30 for point in points], [point.iteration_s for point in points]


def _scatter_groups(axes: Axes, points: Sequence[FrontPoint]) -> None:
    colours, markers = (BLUE, VERMILION, GREEN, SKY), "os^Dv"
    for number, group in enumerate(dict.fromkeys(point.group for point in points)):
        colour, marker = colours[number % len(colours)], markers[number % len(markers)]
        axes.scatter(*_coordinates([point for point in points if point.group == group]), s=42, c=colour, marker=marker,
                     edgecolors=BLACK, linewidths=0.6, label=group, zorder=3, gid=f"group-{number}")  # fmt: skip


def _number_points(axes: Axes, points: Sequence[FrontPoint], winner: int | None) -> None:
    """Number the points whose number overlaps no other; the table has all."""
    gib, seconds = _coordinates(points)
    wide, high = max(gib) - min(gib) or 1, max(seconds) - min(seconds) or 1
    named: list[tuple[float, float]] = []
    for place, (x, y) in sorted(enumerate(zip(gib, seconds, strict=True)), key=lambda pair: pair[0] != winner):
        if all(abs(x - other) > 0.025 * wide or abs(y - level) > 0.05 * high for other, level in named):
            named.append((x, y))
            weight = "bold" if place == winner else "normal"
            axes.annotate(str(place + 1), (x, y), (5, 5), textcoords="offset points", fontsize=8.5, fontweight=weight)


def front_chart(points: Sequence[FrontPoint], limit_bytes: int, winner: int | None, title: str) -> Figure:
    """Return a chart of the Pareto front: memory to the right, seconds upwards, `limit_bytes` dashed."""
    if not points:
        raise ValueError("there is no point to draw")
    figure, axes = _figure(9, 5.2, title)
    gib, seconds = _coordinates(points)
    axes.step(gib, seconds, where="post", color="#999999", linewidth=1, gid="front")
    _scatter_groups(axes, points)
    _number_points(axes, points, winner)
    if winner is not None:
        ring = {"facecolors": "none", "edgecolors": BLACK, "linewidths": 1.4, "zorder": 4, "gid": "winner"}
        axes.scatter([gib[winner]], [seconds[winner]], s=190, **ring)
    limit = limit_bytes / GIB
    axes.axvline(limit, color=BLACK, linestyle="--", linewidth=1, gid="limit")
    text = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top", "fontsize": 8.5}
    axes.annotate(f"{limit:.1f} GiB per device", (limit, 1), (4, -4), **text)
    axes.set(xlabel="memory of the fullest rank, GiB per device", ylabel="iteration, s")
    axes.grid(color="#dddddd", linewidth=0.7)
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    return figure


def to_svg(figure: Figure) -> str:
    """Return the figure as SVG, the same text every time: no date, ids from a fixed salt."""
    image = io.StringIO()
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure.savefig(image, format="svg", metadata={"Date": None, "Creator": None})
    return "".join(line.rstrip() + "\n" for line in image.getvalue().splitlines())


def _figure(width: float, height: float, title: str) -> tuple[Figure, Any]:
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure((width, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
    figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
    return figure, axes
