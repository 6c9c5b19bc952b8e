"""Write a picture as PNG. Needs matplotlib, which is imported only here."""

from __future__ import annotations

import io

from bpipe.draw.picture import STYLES, Picture, lay_out
from bpipe.schedule.schedule import Schedule

DOTS_PER_INCH = 100
# The renderer's limit in one direction.
MAX_PIXELS = 32_000

_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def write_png(schedule: Schedule) -> bytes:
    """Draw a schedule as a PNG image. Raises ValueError if it is too large, or matplotlib is missing."""
    return render_png(lay_out(schedule))


def render_png(picture: Picture) -> bytes:
    """Render any picture, such as a simulation's, as PNG."""
    if max(picture.width, picture.height) > MAX_PIXELS:
        raise ValueError(
            f"the picture is {picture.width} x {picture.height} pixels, a png takes at most {MAX_PIXELS}: "
            "write svg, or draw fewer micro-batches or stages"
        )
    try:
        from matplotlib import rc_context
    except ImportError:
        raise ValueError("png needs matplotlib, which is not installed: pip install matplotlib, or write svg") from None
    # Thinner than the words on it.
    with rc_context({"hatch.linewidth": 0.3}):
        return _draw(picture)


def _draw(picture: Picture) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Polygon

    figure = Figure((picture.width / DOTS_PER_INCH, picture.height / DOTS_PER_INCH), DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.axis("off")
    for shape in picture.shapes:
        style = STYLES[shape.style]
        polygon = Polygon(
            list(shape.points),
            closed=shape.closed,
            facecolor=style.fill if shape.closed else "none",
            edgecolor=style.stroke,
            linewidth=0.8,
            linestyle="--" if style.dash else "-",
            hatch="///" if style.hatch else None,
        )
        axes.add_patch(polygon)
    for word in picture.words:
        # Sizes are pixels, matplotlib's are points of 1/72 inch.
        axes.text(word.x, word.y, word.text, size=word.size * 72 / DOTS_PER_INCH, ha=_ANCHORS[word.anchor], va="center")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
