"""The `bpipe` command.

Sub-commands are modules of `bpipe.commands`, imported when they are called: each has `COMMAND`, its flags, and `run`.
"""

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bpipe import __version__
from bpipe.config.flags.flag import Command, Parser, options_of
from bpipe.extras import require
from bpipe.values import printable

# Each is a module of that name in bpipe.commands, with underscores.
COMMANDS = {
    "schedule": "generate or read a schedule, balance it, check it, and print or draw it",
    "simulate": "predict one configuration's time, bubble and memory per stage",
    "plan": "search a model's configurations on a cluster, and tell whether balancing helps",
    "fit": "list what would make a launch fit in memory, with the savings and cost of each change",
    "trace": "build a launch's stages at true size without a GPU, and show what they hold",
    "profile": "time one stage of a model on this machine's device",
    "capture": "run a training script with stand-ins for launchers, and print what it would launch",
    "check-launch": "tell whether a launch is supported, guarded or refused, and why",
    "report": "compare a recorded run with its prediction",
    "compare": "compare two runs of one training: whether they compute the same, and how their times differ",
}
# Commands that need no package, or check the packages that they need.
_PLAIN = ("schedule", "profile", "capture", "report", "compare")

# By error of a file, the problem and the remedy.
_OF_FILES = {
    errno.ENOENT: ("there is no such file", "check the name"),
    errno.EISDIR: ("this is a folder", "name a file"),
    errno.ENOTDIR: ("part of its path is not a folder", "check the name"),
    errno.EACCES: ("you have no permission to read or write it", "name another file, or change the permissions"),
    errno.ENOSPC: ("the disk is full", "name a file on another disk, or free some space"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 or its own exit status, 2 after one message on stderr, 130 if interrupted."""
    if sys.stdout is None:
        # Standard output is closed: writing has to fail as on any other output that takes nothing.
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:
        # The reader has closed the pipe.
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
    parser, commands = parsers(arguments[0] if arguments else None)
    if not arguments:
        parser.print_help()
        return 0
    try:
        if arguments[0] in commands:
            commands[arguments[0]].check_flags(arguments[1:])
        options = options_of(parser, arguments)
        if options.command not in _PLAIN:
            require("", f"bpipe {options.command}")
        status: int | None = importlib.import_module(_module_of(options.command)).run(options)
    except SystemExit:
        # The parser has written help.
        sys.stdout.flush()
        raise
    # Output that cannot be written has to fail here, not when Python ends.
    sys.stdout.flush()
    return status or 0


def _in_words(error: ValueError | OSError) -> str:
    """Write an error: for a file its name, the problem and the remedy, otherwise the message."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    path = Path(os.fsdecode(error.filename))
    if error.errno == errno.ENOENT and not path.parent.is_dir():
        return f"{path}: there is no folder {path.parent}: create it, or check the name"
    wrong, remedy = _OF_FILES.get(
        error.errno or 0, (str(error.strerror).lower(), "check the name, and what kind of file it is")
    )
    return f"{path}: {wrong}: {remedy}"


def _drop_output() -> None:
    """Write the buffered output or drop it: Python would try again at its end and print an error."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _module_of(name: str) -> str:
    return f"bpipe.commands.{name.replace('-', '_')}"


def command_of(name: str) -> Command:
    """Return the flags of a sub-command."""
    command: Command = importlib.import_module(_module_of(name)).COMMAND
    return command


def parsers(called: str | None) -> tuple[Parser, dict[str, Parser]]:
    """Return the command's parser and those of its sub-commands, of which only the `called` one is complete."""
    parser = Parser(
        prog="bpipe",
        description="Generate pipeline schedules, predict their time and memory, and examine training runs.",
    )
    parser.add_argument("--version", action="version", version=f"bpipe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    by_name: dict[str, Parser] = {}
    for name, text in COMMANDS.items():
        description = f"{text[0].upper()}{text[1:]}."
        by_name[name] = commands.add_parser(name, help=text, description=description, add_help=False)
        if called == name:
            by_name[name].declare(command_of(name))
    return parser, by_name
