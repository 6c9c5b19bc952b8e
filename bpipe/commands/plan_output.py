"""Print the outcome of `bpipe plan`, a search or a front, as text, as JSON or as a page."""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bpipe.commands.launch import launch_document, lines
from bpipe.commands.shared import print_json
from bpipe.commands.terminal import Flags, table, tell
from bpipe.config.flags.flag import Options
from bpipe.config.launch.megatron_command import Reading
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.config.launch.row_flags import common_flags, difference
from bpipe.plan.answer import (
    Answer,
    accuracy,
    advice,
    answer_document,
    answer_of,
    flags_of,
)
from bpipe.plan.candidates import CLEARLY, EXPOSED, Candidate, cells, is_level, legend
from bpipe.plan.document import document
from bpipe.plan.explain import calibration_lines, pairs_apart, remarks, verdict
from bpipe.plan.front import MOST_TIMES, Front, front_document, standing
from bpipe.plan.search import INDISTINCT, Outcome
from bpipe.plan.space import CUTS, VOCABULARIES, Space, num_grids
from bpipe.plan.standings import family_rows, family_values, needs_of_setup, trainer_needs
from bpipe.plan.vocabulary import Burden, burden, burden_document, burden_text, remedy_rows
from bpipe.predict.cluster import gib_text
from bpipe.predict.layout import Setup
from bpipe.predict.memory import RankMemory
from bpipe.predict.recompute import BLOCK

if TYPE_CHECKING:
    from rich.table import Table

# Ranks whose peaks fit into one line.
_ALL_SHOWN = 16
_OF_ANSWER = ("", "iteration s", "range s", "speed-up", "peak GiB", "of GiB", "state", "configuration")
_OF_ROWS = ("", "iteration s", "MFU %", "bubble %", "exposed s", "state", "configuration")
_OF_POINTS = ("peak GiB", "iteration s", "MFU %", "configuration", "moved GB", "needs GB/s")
_OF_REMEDIES = ("", "iteration s", "speed-up", "peak GiB", "state")


class PlanNotes(NamedTuple):
    """Facts shown with the rows."""

    launch: Reading | None
    """The launch from which the rows' flags differ, if one is given."""
    hurts: tuple[Burden, int] | None = None
    """The first row that the vocabulary hurts, by its number."""


def plan_notes(outcome: Outcome, launch: Reading | None) -> PlanNotes:
    # The rows themselves show the gain of shards that were searched.
    others = [name for name in VOCABULARIES if name not in outcome.space.vocabularies]
    burdens = (burden(row.prediction, outcome.space.profile, others) for row in outcome.rows)
    return PlanNotes(launch, next(((worst, number) for number, worst in enumerate(burdens, 1) if worst), None))


def print_plan(
    outcome: Outcome, notes: PlanNotes, form: str, reading: Reading | None, yours: Candidate | str | None
) -> None:
    """Print what to run, and then the rows.

    `yours`: the prediction of the given launch as it is, or why it cannot run on this cluster.
    """
    launched = yours if isinstance(yours, Candidate) else None
    answer = answer_of(outcome.stock, outcome.rows, outcome.space, notes.launch, launched)
    if form != "json":
        _tell(answer, [*lines(reading), *_plan_parts(outcome, notes, yours)])
        return
    launch = {}
    if reading is not None and yours is not None:
        impossible = {"impossible": yours} if isinstance(yours, str) else {}
        values = {**document(launched.prediction), "refused": list(launched.refused)} if launched else impossible
        launch = {"launch": {**launch_document(reading), "as_it_stands": values}}
    print_json({"answer": answer_document(answer), **plan_document(outcome, notes), **launch})


def _tell(answer: Answer, parts: Sequence[str | Table]) -> None:
    """Print the answer with the flags that launch it, then `parts`, and the advice once more at the end."""
    choices = answer.choices
    if choices:
        tell(table(_OF_ANSWER, cells(_OF_ANSWER, choices)))
    tell(advice(answer), *([accuracy(choices[-1])] if choices else ()))
    for row in choices:
        tell(*(f"{row.name}: the trainer refuses this: {reason}" for reason in row.refused[:2]))
        tell(*([Flags(f"{row.name}: {row.flags}")] if row.flags else ()))
    tell("", *parts)
    if answer.taken is not None:
        tell("", advice(answer))


def plan_document(outcome: Outcome, notes: PlanNotes) -> dict[str, Any]:
    """Return the document of `--format json` (docs/planning.md)."""
    space = outcome.space
    # Reasons that do not apply to this space.
    sizes = (space.tensors, space.pipelines, space.micro_batches, space.chunk_counts)
    hidden = {"context": space.contexts == (1,), "layers": BLOCK not in space.recompute, "asked": not any(sizes)}
    hidden["mamba"] = space.model.hybrid is None
    return {
        "verdict": verdict(outcome)._asdict(),
        "searched": {
            "grids": num_grids(space),
            "configurations": outcome.num_configurations,
            "fitting": outcome.num_fitting,
            "only_balanced": outcome.num_only_balanced,
            "simulated": outcome.num_simulated,
            "cut": {name: outcome.cuts.get(name, 0) for name in CUTS if not hidden.get(name)},
        },
        "rows": [
            {
                **document(row.prediction),
                "only_balanced": row.unbalanced_bytes is not None,
                "unbalanced_peak_bytes": row.unbalanced_bytes,
                "megatron_flags": megatron_flags(row.setup),
                "launch_difference": notes.launch and difference(row.setup, notes.launch)._asdict(),
            }
            for row in outcome.rows
        ],
        "stock": _stock_values(outcome.stock),
        "families": family_values(outcome),
        "needs": trainer_needs(outcome),
        "vocabulary": None if notes.hurts is None else burden_document(*notes.hurts),
    }


def _stock_values(stock: Candidate | None) -> dict[str, Any]:
    return {"row": stock and {**document(stock.prediction), "megatron_flags": megatron_flags(stock.setup)}}


def _plan_parts(outcome: Outcome, notes: PlanNotes, yours: Candidate | str | None) -> list[str | Table]:
    """Return the rows, what each holds on every rank, the cost of the vocabulary, and the gain of balancing."""
    cluster = outcome.space.cluster
    share = f"{100 * cluster.limit_bytes / cluster.device.memory_bytes:.0f} % of a device"
    limit = f"{gib_text(cluster.limit_bytes)} GiB ({share})"
    head = f"no configuration fits into {limit}"
    if outcome.rows:
        head = (
            f"{outcome.num_fitting} of {outcome.num_configurations} configurations that may be among the fastest fit into "
            f"{limit}, {outcome.num_simulated} were simulated; the {len(outcome.rows)} fastest, "
            f"to within {100 * (INDISTINCT - 1):.2g} %:"
        )
    rows = [replace(row, name=str(number)) for number, row in enumerate(outcome.rows, 1)]
    parts: list[str | Table] = [f"the launch as it is: {yours}"] if isinstance(yours, str) else []
    shown = [*([yours] if isinstance(yours, Candidate) else ()), *rows]
    parts += [head, *calibration_lines(cluster)]
    if shown:
        parts += [table(_OF_ROWS, cells(_OF_ROWS, shown)), f"{legend(row.setup for row in shown)}; {EXPOSED}"]
    num_level = sum(is_level(row.iteration_s, rows[0].iteration_s) for row in rows)
    if num_level < len(rows):
        percent = f"{100 * (CLEARLY - 1):.0f} %"
        parts.append(
            f"Rows from {num_level + 1} on take at least {percent} more time than row 1; rows above are level with it."
        )
    for row in shown:
        parts += ["", *_details(row, outcome, notes.launch)]
    if rows and notes.launch is None:
        parts += ["", Flags(f"all rows: {shlex.join(common_flags(rows[0].setup))}")]
    families = family_rows(outcome)
    if families:
        parts += ["", table(("schedule", "its fastest configuration"), families), *trainer_needs(outcome)]
    if notes.hurts:
        remedies = cells(_OF_REMEDIES, remedy_rows(notes.hurts[0]), Candidate(notes.hurts[0].prediction))
        parts += ["", burden_text(*notes.hurts), table(_OF_REMEDIES, remedies)]
    return [*parts, "", verdict(outcome).text]


def _details(row: Candidate, outcome: Outcome, launch: Reading | None) -> list[str]:
    """Return the memory of every rank of a row, remarks, and the flags that launch it."""
    memory = row.prediction.memory
    lines = [f"{row.name}: GiB per rank, of {gib_text(row.limit_bytes)}: {peaks_text(memory)}"]
    if row.name in map(str, range(1, len(outcome.rows) + 1)):
        texts = remarks(row, pairs_apart(row.prediction, outcome.space.profile))
        return [*lines, *(f"   {text}" for text in texts), Flags(f"   {flags_of(row.setup, launch)}")]
    misses = [f"rank {rank.rank} needs {gib_text(rank.peak_bytes)}" for rank in memory if not rank.fits]
    fits = "fits" if not misses else f"does not fit: {', '.join(misses[:4])}{', ...' if len(misses) > 4 else ''}"
    return [*lines, *(f"   {text}" for text in (*remarks(replace(row, refused=())), fits))]


def peaks_text(memory: Sequence[RankMemory]) -> str:
    """Write the GiB of every rank; many ranks as counts of equal neighbours."""
    peaks = [gib_text(rank.peak_bytes) for rank in memory]
    if len(peaks) <= _ALL_SHOWN:
        return " ".join(peaks)
    runs = ((value, len(tuple(run))) for value, run in groupby(peaks))
    return " ".join(value if number == 1 else f"{number} x {value}" for value, number in runs)


def print_front(front: Front, space: Space, options: Options, plot: Path | None) -> None:
    """Draw and print. Raises ValueError for a row that does not exist, or without matplotlib."""
    title = f"{space.model.name} on {space.cluster.num_devices} {space.cluster.device.name}, batch {space.global_batch}"
    if plot is not None:
        plot.write_bytes(_drawn(front, title, plot.suffix))
    if options.html is not None:
        # A page has the title as its head.
        svg = _drawn(front, "", ".svg").decode()
        Path(options.html).write_text(_page(front, title, svg), encoding="utf-8")
    if options.emit_args is not None:
        if options.emit_args > len(front.points):
            raise ValueError(f"--emit-args {options.emit_args}: there are {len(front.points)} rows")
        print(shlex.join(megatron_flags(front.points[options.emit_args - 1].setup)))
        return
    winner = front.winner
    answer = answer_of(front.stock, [] if winner is None else [front.points[winner]], space)
    if answer.row is not None and winner is not None:
        answer = replace(answer, row=winner + 1)
    if options.format == "json":
        stock = _stock_values(front.stock)
        print_json({"answer": answer_document(answer), "front": front_document(front), "stock": stock})
        return
    parts: list[str | Table] = [_front_head(front)]
    if front.points:
        titles, rows = _front_cells(front)
        parts += [*calibration_lines(space.cluster), table(titles, rows), *_front_remarks(front)]
    _tell(answer, parts)


def _front_head(front: Front) -> str:
    head = f"{front.num_configurations} configurations, of which {front.num_simulated} were simulated"
    most = f"{gib_text(front.most_bytes)} GiB per device"
    if not front.points:
        return f"{head}: none needs less than {most}, {float(MOST_TIMES):g} times its memory"
    return f"{head}: the fastest for every amount of memory up to {most}"


def _needs(front: Front) -> list[str]:
    return list(dict.fromkeys(need for row in front.points for need in needs_of_setup(row.setup)))


def _front_cells(front: Front) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the titles and a row for each point: `*` marks the winner, `-` what does not fit; numbers name needs."""
    every, rows = _needs(front), []
    for place, (row, values) in enumerate(zip(front.points, cells(_OF_POINTS, front.points), strict=True)):
        mark = "*" if place == front.winner else "" if row.peak_bytes <= front.limit_bytes else "-"
        needs = " ".join(f"[{every.index(need) + 1}]" for need in needs_of_setup(row.setup))
        rows.append([mark, str(place + 1), *values, needs])
    return ("", "", *_OF_POINTS, "needs"), rows


def _front_remarks(front: Front) -> list[str]:
    needs = (f"[{number}] {need}" for number, need in enumerate(_needs(front), 1))
    searched = f"Every row is the best of what was searched. Not searched: {'; '.join(front.not_searched)}."
    letters = legend(row.setup for row in front.points)
    return [letters, *needs, standing(front), *([searched] if front.not_searched else [])]


def _drawn(front: Front, title: str, suffix: str) -> bytes:
    try:
        from bpipe.draw.plots import FrontPoint, front_chart, to_png, to_svg
    except ImportError:
        raise ValueError(
            "--plot and --html need matplotlib, which is not installed: pip install matplotlib, or leave them out"
        ) from None
    points = [FrontPoint(row.peak_bytes, row.iteration_s, _label(row.setup)) for row in front.points]
    figure = front_chart(points, front.limit_bytes, front.winner, title)
    return to_png(figure) if suffix == ".png" else to_svg(figure).encode()


def _label(setup: Setup) -> str:
    shards = f", vocabulary {setup.vocabulary.value}" if setup.is_sharded else ""
    return f"{setup.schedule}{shards}{', balanced' if setup.balance is not None else ''}"


_STYLE = """body { font: 15px/1.5 sans-serif; margin: 2rem auto; max-width: 70rem; color: #111; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd; }
td { font-variant-numeric: tabular-nums; } tr.winner { font-weight: bold; background: #eef5fb; }
tr.large { color: #666; } code { font-size: .85em; overflow-wrap: anywhere; } svg { max-width: 100%; height: auto; }"""


def _page(front: Front, title: str, svg: str) -> str:
    """Return one self-contained HTML file: the picture, a row for each point with its flags, and remarks."""
    titles, every = _front_cells(front) if front.points else ((), [])
    rows = []
    for place, (row, values) in enumerate(zip(front.points, every, strict=True)):
        kind = "winner" if place == front.winner else "large" if row.peak_bytes > front.limit_bytes else "fits"
        code = f"<code>{html.escape(shlex.join(megatron_flags(row.setup)))}</code>"
        flags = f"<details><summary>flags</summary>{code}</details>"
        rows.append(f'<tr class="{kind}">{_html("td", values)}<td>{flags}</td></tr>')
    lines = [_front_head(front), *(_front_remarks(front) if front.points else ())]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{svg[svg.index('<svg') :]}\n"
        f"{_html('p', lines)}\n<table><thead><tr>{_html('th', (*titles, ''))}</tr></thead><tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table></body></html>\n"
    )


def _html(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)
