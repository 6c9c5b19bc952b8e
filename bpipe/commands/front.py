"""`bpipe plan --front`: what is fastest for every amount of memory.

In: a space, flags. Out: a table or JSON; a picture or page.
"""

from __future__ import annotations

import html
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bpipe.commands.plan_output import answer_of
from bpipe.commands.shared import print_json
from bpipe.config.flags.flag import Options
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan import stock
from bpipe.plan.answer import answer_document, answer_lines
from bpipe.plan.front import Front, Point, describe_point, find_front, front_document, front_lines, remarks
from bpipe.plan.judge import Candidate
from bpipe.plan.space import Space
from bpipe.predict.cluster import gib_text


def show(space: Space, options: Options, plot: Path | None, progress: Callable[[str, int, int], None]) -> Front:
    """Search, draw and print. Raises ValueError for a row that is not there, or where there is nothing to draw."""
    front = find_front(space, progress)
    progress("front", 1, 1)
    beside = _beside(front, space)
    title = f"{space.model.name} on {space.cluster.num_devices} {space.cluster.device.name}, batch {space.global_batch}"
    if plot is not None:
        plot.write_bytes(_drawn(front, title, plot.suffix))
    if options.html is not None:
        # A page has the title as its head.
        svg = _drawn(front, "", ".svg").decode()
        Path(options.html).write_text(page(front, title, svg), encoding="utf-8")
    row: int | None = options.emit_args
    if row is not None:
        if row > len(front.points):
            raise ValueError(f"--emit-args {row}: there are {len(front.points)} rows")
        print(shlex.join(megatron_flags(front.points[row - 1].prediction.setup)))
        return front
    found = answer_of(beside)
    if options.format == "json":
        print_json(
            {"answer": answer_document(found), "front": front_document(front), "stock": stock.stock_document(beside)}
        )
    else:
        print("\n".join((*answer_lines(found), "", *front_lines(front))))
    return front


def _beside(front: Front, space: Space) -> stock.Stock:
    """What Megatron alone does, beside the point that wins."""
    if front.winner is None:
        return stock.stock_of(space, ())
    found = stock.stock_of(space, [Candidate(front.points[front.winner].prediction, None)])
    return replace(found, row=None if found.row is None else front.winner + 1)


def _drawn(front: Front, title: str, suffix: str) -> bytes:
    try:
        from bpipe.draw.plots import FrontPoint, front_chart, to_png, to_svg
    except ImportError:
        raise ValueError(
            "--plot and --html need matplotlib, which is not installed: pip install matplotlib, or leave them out"
        ) from None
    points = [FrontPoint(point.peak_bytes, point.iteration_s, _group(point)) for point in front.points]
    figure = front_chart(points, front.limit_bytes, front.winner, title)
    return to_png(figure) if suffix == ".png" else to_svg(figure).encode()


def _group(point: Point) -> str:
    setup = point.prediction.setup
    shards = f", vocabulary {setup.vocabulary.value}" if setup.is_sharded else ""
    return f"{setup.schedule}{shards}{', balanced' if setup.balance is not None else ''}"


_STYLE = """body { font: 15px/1.5 sans-serif; margin: 2rem auto; max-width: 70rem; color: #111; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd; }
.number { text-align: right; font-variant-numeric: tabular-nums; } tr.winner { font-weight: bold; background: #eef5fb; }
tr.large { color: #666; } code { font-size: .85em; overflow-wrap: anywhere; } svg { max-width: 100%; height: auto; }"""


def page(front: Front, title: str, svg: str) -> str:
    """Return one self-contained HTML file: the picture, a row for each point with its flags, and the words below."""
    rows = []
    for place, point in enumerate(front.points):
        kind = "winner" if place == front.winner else "large" if point.peak_bytes > front.limit_bytes else "fits"
        setup = point.prediction.setup
        numbers = (
            f"{place + 1}",
            gib_text(point.peak_bytes),
            f"{point.iteration_s:.3f}",
            f"{100 * point.prediction.mfu:.2f}",
        )
        cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
        flags = (
            f"<details><summary>flags</summary><code>{html.escape(shlex.join(megatron_flags(setup)))}</code></details>"
        )
        rows.append(f'<tr class="{kind}">{cells}<td>{html.escape(describe_point(front, place))}{flags}</td></tr>')
    notes = "".join(f"<p>{html.escape(line)}</p>" for line in (front_lines(front)[0], *remarks(front)))
    head = (
        "".join(f'<th class="number">{name}</th>' for name in ("", "GiB per device", "iteration, s", "MFU, %"))
        + "<th>configuration</th>"
    )
    drawing = svg[svg.index("<svg") :]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta '
        f'charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n'
        f"<body><h1>{html.escape(title)}</h1>\n{drawing}\n{notes}\n<table><thead><tr>{head}</tr></thead><tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table></body></html>\n"
    )
