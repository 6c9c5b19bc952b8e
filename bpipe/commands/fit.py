"""`bpipe fit`: changes that make a launch fit, with what each saves and costs.

The exit status is 3 if nothing that was tried fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bpipe.commands.launch import CONFIGURED, lines, predicted_of, reading_of
from bpipe.commands.terminal import Flags, print_json, progress_of, table, tell
from bpipe.config.flags import outputs
from bpipe.config.flags.configurations import MEASURED
from bpipe.config.flags.flag import Options, Task, command, group
from bpipe.config.flags.values import positive
from bpipe.config.launch.megatron_command import Reading, read_command
from bpipe.config.launch.megatron_flags import difference, megatron_flags
from bpipe.plan.budget import ELSEWHERE, one_budget_a_rank, within_budget
from bpipe.plan.candidates import cells, describe, legend
from bpipe.plan.options import filled
from bpipe.plan.predict import Candidate, predict
from bpipe.plan.ways import ways_to_fit
from bpipe.predict.cluster import gib_text, range_words
from bpipe.predict.layout import Setup

# Exit status if nothing fits; 2 is an error of the user's.
NOTHING_FITS = 3
_COLUMNS = ("peak GiB", "saved GiB", "iteration s", "ratio", "state", "what")

COMMAND = command(
    *CONFIGURED,
    MEASURED,
    group("output", outputs.rows(12, positive), outputs.FORMAT),
    Task(
        "find what makes a launch fit",
        "bpipe fit --cluster h100-80g --launch launch.json",
        "launch megatron rows format",
    ),
    Task(
        "start from a model instead of a launch",
        "bpipe fit --model gpt3-96b --cluster a100-80g:4x8 --tp 4 --pp 8 --mbs 2 --gbs 128 --recompute selective "
        "--attention unfused --precision fp16",
        "model cluster tensor pipeline micro_batch global_batch recompute",
    ),
)


def run(asked: Options) -> int:
    reading = reading_of(asked)
    options = filled(asked, reading, ("pipeline", "global_batch"))
    setup, profile = predicted_of(options, reading)
    if options.memory is not None and options.memory.budget_bytes is not None:
        setup = replace(setup, budget_bytes=one_budget_a_rank(options.memory.budget_bytes, setup.pipeline))
    others = () if reading is None else reading.others
    planned: Callable[[Setup], Setup] | None = None
    if options.memory is not None and setup.balance is not None and options.bound is None:
        # What moves within the budget is planned anew for every change.
        def planned(changed: Setup) -> Setup:
            return within_budget(changed, changed.limit_bytes, options.min_bytes, profile)[0]

    with progress_of("fit"):
        ways = ways_to_fit(setup, others, profile, planned)
        setup, unkept = (setup, None) if planned is None else _planned(setup, planned)
        now = predict(setup, profile)
    shown = ways[: options.rows]
    # Without a launch, changes are those of the launch that the flags mean.
    launch = read_command(megatron_flags(setup)) if reading is None else reading
    if options.format == "json":
        values = _values(now) | {"unkept": unkept}
        print_json({"now": values, "ways": [_way_values(way, launch) for way in shown]})
    else:
        tell(*([unkept] if unkept else ()))
        _tell(now, shown, launch)
        tell(*lines(reading))
    return 0 if now.fits or any(way.can_run for way in ways) else NOTHING_FITS


def _planned(setup: Setup, planned: Callable[[Setup], Setup]) -> tuple[Setup, str | None]:
    """Return the setup planned within its budget, or the same setup and why no plan keeps the budget."""
    try:
        return planned(setup), None
    except ValueError as error:
        # The table lists the alternatives.
        return setup, str(error).removesuffix(f". {ELSEWHERE}")


def _tell(now: Candidate, ways: Sequence[Candidate], launch: Reading) -> None:
    fits = "fits" if now.fits else "does not fit"
    peak, seconds = f"{gib_text(now.peak_bytes)} of {gib_text(now.limit_bytes)} GiB", f"{now.iteration_s:.3f} s"
    measured = range_words(now.setup.error_bars, now.iteration_s)
    tell(f"{describe(now.setup)}: {peak}, {fits}; {seconds}{measured and f' ({measured})'}")
    # More than two changes may be needed.
    others = "bpipe plan searches all cuts of the devices"
    if not ways:
        tell(f"nothing that was tried helps{'' if now.fits else f': {others}'}")
        return
    numbered = [[str(number), *values] for number, values in enumerate(cells(_COLUMNS, ways, now), 1)]
    flags = (f"{number}. {difference(way.setup, launch).text}" for number, way in enumerate(ways, 1))
    tell(table(("", *_COLUMNS), numbered), *map(Flags, flags))
    tell(f"{legend([now.setup])}; saved, ratio: compared with the launch as it is")
    if not (now.fits or any(way.can_run for way in ways)):
        tell(f"None of these makes it fit: {others}.")


def _values(row: Candidate) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("iteration_s", "peak_bytes", "limit_bytes", "fits")}


def _way_values(way: Candidate, launch: Reading) -> dict[str, Any]:
    return {
        "what": way.name,
        **_values(way),
        "flags": difference(way.setup, launch)._asdict(),
        "guarded": way.is_guarded,
        "tight": way.is_tight,
        "refused": list(way.refused),
    }
