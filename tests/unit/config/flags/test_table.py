"""The table of flags: one meaning a name, everything made of it, and pages that are current."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from bpipe.cli import ALL, COMMANDS, SHELLS, command_of, main, parsers
from bpipe.config.flags.flag import Flag
from bpipe.config.flags.launches import READ, words
from bpipe.config.flags.parser import first_screen
from bpipe.config.flags.trainer import TRAINER
from bpipe.reference import pages
from megatron.scheduling.options.flags import add_arguments

ROOT = Path(__file__).resolve().parents[4]
# Lines and columns of a terminal that nobody made larger on purpose.
LINES, COLUMNS = 50, 100


def rows() -> list[tuple[str, Flag]]:
    return [(name, flag) for name in COMMANDS for flag in command_of(name).flags]


def test_a_name_has_one_field_in_all_commands() -> None:
    """`--vocabulary` was tokens in one command and shards in another, `--layers` a list and a number, `--memory` GiB
    and micro-batches."""
    fields = defaultdict(set)
    for _, flag in rows():
        for name in flag.names.split():
            fields[name].add(flag.field)
    assert {name: found for name, found in fields.items() if len(found) > 1} == {}


def test_what_is_written_is_called_alike_everywhere() -> None:
    """`--plot` wrote a page in one command and `--html` in another, `--json` a file where others had `--format
    json`."""
    said = defaultdict(set)
    for _, flag in rows():
        if flag.name in ("--output", "--plot", "--html", "--trace"):
            said[flag.name].add(flag.help)
    assert {name: len(texts) for name, texts in said.items()} == dict.fromkeys(
        ("--output", "--plot", "--html", "--trace"), 1
    )


def test_the_trainer_calls_what_it_shares_with_a_command_alike() -> None:
    """With its prefix; Megatron's own names are Megatron's."""
    shared = [flag for group in TRAINER for flag in group.flags if flag.names]
    assert len(shared) > 10
    for flag in shared:
        assert flag.in_launch == f"--bpipe-{flag.name.removeprefix('--').removeprefix('bpipe-')}"


def test_the_aliases_are_those_that_users_of_megatron_say() -> None:
    aliases = {flag.name: flag.names.split()[0] for _, flag in rows() if len(flag.names.split()) > 1}
    assert aliases == {
        "--tp": "--tensor-model-parallel-size",
        "--pp": "--pipeline-model-parallel-size",
        "--vp": "--num-virtual-stages-per-pipeline-rank",
        "--cp": "--context-parallel-size",
        "--ep": "--expert-model-parallel-size",
        "--etp": "--expert-tensor-parallel-size",
        "--mbs": "--micro-batch-size",
        "--gbs": "--global-batch-size",
        "--seq": "--seq-length",
    }
    assert set(aliases.values()) <= set(READ)


def test_an_alias_and_the_name_are_one_flag(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for names in (("--pp", "--vp"), ("--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank")):
        assert (
            main(["schedule", "--schedule", "interleaved-1f1b", names[0], "2", "--microbatches", "4", names[1], "2"])
            == 0
        )
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]


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
    every = capsys.readouterr().out
    assert [flag.field for flag in command.flags if flag.name not in every] == []


@pytest.mark.parametrize(
    ("name", "example"), [(name, task.example) for name in COMMANDS for task in command_of(name).tasks]
)
def test_an_example_of_help_is_a_command(name: str, example: str) -> None:
    program, command, *arguments = shlex.split(example)
    assert (program, command) == ("bpipe", name)
    parsers(name)[0].parse_args([command, *arguments])


def test_every_flag_of_a_task_is_the_command_s() -> None:
    for name in COMMANDS:
        command = command_of(name)
        fields = [flag.field for flag in command.flags]
        assert len(set(fields)) == len(fields), name
        assert {field for task in command.tasks for field in task.fields} <= set(fields), name


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
        "group": None,
    }
    written = words(values)
    assert written == [
        "--tensor-model-parallel-size",
        "4",
        "--bpipe",
        "--bpipe-bound",
        "4,2",
        "--recompute-modules",
        "mlp",
        "moe",
    ]
    with pytest.raises(KeyError):
        words({"no_such_field": 1})


@pytest.mark.parametrize("name", pages())
def test_the_reference_is_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == pages()[name], "write it anew: python -m bpipe.reference docs"


def test_completion_without_its_package_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "shtab" else found(name, *more)
    )
    assert main(["--completion", "bash"]) == 2
    assert 'shtab, which is not installed: pip install -e ".[completion]"' in capsys.readouterr().err


def test_completion_is_of_every_command_and_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("shtab")
    for shell in SHELLS:
        assert main(["--completion", shell]) == 0
        script = capsys.readouterr().out
        for _, flag in rows():
            assert not flag.names or flag.names.split()[0] in script, (shell, flag.field)


def test_bash_completes_a_flag_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["--completion", "bash"]) == 0
    script = tmp_path / "bpipe.bash"
    script.write_text(capsys.readouterr().out)
    for typed, completed in (
        (("plan", "--glob"), "--global-batch-size"),
        (("simu",), "simulate"),
        (("schedule", "--schedule", "zb-"), "zb-h1"),
    ):
        ask = f'source {script}; COMP_WORDS=(bpipe {" ".join(typed)}); COMP_CWORD={len(typed)}; _shtab_bpipe; echo "${{COMPREPLY[@]}}"'
        ended = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=30, check=False)
        assert completed in ended.stdout.split(), ended


def test_all_parsers_are_complete_where_all_are_asked_for() -> None:
    found = parsers(ALL)[1]
    for name, flag in rows():
        assert flag.field in {action.dest for action in found[name]._actions}


def test_the_pages_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "bpipe.reference", tmp_path], check=True, timeout=60, cwd=ROOT)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(pages())


def test_every_command_has_its_place_in_the_reference() -> None:
    shown = [line.removeprefix("## bpipe ") for text in pages().values() for line in text.splitlines()]
    assert sorted(name for name in shown if name in COMMANDS) == sorted(COMMANDS)
