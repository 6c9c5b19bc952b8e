"""Write a picture as SVG, which any browser shows."""

from __future__ import annotations

from html import escape

from bpipe.draw.picture import RARE, STYLES, Picture, Shape, Style, Word, lay_out
from bpipe.schedule.schedule import Schedule


def write_svg(schedule: Schedule) -> str:
    """Draw a schedule as one self-contained SVG document."""
    return render_svg(lay_out(schedule))


def render_svg(picture: Picture) -> str:
    """Render any picture, such as a simulation's, as SVG."""
    # Styles that few schedules have are left out of the others.
    drawn = {shape.style for shape in picture.shapes}
    styles = {name: style for name, style in STYLES.items() if name not in RARE or name in drawn}
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
