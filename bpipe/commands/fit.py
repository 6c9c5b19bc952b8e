"""`bpipe fit`: what else would make a launch fit, what each way saves and what it costs.

In: a launch, or flags. Out: a table or JSON. The exit status is 3 where nothing that was tried fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bpipe.commands.launch import lines, reading_of
from bpipe.commands.shared import CONFIGURED, cluster_of, measured_of, print_json, with_trace
from bpipe.commands.terminal import progress_of
from bpipe.config.flags import outputs
from bpipe.config.flags.configurations import MEASURED
from bpipe.config.flags.flag import Command, Group, Options, Task
from bpipe.config.flags.values import positive
from bpipe.config.launch.megatron_command import Reading, read_command
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.config.launch.row_flags import difference
from bpipe.plan.budget import one_budget_a_rank
from bpipe.plan.budget_fit import ELSEWHERE, within_budget
from bpipe.plan.explain import describe
from bpipe.plan.options import filled, setup_of
from bpipe.plan.predict import SetupPrediction, predict
from bpipe.plan.ways import Way, ways_to_fit
from bpipe.predict.cluster import gib_text
from bpipe.predict.error_bars import range_text
from bpipe.predict.layout import Setup
from bpipe.predict.profile import Profile

# The exit status where nothing fits; 2 is an error in what was asked.
NOTHING_FITS = 3

COMMAND = Command(
    (*CONFIGURED, MEASURED, Group("output", (outputs.rows(12, positive), outputs.FORMAT))),
    (
        Task(
            "find what makes a launch fit",
            "bpipe fit --cluster h100-80g --launch launch.json",
            ("launch", "megatron", "rows", "format"),
        ),
        Task(
            "start from a model instead of a launch",
            "bpipe fit --model gpt3-96b --cluster a100-80g:4x8 --tp 4 --pp 8 --mbs 2 --gbs 128 --recompute selective "
            "--attention unfused --precision fp16",
            ("model", "cluster", "tensor", "pipeline", "micro_batch", "global_batch", "recompute"),
        ),
    ),
)


def run(asked: Options) -> int:
    reading = reading_of(asked)
    options = filled(asked, reading, ("pipeline", "global_batch"))
    profile, traced = measured_of(options)
    setup = with_trace(setup_of(options, cluster_of(options, reading)), traced, options.profile)
    if options.memory is not None and options.memory.budget_bytes is not None:
        setup = replace(setup, budget_bytes=one_budget_a_rank(options.memory.budget_bytes, setup.pipeline))
    others = () if reading is None else reading.others
    planned = _planning(setup, options, profile)
    with progress_of("fit"):
        found = ways_to_fit(setup, others, profile, planned)
        setup, unkept = (setup, None) if planned is None else _planned(setup, planned)
        now = predict(setup, profile, formula=options.flops_formula)
    shown = found[: options.rows]
    # Where flags say it, what changes is said of the launch that they mean.
    launch = read_command(megatron_flags(setup)) if reading is None else reading
    if options.format == "json":
        now_values = {**_values(now), "unkept": unkept}
        print_json({"now": now_values, "ways": [_way_values(way, launch) for way in shown]})
    else:
        print("\n".join((*([unkept] if unkept else []), *_lines(now, shown, launch), *lines(reading))))
    return 0 if now.fits or any(way.fits for way in found) else NOTHING_FITS


def _planning(setup: Setup, options: Options, profile: Profile | None) -> Callable[[Setup], Setup] | None:
    """Return how the launch plans what moves by its budget; None where it does not."""
    if options.memory is None or setup.balance is None or options.bound is not None:
        return None
    return lambda changed: within_budget(changed, changed.limit_bytes, options.min_bytes, profile)[0]


def _planned(setup: Setup, planned: Callable[[Setup], Setup]) -> tuple[Setup, str | None]:
    """Return the setup as its budget plans it, or as it is and why no plan keeps the budget."""
    try:
        return planned(setup), None
    except ValueError as error:
        # What else there is, is in the table.
        return setup, str(error).removesuffix(f". {ELSEWHERE}")


def _lines(now: SetupPrediction, ways: Sequence[Way], launch: Reading) -> list[str]:
    peak, limit, seconds = now.peak_bytes, now.memory[0].limit_bytes, now.timing.iteration_s
    head = (
        f"{describe(now.setup)}: {gib_text(peak)} of {gib_text(limit)} GiB, {'fits' if now.fits else 'does not fit'}; "
        f"{seconds:.3f} s{range_text(now.setup, seconds)}"
    )
    if not ways:
        return [head, "nothing that was tried helps"]
    rows: list[tuple[str, ...]] = [("", "GiB", "saved", "seconds", "ratio")]
    for number, way in enumerate(ways, 1):
        taken, need = way.prediction.timing.iteration_s, way.prediction.peak_bytes
        figures = (gib_text(need), gib_text(peak - need), f"{taken:.3f}", f"{taken / seconds:.2f}")
        rows.append((str(number), *figures))
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    words = ["what", *(f"{way.what}{_state(way)}" for way in ways)]
    return [
        head,
        *(
            "  ".join((*(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), word))
            for row, word in zip(rows, words, strict=True)
        ),
        *(f"{number}. {difference(way.prediction.setup, launch).text}" for number, way in enumerate(ways, 1)),
    ]


def _state(way: Way) -> str:
    if way.refused:
        return " (refused by the trainer)"
    words = {"guarded": way.guarded, "tight": way.is_tight, "does not fit": not way.fits}
    said = [word for word, holds in words.items() if holds]
    return f" ({', '.join(said)})" if said else ""


def _values(prediction: SetupPrediction) -> dict[str, Any]:
    return {
        "iteration_s": prediction.timing.iteration_s,
        "peak_bytes": prediction.peak_bytes,
        "limit_bytes": prediction.memory[0].limit_bytes,
        "fits": prediction.fits,
    }


def _way_values(way: Way, launch: Reading) -> dict[str, Any]:
    return {
        "what": way.what,
        **_values(way.prediction),
        "flags": difference(way.prediction.setup, launch)._asdict(),
        "guarded": way.guarded,
        "tight": way.is_tight,
        "refused": list(way.refused),
    }
