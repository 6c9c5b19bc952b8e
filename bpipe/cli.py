"""The `bpipe` command. In: command line arguments, a schedule file.

Out: a schedule as grid, CSV, JSON or picture, or one line of error.

Knows no schedule and no format itself: `program` builds, `ir` writes, `draw` draws. Imports nothing heavy, and what
draws only to draw. The other sub-commands are files of `bpipe.commands`, imported when they are called.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

from bpipe import __version__
from bpipe.build import BALANCES, ScheduleConfig, adopt, build, named_balance
from bpipe.check.deadlock import WaitLevel, blocked_ranks
from bpipe.commands import shortest
from bpipe.commands.parser import Parser
from bpipe.commands.times import times_of, unit_costs
from bpipe.flag_types import AUTO, HOSTS_SAID, costs, counted, group_size, hop, numbers, positive, share
from bpipe.formats.document import write_json
from bpipe.formats.grid import write_grid
from bpipe.formats.listing import write_listing, write_listing_json
from bpipe.formats.messages import write_runtime
from bpipe.formats.read import read_file, source_of
from bpipe.formats.text import write_csv
from bpipe.generate.families import (
    FAMILIES,
    exchange_of,
    families_for_bounds,
    families_with_deferral,
    families_with_early_forwarding,
    families_with_groups,
    families_with_shards,
)
from bpipe.ir.action import SHARDS, Action, Kind
from bpipe.ir.host_buffers import num_host_memory_buffers
from bpipe.ir.hosts import ARRANGEMENTS, uses_host_memory
from bpipe.ir.layout import Vocabulary
from bpipe.ir.memory import num_transfers, peak_counts, plain, with_after_input
from bpipe.ir.program import Exchange
from bpipe.ir.schedule import Schedule
from bpipe.lower.align import align
from bpipe.lower.answered import lower_as_run
from bpipe.values import printable

# What `--costs` and `--hop` say.
Times = tuple[tuple[Fraction, ...] | None, Fraction | None]

SUFFIXES = ("grid", "csv", "json", "svg", "png")
# The last is CSV, too, so a file's name does not tell.
FORMATS = (*SUFFIXES, "runtime")

SCHEDULE = "generate or read a schedule, balance it, check it, and print or draw it"
# Each is a module of that name in bpipe.commands.
COMMANDS = {
    "simulate": "predict one configuration's time, bubble and memory per stage",
    "plan": "search a model's configurations on a cluster, and say whether balancing helps",
    "estimate": "estimate what a micro-batch size gains from stage MFUs alone",
    "profile": "time one stage of a model on this machine's device",
    "calibrate": "say how far a cluster is from predictions, by one run on it",
    "report": "lay a recorded run beside its prediction",
    "compare": "lay two runs of one training side by side: do they compute the same, and what do they hold and take",
}

_COLOURS = {
    Kind.FORWARD: "34",
    Kind.BACKWARD: "32",
    Kind.BACKWARD_INPUT: "32",
    Kind.BACKWARD_WEIGHT: "36",
    **dict.fromkeys(SHARDS, "35;1"),
    Kind.EVICT: "31",
    Kind.HOST: "33",
    Kind.RETURN: "33",
    Kind.LOAD: "35",
}


# What stands in the way of a file, and what to do.
_OF_FILES = {
    errno.ENOENT: ("there is no such file", "look at the name"),
    errno.EISDIR: ("this is a folder", "name a file"),
    errno.ENOTDIR: ("a part of its path is no folder", "look at the name"),
    errno.EACCES: ("this user may not read or write it", "name another file, or change who may"),
    errno.ENOSPC: ("the disk is full", "name a file on another, or make room"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 or the command's own, 2 with one message on stderr, or 130 where it was
    interrupted."""
    if sys.stdout is None:
        # Started with standard output closed: what is written has to fail like on any other output that takes nothing.
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding does not have is no reason to print nothing.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:
        # The reader has seen enough.
        _drop_output()
        return 0
    except (ValueError, OSError) as error:
        _drop_output()
        print(f"bpipe: error: {printable(_in_words(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bpipe: interrupted", file=sys.stderr)
        return 130


def _run(arguments: Sequence[str]) -> int:
    parser, commands = _parsers(arguments[0] if arguments else None)
    try:
        if arguments and arguments[0] in commands:
            commands[arguments[0]].check_flags(arguments[1:])
        options = parser.parse_args(arguments)
        status: int | None = options.run(options)
    except SystemExit:
        # Help has been written.
        sys.stdout.flush()
        raise
    # Output that cannot be written has to fail here, and not once Python ends.
    sys.stdout.flush()
    return status or 0


def _in_words(error: ValueError | OSError) -> str:
    """What is wrong with which file, and what to do; of another error what it says itself."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    path = Path(os.fsdecode(error.filename))
    if error.errno == errno.ENOENT and not path.parent.is_dir():
        return f"{path}: there is no folder {path.parent}: make it, or look at the name"
    wrong, remedy = _OF_FILES.get(
        error.errno or 0, (str(error.strerror).lower(), "look at the name, and at what it is")
    )
    return f"{path}: {wrong}: {remedy}"


def _drop_output() -> None:
    """Python would write what is left once more while it ends, and complain."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parsers(called: str | None) -> tuple[Parser, dict[str, Parser]]:
    """Return the command's parser and those of its sub-commands; only that of the one that is called is complete."""
    parser = Parser(prog="bpipe", description="Look at pipeline schedules and what they cost before they run.")
    parser.add_argument("--version", action="version", version=f"bpipe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    found: dict[str, Parser] = {}
    for name, text in {"schedule": SCHEDULE, **COMMANDS}.items():
        found[name] = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name != called:
            continue
        if name == "schedule":
            _add_arguments(found[name])
            found[name].set_defaults(run=_schedule)
        else:
            module = importlib.import_module(f"bpipe.commands.{name}")
            module.add_arguments(found[name])
            found[name].set_defaults(run=module.run)
    return parser, found


def _add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--schedule", choices=tuple(FAMILIES), help="what to generate")
    add("--stages", type=positive, metavar="P", help="pipeline ranks")
    add("--microbatches", type=positive, metavar="M", help="micro-batches an iteration")
    add(
        "--chunks",
        type=positive,
        metavar="V",
        help="model chunks a rank (default: the fewest that the schedule has, 1 or 2)",
    )
    of_groups = families_with_groups()
    add(
        "--group",
        type=group_size,
        metavar="G|auto",
        help=f"{of_groups}: micro-batches that go through a chunk before the next (default: P, or P/2); auto, or a "
        f"bound alone: chosen",
    )
    add(
        "--vocabulary",
        choices=tuple(one.value for one in Vocabulary),
        help=f"{families_with_shards()}: split the output layer over all ranks, by algorithm 1 or 2, or interlaced "
        f"(default none: it is whole)",
    )
    add("--input-shards", action="store_true", help="with --vocabulary: split the embedding, too")
    of_delays = families_with_deferral()
    add(
        "--delay",
        type=counted,
        metavar="N",
        help=f"{of_delays}: how many micro-batches' I stand before a W (default 0: W follows its I)",
    )
    early = families_with_early_forwarding()
    add(
        "--early",
        action="store_true",
        help=f"{early}: early forwarding, which lets more micro-batches in for less waiting",
    )
    add(
        "--costs",
        type=costs,
        metavar="F,B|F,I,W",
        help="what a rank's forward and backward, or its halves, of a micro-batch take, all chunks together (default "
        "1,2 and 1,1,1)",
    )
    add(
        "--hop",
        type=hop,
        metavar="H",
        help="what a message from one rank to the next takes, in the unit of --costs (default 0)",
    )
    add(
        "--input",
        metavar="FILE",
        help="read the schedule from a CSV, JSON or grid file instead ('-' is standard input)",
    )
    add("--align", action="store_true", help="with --input: place each rank's order anew on the unit grid")
    add(
        "--balance",
        choices=BALANCES,
        default="none",
        help="none, or bpipe: keep every rank within its bound (default none)",
    )
    add(
        "--bound",
        type=numbers,
        metavar="N|N,N,...",
        help="most saved micro-batches, for all ranks or each (default: the smallest kept by all)",
    )
    add(
        "--buffers-stay",
        action="store_true",
        help="where an order is chosen for --bound: host buffers count all the time, as in a training",
    )
    add(
        "--partners",
        type=numbers,
        metavar="N,N,...",
        help="for each rank the one that hosts for it (default: fullest with emptiest)",
    )
    add("--hosts", choices=ARRANGEMENTS, help=f"where what leaves goes: {HOSTS_SAID}")
    add(
        "--after-input",
        "--kept",
        type=share,
        metavar="W",
        help="share of a micro-batch held between the halves of its backward, I and W (default: the file's, or 1)",
    )
    shortest.add_arguments(parser)
    add(
        "--format",
        choices=FORMATS,
        help="default: by the output file's name, else grid; runtime: csv with torch's messages",
    )
    add(
        "--messages",
        action="store_true",
        help="print what every rank does, messages included, as text or with --format json",
    )
    add(
        "--exchange",
        choices=tuple(one.value for one in Exchange),
        help="with --messages: when ranks send and receive (default: as the schedule is run)",
    )
    add("--output", metavar="FILE", help="write there instead of to standard output")


def _schedule(options: argparse.Namespace) -> None:
    output = None if options.output is None else Path(options.output)
    form = options.format or _format_of(output)
    _refuse_unused(options, form)
    shortest.check(options)
    schedule = shortest.changed(_generated(options) if options.input is None else _imported(options), options)
    if options.messages:
        content = _listed(
            schedule, form, Exchange(options.exchange) if options.exchange else exchange_of(schedule.name)
        ).encode()
    else:
        content = _written(
            schedule, form, (options.costs, options.hop), to_terminal=output is None and sys.stdout.isatty()
        )
    if output is not None:
        output.write_bytes(content)
        return
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def _refuse_unused(options: argparse.Namespace, form: str) -> None:
    """Raises ValueError for a flag that says how to do what is not asked for."""
    if options.exchange is not None and not options.messages:
        raise ValueError("--exchange says when messages pass: give --messages, too, or leave it out")
    if options.messages and (form not in ("grid", "json") or options.format == "grid"):
        own = "runtime writes torch's messages itself" if form == "runtime" else f"a {form} has no room for messages"
        raise ValueError(f"--messages is written as text, or with --format json: {own}, leave one of them out")
    said = next((name for name in ("bound", "partners", "hosts") if getattr(options, name)), None)
    if options.balance == "none" and said:
        raise ValueError(f"--{said} says how to balance: give --balance bpipe, too, or leave it out")


def _format_of(output: Path | None) -> str:
    """What a file of this name is to hold."""
    suffix = "" if output is None else output.suffix.removeprefix(".").lower()
    if suffix in ("", "txt"):
        return "grid"
    if suffix not in SUFFIXES:
        raise ValueError(
            f"--output {output}: .{suffix} is not written, only {', '.join(SUFFIXES)}: end the name so, or say --format"
        )
    return suffix


def _generated(options: argparse.Namespace) -> Schedule:
    missing = [f"--{name}" for name in ("schedule", "stages", "microbatches") if getattr(options, name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing: say what to generate, or read a schedule with --input")
    if options.align:
        raise ValueError("--align is for a schedule read with --input: what is generated is aligned")
    if options.early:
        options.schedule = _early(options.schedule)
    config = ScheduleConfig(
        options.schedule,
        options.stages,
        options.microbatches,
        options.chunks or FAMILIES[options.schedule].min_chunks,
        named_balance(options.balance, options.bound, options.partners, options.buffers_stay, options.hosts),
        _group_of(options),
        vocabulary=Vocabulary(options.vocabulary or Vocabulary.WHOLE),
        input_shards=options.input_shards,
        costs=unit_costs(options.costs, options.hop),
        delay=options.delay or 0,
        after_input=Fraction(1) if options.after_input is None else options.after_input,
    )
    if options.buffers_stay and config.limit is None:
        raise ValueError(
            "--buffers-stay is for orders that are chosen for a bound: give --bound N and no group, or leave it out"
        )
    return build(config)


def _early(name: str) -> str:
    """Return the family that is this one with early forwarding."""
    found = FAMILIES[name].early
    if found is None:
        raise ValueError(
            f"--early: {name} has no early forwarding: leave it out, or choose from {families_with_early_forwarding()}"
        )
    return found


def _group_of(options: argparse.Namespace) -> int | None:
    """None where it is chosen, or the schedule's usual one."""
    if options.group != AUTO:
        size: int | None = options.group
        return size
    if FAMILIES[options.schedule].within is None:
        raise ValueError(
            f"--group auto: {options.schedule} makes no orders for a bound: give a number, or choose "
            f"{families_for_bounds()}"
        )
    if options.bound is None or len(set(options.bound)) > 1:
        raise ValueError("--group auto is chosen for a bound: give --balance bpipe and --bound N, one for all ranks")
    if options.partners is not None:
        raise ValueError("--group auto is made for opposite ranks as partners: leave --partners out, or give a group")
    return None


def _imported(options: argparse.Namespace) -> Schedule:
    for name in (
        "schedule",
        "stages",
        "microbatches",
        "chunks",
        "group",
        "delay",
        "vocabulary",
        "input_shards",
        "hop",
        "buffers_stay",
        "early",
    ):
        if getattr(options, name) not in (None, False):
            raise ValueError(
                f"--{name.replace('_', '-')} is for generating, --input reads a schedule: give one of them"
            )
    schedule = read_file(options.input)
    try:
        if options.after_input is not None:
            schedule = with_after_input(schedule, options.after_input)
        how = named_balance(options.balance, options.bound, options.partners, hosts=options.hosts)
        return adopt(align(schedule) if options.align else schedule, how)
    except ValueError as error:
        raise ValueError(f"{source_of(options.input)}: {error}") from None


def _written(schedule: Schedule, form: str, given: Times, to_terminal: bool) -> bytes:
    if form == "csv":
        return write_csv(schedule).encode()
    if form == "runtime":
        return write_runtime(schedule).encode()
    if form == "json":
        return write_json(schedule, times_of(schedule, *given)).encode()
    if form == "svg":
        from bpipe.draw.svg import write_svg

        return write_svg(schedule).encode()
    if form == "png":
        if to_terminal:
            raise ValueError("a png is not for the terminal: name a file with --output")
        from bpipe.draw.png import write_png

        return write_png(schedule)
    width = shutil.get_terminal_size().columns if to_terminal else None
    use_colour = to_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return (write_grid(schedule, width, _paint if use_colour else None) + _remarks(schedule, given)).encode()


def _listed(schedule: Schedule, form: str, exchange: Exchange) -> str:
    """What every rank does. The exchange may be one that nobody runs the schedule with: where that blocks, it is
    said beside it."""
    programs = lower_as_run(schedule, exchange)
    for one in blocked_ranks(schedule, WaitLevel.ASYNCHRONOUS, exchange):
        place = (
            f"rank {one.rank}, slot {one.slot}: waits for ever for {one.message}, the other end is on rank {one.peer}"
        )
        print(f"bpipe: with --exchange {exchange.value} {place}", file=sys.stderr)
    return (write_listing_json if form == "json" else write_listing)(programs, exchange)


def _paint(text: str, action: Action | None) -> str:
    return text if action is None else f"\x1b[{_COLOURS.get(action.kind, '0')}m{text}\x1b[0m"


def _remarks(schedule: Schedule, given: Times) -> str:
    """What the grid shows, in numbers, as lines its reader passes over; how long it takes where its slots do not say
    that."""
    evictions = ",".join(str(num_transfers(schedule, rank).evictions) for rank in range(schedule.num_ranks))
    remark = f"# peak={','.join(str(plain(peak)) for peak in peak_counts(schedule))} evictions={evictions}"
    if uses_host_memory(schedule.hosts):
        remark += f" own_memory={','.join(str(num_host_memory_buffers(schedule, rank)) for rank in range(schedule.num_ranks))}"
    found = times_of(schedule, *given) if any(given) or schedule.split_stages else None
    return remark + (f" makespan={found['makespan']} bubble_percent={found['bubble_percent']}\n" if found else "\n")
