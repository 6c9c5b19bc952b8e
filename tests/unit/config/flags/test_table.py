"""The table of flags: help, parsers and reference pages agree with it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bpipe.cli import COMMANDS, command_of, main, parsers
from bpipe.config.flags.flag import Flag, first_screen
from bpipe.config.flags.trainer import TRAINER, words
from bpipe.reference import pages
from megatron.scheduling.options.flags import add_arguments

ROOT = Path(__file__).resolve().parents[4]
# Lines and columns of a terminal of usual size.
LINES, COLUMNS = 50, 100


def rows() -> list[tuple[str, Flag]]:
    return [(name, flag) for name in COMMANDS for flag in command_of(name).flags]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen_by_task_and_the_rest_is_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(name)
    lines = first_screen(parsers(name)[1][name], command, COLUMNS)
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= max(COLUMNS, *(len(task.example) + 2 for task in command.tasks))
    for flag, text in (("--help", lines[0]), ("--help-all", "--help-all")):
        with pytest.raises(SystemExit, match="0"):
            main([name, flag])
        assert text.split()[0] in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help-all"])
    help_text = capsys.readouterr().out
    assert [flag.field for flag in command.flags if flag.name not in help_text] == []


def test_the_trainer_s_parser_has_every_row_of_its_table() -> None:
    actions = {action.dest: action for action in add_arguments(argparse.ArgumentParser(add_help=False))._actions}
    flags = [flag.of_launch for group in TRAINER for flag in group.flags]
    assert [flag.field for flag in flags] == list(actions)
    for flag in flags:
        action = actions[flag.field]
        assert action.option_strings == [flag.names]
        assert action.default == flag.default
        assert action.choices == flag.choices


def test_words_come_back_as_values() -> None:
    values = {
        "tensor": 4,
        "bpipe": True,
        "bound": "4,2",
        "recompute_modules": ("mlp", "moe"),
        "swiglu": False,
        "group_size": None,
    }
    written = words(values)
    assert written == ("--tensor-model-parallel-size 4 --bpipe --bpipe-bound 4,2 --recompute-modules mlp moe").split()
    with pytest.raises(KeyError):
        words({"no_such_field": 1})


@pytest.mark.parametrize("name", pages())
def test_the_reference_is_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == pages()[name], "write it anew: python -m bpipe.reference docs"
