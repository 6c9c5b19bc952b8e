"""The `bpipe` command. In: command line arguments, a schedule file. Out: a schedule as grid, CSV, JSON or picture, or one line of error.

Knows no schedule and no format itself: `program` builds, `ir` writes, `draw` draws. Imports nothing heavy, and what draws only to
draw. The other sub-commands are files of `bpipe.commands`, imported when they are called.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from bpipe.generate.registry import GENERATORS
from bpipe.ir.action import Action, Kind
from bpipe.ir.document import read_json, write_json
from bpipe.ir.grid import read_grid, write_grid
from bpipe.ir.schedule import Schedule
from bpipe.ir.text import TextError, read_csv, write_csv
from bpipe.passes.align import align
from bpipe.program import BALANCES, ProgramConfig, adopt, build
from bpipe.simulate.memory import num_transfers, peak_counts

FORMATS = ("grid", "csv", "json", "svg", "png")

# Each is a module of that name in bpipe.commands.
COMMANDS = {
    "simulate": "predict one configuration's time, bubble and memory per stage",
    "plan": "search a model's configurations on a cluster, and say whether balancing helps",
    "estimate": "estimate what a micro-batch size gains from stage MFUs alone",
    "profile": "time one stage of a model on this machine's device",
    "report": "lay a recorded run beside its prediction",
}

_COLOURS = {
    Kind.FORWARD: "34",
    Kind.BACKWARD: "32",
    Kind.BACKWARD_INPUT: "32",
    Kind.BACKWARD_WEIGHT: "36",
    Kind.EVICT: "31",
    Kind.HOST: "33",
    Kind.RETURN: "33",
    Kind.LOAD: "35",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 2 with one message on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(arguments[0] if arguments else None)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except BrokenPipeError:
        # The reader has seen enough. Python would complain once more while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"bpipe: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser(called: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bpipe", description="Look at pipeline schedules and what they cost before they run.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, allow_abbrev=False, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == called:
            module = importlib.import_module(f"bpipe.commands.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    schedule = commands.add_parser(
        "schedule",
        allow_abbrev=False,
        help="generate or read a schedule, balance it, check it, and print or draw it",
        description="Generate or read a schedule, balance it, check it, and print or draw it.",
    )
    schedule.set_defaults(run=_schedule)
    add = schedule.add_argument
    add("--schedule", choices=tuple(GENERATORS), help="what to generate")
    add("--stages", type=int, metavar="P", help="pipeline ranks")
    add("--microbatches", type=int, metavar="M", help="micro-batches an iteration")
    add("--chunks", type=int, default=1, metavar="V", help="model chunks a rank (default 1)")
    add("--input", metavar="FILE", help="read the schedule from a CSV, JSON or grid file instead ('-' is standard input)")
    add("--align", action="store_true", help="with --input: place each rank's order anew on the unit grid")
    add("--balance", choices=BALANCES, default="none", help="none, or bpipe: keep every rank within its bound (default none)")
    add("--bound", type=_numbers, metavar="N|N,N,...", help="most saved micro-batches, for all ranks or each (default: the schedule's own)")
    add("--partners", type=_numbers, metavar="N,N,...", help="for each rank the one that hosts for it (default: p-1,...,1,0)")
    add("--format", choices=FORMATS, help="default: by the output file's name, else grid")
    add("--output", metavar="FILE", help="write there instead of to standard output")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number and no list of numbers such as 3,3,2,1")
    return tuple(int(number) for number in text.split(","))


def _schedule(options: argparse.Namespace) -> None:
    output = None if options.output is None else Path(options.output)
    suffix = "" if output is None else output.suffix.removeprefix(".")
    form = options.format or (suffix if suffix in FORMATS else "grid")
    schedule = _generated(options) if options.input is None else _imported(options)
    content = _written(schedule, form, to_terminal=output is None and sys.stdout.isatty())
    if output is not None:
        output.write_bytes(content)
        return
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def _generated(options: argparse.Namespace) -> Schedule:
    missing = [f"--{name}" for name in ("schedule", "stages", "microbatches") if getattr(options, name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing: say what to generate, or read a schedule with --input")
    if options.align:
        raise ValueError("--align is for a schedule read with --input: what is generated is aligned")
    return build(
        ProgramConfig(
            options.schedule, options.stages, options.microbatches, options.chunks, options.balance, options.bound, options.partners
        )
    )


def _imported(options: argparse.Namespace) -> Schedule:
    for name in ("schedule", "stages", "microbatches"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} is for generating, --input reads a schedule: give one of them")
    source = "standard input" if options.input == "-" else options.input
    try:
        data = sys.stdin.buffer.read() if options.input == "-" else Path(options.input).read_bytes()
        schedule = read(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TextError(f"{source}: byte {error.start} is no UTF-8 text") from None
    except TextError as error:
        raise TextError(f"{source}: {error}") from None
    try:
        return adopt(align(schedule) if options.align else schedule, options.balance, options.bound, options.partners)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def read(text: str) -> Schedule:
    """A schedule from any of the text formats, told apart by how they begin."""
    if text.lstrip(" \n\r\t").startswith("{"):
        return read_json(text)
    first, _, rest = text.partition("\n")
    if first.startswith("#") and rest.startswith("slot"):
        return read_grid(text)
    return read_csv(text)


def _written(schedule: Schedule, form: str, to_terminal: bool) -> bytes:
    if form == "csv":
        return write_csv(schedule).encode()
    if form == "json":
        return write_json(schedule).encode()
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
    return (write_grid(schedule, width, _paint if use_colour else None) + _remarks(schedule)).encode()


def _paint(text: str, action: Action | None) -> str:
    return text if action is None else f"\x1b[{_COLOURS.get(action.kind, '0')}m{text}\x1b[0m"


def _remarks(schedule: Schedule) -> str:
    """What the grid shows, in numbers, as lines its reader passes over."""
    evictions = ",".join(str(num_transfers(schedule, rank).evictions) for rank in range(schedule.num_ranks))
    return f"# peak={','.join(map(str, peak_counts(schedule)))} evictions={evictions}\n"
