"""`bpipe schedule`: generate or read a schedule, balance and check it, and write or draw it."""

import shutil
import sys
import textwrap
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from bpipe.balance.config import BALANCES, named_balance
from bpipe.build import ScheduleConfig, adopt, build
from bpipe.config.flags import outputs, schedules
from bpipe.config.flags.flag import Options, Task, command, group
from bpipe.config.flags.schedules import FORMATS
from bpipe.config.flags.values import AUTO, unit_costs
from bpipe.schedule.action import TRANSFER, Kind
from bpipe.schedule.families.families import FAMILIES, SUMMARIES, families_for_bounds
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.families.unit_grid import align
from bpipe.schedule.files.document import read_file, source_of, write_json
from bpipe.schedule.files.grid import write_grid
from bpipe.schedule.files.text import write_csv
from bpipe.schedule.host_buffers import num_host_memory_buffers
from bpipe.schedule.hosts import uses_host_memory
from bpipe.schedule.memory import num_transfers, peak_counts, plain
from bpipe.schedule.schedule import Schedule

# Values of `--costs` and `--hop`.
Times = tuple[tuple[Fraction, ...] | None, Fraction | None]

# Flags of a schedule that is generated; without meaning for one that is read.
_MADE = (
    replace(schedules.SCHEDULE, help="family of schedules"),
    schedules.PIPELINE,
    schedules.MICROBATCHES,
    schedules.CHUNKS,
    *schedules.ORDER,
    schedules.VOCABULARY,
    schedules.VOCABULARY_INPUT,
    schedules.HOP,
    schedules.BUFFERS_STAY,
)
_NEEDED = _MADE[:3]
_BALANCED = (schedules.BOUND, schedules.PARTNERS, schedules.HOSTS)
COMMAND = command(
    group("generated schedule", *_MADE, schedules.COSTS),
    group("schedule from a file", schedules.INPUT, schedules.ALIGN),
    group("balancing", schedules.BALANCE, *_BALANCED),
    group("output", schedules.SCHEDULE_FORMAT, outputs.OUTPUT),
    Task(
        "generate a schedule",
        "bpipe schedule --schedule zb-h1 --pp 4 --microbatches 8",
        "schedule pipeline microbatches chunks costs",
    ),
    Task("balance it", "bpipe schedule --schedule 1f1b --pp 4 --microbatches 8 --balance bpipe", "balance bound hosts"),
    Task(
        "draw it, or write it to a file",
        "bpipe schedule --schedule 1f1b --pp 4 --microbatches 8 --output 1f1b.svg",
        "output format",
    ),
    Task("check a schedule of your own", "bpipe schedule --input mine.csv --align", "input align"),
)


def run(options: Options) -> None:
    """Generate or read a schedule and write it. Without flags that name one, list the families."""
    if options.input is None and all(getattr(options, flag.field) is None for flag in _NEEDED):
        width = max(map(len, SUMMARIES))
        for name, summary in SUMMARIES.items():
            print(textwrap.fill(f"{name:<{width}}  {summary}", 120, subsequent_indent=" " * (width + 2)))
        return
    output = None if options.output is None else Path(options.output)
    form = options.format or _format_of(output)
    unused = next((flag.name for flag in _BALANCED if getattr(options, flag.field)), None)
    if options.balance == BALANCES[0] and unused:
        raise ValueError(f"{unused} says how to balance: give --balance bpipe, too, or leave it out")
    schedule = _generated(options) if options.input is None else _imported(options)
    content = _written(schedule, form, (options.costs, options.hop), to_terminal=output is None and sys.stdout.isatty())
    if output is not None:
        output.write_bytes(content)
        return
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def _format_of(output: Path | None) -> str:
    """Return the format that a file's suffix names."""
    suffix = "" if output is None else output.suffix.removeprefix(".").lower()
    if suffix in ("", "txt"):
        return "grid"
    if suffix not in FORMATS:
        raise ValueError(
            f"--output {output}: .{suffix} cannot be written, only {', '.join(FORMATS)}: use one of these endings, or give --format"
        )
    return suffix


def _generated(options: Options) -> Schedule:
    missing = [flag.name for flag in _NEEDED if getattr(options, flag.field) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing: say what to generate, or read a schedule with --input")
    if options.align:
        raise ValueError("--align is for a schedule read with --input: what is generated is aligned")
    if options.group_size == AUTO:
        _check_chosen_group(options)
    config = ScheduleConfig(
        options.schedule,
        options.pipeline,
        options.microbatches,
        num_chunks=options.chunks or FAMILIES[options.schedule].min_chunks,
        balance=named_balance(options.balance, options.bound, options.partners, options.buffers_stay, options.hosts),
        **schedules.schedule_fields(vars(options)),
    )
    if options.buffers_stay and config.limit is None:
        raise ValueError("--buffers-stay is for orders chosen for a bound: give --bound N and no group, or drop it")
    return build(config)


def _check_chosen_group(options: Options) -> None:
    """Raises ValueError for `--group auto` without a bound to choose it for."""
    if FAMILIES[options.schedule].within is None:
        raise ValueError(
            f"--group auto: {options.schedule} makes no orders for a bound: give a number, or choose "
            f"{families_for_bounds()}"
        )
    if options.bound is None or len(set(options.bound)) > 1:
        raise ValueError("--group auto is chosen for a bound: give --balance bpipe and --bound N, one for all ranks")
    if options.partners is not None:
        raise ValueError("--group auto is made for opposite ranks as partners: leave --partners out, or give a group")


def _imported(options: Options) -> Schedule:
    for flag in _MADE:
        if getattr(options, flag.field) not in (None, False):
            raise ValueError(f"{flag.name} is for generating, --input reads a schedule: give one of them")
    schedule = read_file(options.input)
    try:
        how = named_balance(options.balance, options.bound, options.partners, hosts=options.hosts)
        return adopt(align(schedule) if options.align else schedule, how)
    except ValueError as error:
        raise ValueError(f"{source_of(options.input)}: {error}") from None


def _written(schedule: Schedule, form: str, given: Times, to_terminal: bool) -> bytes:
    if form == "csv":
        return write_csv(schedule).encode()
    if form == "json":
        return write_json(schedule, _times_of(schedule, *given)).encode()
    if form == "svg":
        from bpipe.draw.picture import lay_out, render_svg

        return render_svg(lay_out(schedule)).encode()
    width = shutil.get_terminal_size().columns if to_terminal else None
    legend = _legend(schedule) if to_terminal else ""
    return (write_grid(schedule, width) + _remarks(schedule, given) + legend).encode()


def _remarks(schedule: Schedule, given: Times) -> str:
    """Write the numbers of the grid, with times if its slots do not show them."""
    ranks = range(schedule.num_ranks)
    numbers = {
        "peak": ",".join(map(str, peak_counts(schedule))),
        "evictions": ",".join(str(num_transfers(schedule, rank).evictions) for rank in ranks),
    }
    if uses_host_memory(schedule.hosts):
        numbers["own_memory"] = ",".join(str(num_host_memory_buffers(schedule, rank)) for rank in ranks)
    times = _times_of(schedule, *given) if any(given) or schedule.split_stages else None
    numbers |= {name: str(times[name]) for name in ("makespan", "bubble_percent")} if times else {}
    return f"# {' '.join(f'{name}={number}' for name, number in numbers.items())}\n"


def _legend(schedule: Schedule) -> str:
    """Write what the letters of a grid mean."""
    slots = (slot for row in schedule.ranks for slot in row)
    kinds = {action.kind for slot in slots for action in (*slot.computations, *slot.transfers)}
    words = []
    for kind in (kind for kind in Kind if kind in kinds):
        letter = kind.value[0] if kind in TRANSFER else kind.value
        words.append(f"{letter} {kind.name.lower().replace('_', ' ')}")
    legend = f"C computations, T transfers; {', '.join(words)}, each with its micro-batch"
    return textwrap.fill(legend, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False) + "\n"


def _times_of(schedule: Schedule, costs: tuple[Fraction, ...] | None, hop: Fraction | None) -> dict[str, object] | None:
    """Return `costs`, `hop` if nonzero, `makespan` and `bubble_percent`; None with vocabulary shards, which have no
    costs.

    Raises ValueError for costs that do not fit what the schedule computes.
    """
    halved = bool(schedule.split_stages)
    if costs is not None and halved and len(costs) == 2:
        raise ValueError("--costs: its backwards are computed in halves, I and W: give three costs, F,I,W")
    if schedule.layout.shard_kinds:
        if costs is not None:
            raise ValueError("--costs: shards of the vocabulary take part in it, and have no cost here: leave it out")
        return None
    unit = replace(unit_costs(costs), hop=hop or 0)
    times = iteration_time(schedule, unit)
    halves = (unit.backward_input, unit.backward_weight)
    return {
        "costs": [plain(cost) for cost in (unit.forward, *(halves if halved else (sum(halves),)))],
        **({"hop": plain(Fraction(unit.hop))} if unit.hop else {}),
        "makespan": plain(times.makespan),
        "bubble_percent": plain(round(times.bubble_percent, 3)),
    }
