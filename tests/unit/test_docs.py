"""The documentation builds without a warning, its links lead somewhere, its commands are the project's, and its
figures are computed."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bpipe import cli
from bpipe.generate.families import FAMILIES
from bpipe.refusals import REFUSALS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Made of the table of flags, whose examples tests/unit/flags parses.
MADE = ("flags.md", "flags_training.md")

# What is run by another test, because it needs more than a command line: by the words it begins with, the test that
# runs it.
ELSEWHERE = {
    "bpipe calibrate train.log": "tests/unit/plan/test_calibrate.py",
    "bpipe compare": "tests/unit/commands/test_compare.py",
    "bpipe profile": "tests/unit/commands",
    "bpipe schedule --schedule 1f1b-split --pp 4 --microbatches 8 --optimal": "tests/unit/test_shortest.py",
    "bpipe report": "tests/unit/commands/test_report.py",
    "torchrun --nproc-per-node 8 pretrain_gpt.py": "tests/gloo/test_training.py",
    "torchrun --nproc-per-node 8 -m megatron.scheduling.launch": "tests/gloo/test_launch.py",
    "python scripts/data/preprocess_data.py": "tests/scripts/test_preprocess_data.py",
    "python scripts/gpu_check.py": "tests/scripts/test_gpu_check.py",
    "python scripts/validation/validate.py": "tests/scripts/test_validate.py",
    "python -m terra audit": "tests/unit/terra/test_script.py",
}

# A block that shows a file begins with a comment of its name.
FILE = re.compile(r"# ([\w.]+\.(?:sh|toml|py))\n")


def commands(page: Path) -> Iterator[str]:
    """Every command of the page's code blocks, continued lines joined, comments and what it prints left out."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if FILE.match(block):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(bpipe|python|torchrun) [\w-]", line):
                yield " ".join(line.split("   #")[0].split())


def test_the_glossary_has_one_sentence_a_word() -> None:
    rows = [
        line.split(" | ") for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")
    ][1:]
    words = [row[0].removeprefix("| ") for row in rows]
    assert {"slot", "host buffer", "bound", "evict", "host", "place", "poison"} <= set(words)
    assert len(set(words)) == len(words)
    for _, meaning in rows:
        assert re.fullmatch(r"[A-Z][^.]*\. \|", meaning), f"not one sentence: {meaning}"


def test_a_slot_is_a_column_of_the_grid_and_nothing_else() -> None:
    """The grid has slots and a rank lends host buffers: the documentation called both slots, in one sentence at
    times."""
    called = r"(?i)[^.|]*(?:host slot|slots (?:for|of) (?:its|the) partner|pinned slot|preallocated slot)[^.|]*"
    for page in PAGES:
        lent = re.findall(called, page.read_text())
        assert not lent, f"{page.name}: {lent}"


COMMANDS = sorted({command for page in PAGES if page.name not in MADE for command in commands(page)})


# A plan searches every family of schedules, here for tens of seconds.
PLANS = [command for command in COMMANDS if command.startswith("bpipe plan")]
TRIED = [
    *(command for command in COMMANDS if command not in PLANS),
    *(pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", TRIED)
def test_every_command_runs(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = next((test for words, test in ELSEWHERE.items() if command.startswith(words)), None)
    if test is not None:
        assert (ROOT / test).exists()
        return
    program, *arguments = command.split()
    if program == "python":
        # A script's own test runs it; here that it is there and takes these flags.
        said = subprocess.run(
            [sys.executable, ROOT / arguments[0], "--help"], capture_output=True, text=True, timeout=50, check=True
        ).stdout
        for flag in re.findall(r" (--[\w-]+)", command):
            assert flag in said, f"{arguments[0]} knows no {flag}"
        return
    assert program == "bpipe", f"nobody runs {command!r}"
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_on_loops_quotes_the_toy() -> None:
    """tests/gloo/test_examples.py runs it."""
    toy = (ROOT / "examples/toy.py").read_text()
    quoted = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/own_loop.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(quoted) == 3
    for block in quoted:
        assert block in toy, f"examples/toy.py does not read\n{block}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build_it = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    ended = subprocess.run(build_it, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "site/megatron/index.html").exists()


README = ROOT / "README.md"


def test_the_readme_is_one_screen() -> None:
    """It had grown to 2,000 words, and whether it is safe and how to switch it on stood between measurements."""
    assert len(README.read_text().split()) <= 600


def test_the_readme_begins_with_what_has_run_and_what_is_refused() -> None:
    head = README.read_text().partition("\n## ")[0]
    assert re.findall(r"^\| \*\*([\w ]+)\*\* \|", head, re.MULTILINE) == [
        "has run",
        "has not run",
        "is refused",
        "needs",
    ]
    (refused,) = re.findall(r"^\| \*\*is refused\*\* \| (.*?): at the start", head, re.MULTILINE)
    features = {refusal.feature.casefold() for refusal in REFUSALS}
    for name in re.sub(r" \(.*?\)|the | schedule", "", refused).split(", "):
        assert any(name.casefold() in feature for feature in features), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_planner_says_of_all_schedules_what_the_readme_says_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Its command ended with "Balancing does not help here", above a picture of balancing winning."""
    (command,) = [command for command, _ in SHOWN[README]]
    restricted = ["--schedule", "1f1b", "interleaved-1f1b"]
    asked = command.split()[1:]
    place = asked.index(restricted[0])
    assert asked[place : place + 3] == restricted
    assert cli.main([*asked[:place], *asked[place + 3 :]]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("Balancing does not help here")
    assert "Balancing does not help here" in README.read_text()
    first = next(line for line in said.splitlines() if line.startswith("  1. "))
    assert "balanced" not in first
    assert float(first.split()[1]) < 31.424


def shown(page: Path) -> list[tuple[str, str]]:
    """Every command that stands behind a `$`, with what the page says that it prints."""
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.replace("\\\n", " ").partition("\n")
            if command.startswith(("bpipe ", "python ")):
                found.append((command, output))
    return found


SHOWN = {page: found for page in PAGES if (found := shown(page))}


def write_files(page: Path, folder: Path) -> None:
    """Those that the page shows."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if match := FILE.match(block):
            (folder / match[1]).write_text(block)


def _pattern(line: str) -> str:
    if line == "...":
        return r"(?:.*\n)*?"
    return re.escape(line.removesuffix("...")) + (r".*\n" if line.endswith("...") else r"\n")


# A page may search every family of schedules twice.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_commands_print_what_the_page_shows(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, in one folder.

    `...` stands for any lines, at the end of one for its rest. Files that the page shows are there.
    """
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    for command, output in SHOWN[page]:
        program, *arguments = shlex.split(command)
        if program == "python":
            path = f"{ROOT}:{tmp_path}"
            ended = subprocess.run(
                [sys.executable, *arguments],
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=50,
                check=False,
            )
            assert ended.returncode == 0, ended.stdout + ended.stderr
            printed = ended.stdout
        else:
            assert cli.main(arguments) == 0
            printed = capsys.readouterr().out
        pattern = "".join(map(_pattern, output.splitlines()))
        assert re.fullmatch(pattern, printed), f"{page.name} shows\n{output}\nwhere {command} prints\n{printed}"


def test_there_are_commands_with_their_output() -> None:
    assert sum(map(len, SHOWN.values())) >= 9


def test_a_family_of_ones_own_is_one_short_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an entry in the table is all that the command asks for."""
    page = ROOT / "docs/write_a_schedule.md"
    write_files(page, tmp_path)
    assert len((tmp_path / "eager.py").read_text().splitlines()) <= 60
    monkeypatch.syspath_prepend(tmp_path)
    family = importlib.import_module("eager").FAMILY
    monkeypatch.delitem(sys.modules, "eager")
    monkeypatch.setitem(FAMILIES, family.name, family)
    assert cli.main(["schedule", "--schedule", family.name, "--pp", "4", "--microbatches", "8"]) == 0
    grid = capsys.readouterr().out.partition("# peak")[0]
    assert f"$ python look.py\n{grid}```" in page.read_text()
    sizes = [*("--model", "gpt3-13b", "--cluster", "a100-80g:1x8", "--pp", "8"), "--gbs", "64"]
    assert cli.main(["simulate", *sizes, "--schedule", family.name, "--balance", "bpipe"]) == 0
    assert family.name in capsys.readouterr().out
