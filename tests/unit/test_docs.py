"""The documentation builds without a warning, its links lead somewhere, its commands are the project's, and its
figures are computed."""

import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bpipe import cli
from bpipe.config.features.table import FEATURES, State
from bpipe.schedule.families.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Made from the table of flags; tests/unit/config/flags compares them.
MADE = ("flags.md", "flags_planning.md", "flags_measuring.md", "flags_training.md")

# Commands that need more than a command line, by their first words, and the test that runs each.
ELSEWHERE = {
    "bpipe capture": "tests/unit/config/launch/test_capture.py",
    "bpipe compare": "tests/unit/commands/test_compare.py",
    "bpipe profile": "tests/unit/commands",
    "bpipe report": "tests/unit/commands/test_compare.py",
    "torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py": "tests/unit/test_docs.py",
    "torchrun --nproc-per-node 8 pretrain_gpt.py": "tests/gloo/test_training.py",
    "torchrun --nproc-per-node 8 -m megatron.scheduling.launch": "tests/gloo/test_launch.py",
    "torchrun --nproc-per-node 4 -m torchtitan.train": "tests/gloo/test_titan.py",
    "python scripts/gpu_check.py": "tests/scripts/test_gpu_script.py",
    "python -m terra audit": "terra/tests/test_script.py",
}

# A block that shows a file begins with its name as a comment.
FILE = re.compile(r"# ([\w.]+\.(?:sh|toml|py))\n")


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of a page's code blocks: continued lines joined, comments and output left out."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if FILE.match(block):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(bpipe|python|torchrun) [\w-]", line):
                yield " ".join(line.split("   #")[0].split())


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
        # The script's own test runs it; here only its flags are checked.
        printed = subprocess.run(
            [sys.executable, ROOT / arguments[0], "--help"], capture_output=True, text=True, timeout=50, check=True
        ).stdout
        for flag in re.findall(r" (--[\w-]+)", command):
            assert flag in printed, f"{arguments[0]} knows no {flag}"
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


def test_the_page_on_pipelining_quotes_the_toy() -> None:
    """tests/gloo/test_examples.py runs it."""
    toy = (ROOT / "examples/toy.py").read_text()
    page = (ROOT / "docs/pipelining.md").read_text().partition("## A loop of your own\n")[2]
    quoted = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(quoted) == 3
    for block in quoted:
        assert block in toy, f"examples/toy.py does not read\n{block}"


def test_the_page_on_torchs_pipelining_quotes_the_example() -> None:
    """tests/gloo/test_examples.py runs it."""
    example = (ROOT / "examples/pipelining.py").read_text()
    page = (ROOT / "docs/pipelining.md").read_text().partition("## A loop of your own\n")[0]
    quoted = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(quoted) == 3
    assert all(block in example for block in quoted)
    assert len(example.splitlines()) < 100


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build_it = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    ended = subprocess.run(build_it, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    python = (tmp_path / "site/python/index.html").read_text()
    documented = re.findall(r"^::: (.*)$", (ROOT / "docs/python.md").read_text(), re.MULTILINE)
    assert documented
    assert all(f'id="{name}"' in python for name in documented)


def test_the_page_on_python_documents_every_entry_point_of_its_table() -> None:
    table, _, documented = (ROOT / "docs/python.md").read_text().partition("## Entry points\n")
    rows = "\n".join(line.split("|")[2] for line in table.splitlines() if line.startswith("|"))
    entries = list(dict.fromkeys(re.findall(r"`((?:bpipe|megatron)\.[\w.]+)`", rows)))
    assert documented.split() == [word for name in entries for word in (":::", name)]


def spans(page: Path) -> Iterator[str]:
    """Yield what is in single backticks."""
    yield from re.findall(
        r"`([^`\n]+)`", re.sub(r"^(`{3}).*?^`{3}", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    )


def upstream_files() -> Iterator[Path]:
    for folder in importlib.util.find_spec("megatron.core").submodule_search_locations or ():  # type: ignore[union-attr]
        yield from Path(folder).rglob("*.py")


@pytest.fixture(scope="module")
def files() -> tuple[str, ...]:
    """Every file of this project, and of the installed megatron-core, as `/a/b.py`."""
    folders = ("bpipe", "megatron", "terra", "scripts", "examples", "tests", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    top = [path for path in ROOT.iterdir() if path.is_file()]
    return tuple(f"/{path}" for path in (*(path.relative_to(ROOT) for path in (*paths, *top)), *upstream_files()))


# Examples of files in a user's commands.
ANYBODYS = ("your_script.py", "script.py", "pretrain_mamba.py", "train.py", "run.sh")
# Named because it must not exist.
NEVER = ("megatron/__init__.py",)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path, files: tuple[str, ...]) -> None:
    """Pages named `program.py` and `passes/levels.py` long after they were gone."""
    own = FILE.findall("\n".join(re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)))
    for span in spans(page):
        for name in re.findall(r"(?<![\w./<-])([\w.-]+(?:/[\w.-]+)*\.(?:py|sh))\b", span):
            name = name.removeprefix("./")
            if name in NEVER:
                assert not (ROOT / name).exists()
            elif name not in (*own, *ANYBODYS):
                assert any(path.endswith(f"/{name}") for path in files), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_of_ours_that_a_page_names_exists(page: Path) -> None:
    """Such as `bpipe.schedule.memory.memory_of`: a module, a name in it, or an attribute of that."""
    for span in spans(page):
        for name in re.findall(r"(?<![\w./-])((?:bpipe|megatron\.scheduling)(?:\.\w+)+)", span):
            if not name.endswith((".py", ".json")):
                assert exists(name), f"{page.name} names {name}"


# Names of other projects.
OTHERS = (
    "ValueError",
    "RuntimeError",
    "ColumnParallelLinear",
    "MemAvailable",
    "ConstrainDevices",
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_type_that_a_page_names_exists(page: Path, source: str) -> None:
    """Pages called types `Needs` and `Hosting` after they had become `Dependencies` and `Residency`."""
    for name in {name for span in spans(page) for name in re.findall(r"^([A-Z]\w*[a-z]\w*)(?:\(|$)", span)}:
        if any(letter.isupper() for letter in name[1:]) and name not in OTHERS:
            assert re.search(rf"^(?:class|type) {name}\b|^{name} = ", source, re.MULTILINE), f"{page.name} names {name}"


@pytest.fixture(scope="module")
def source() -> str:
    """Return the text of all our modules."""
    folders = ("bpipe", "megatron/scheduling")
    return "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))


def exists(name: str) -> bool:
    """Whether a module or an attribute has this dotted name, by its source: nothing is imported."""
    parts = name.split(".")
    folder, place = ROOT, 0
    while place < len(parts) and (folder / parts[place]).is_dir():
        folder, place = folder / parts[place], place + 1
    module = folder / f"{parts[place]}.py" if place < len(parts) else folder / "__init__.py"
    if module.exists():
        place += 1
    else:
        module = folder / "__init__.py"
    if place >= len(parts):
        return True
    return (
        module.exists()
        and re.search(
            rf"^(?:(?:async )?def |class |)(?:{parts[place]})\b|^from .* import .*\b{parts[place]}\b|\"{parts[place]}\"",
            module.read_text(),
            re.MULTILINE,
        )
        is not None
    )


def test_a_name_that_is_gone_is_missed() -> None:
    assert exists("bpipe.schedule.memory.memory_of")
    assert exists("bpipe.build")
    assert not exists("bpipe.schedule.memory.gone")
    assert not exists("bpipe.passes.levels")
    assert not exists("bpipe.program")


README = ROOT / "README.md"


def test_the_readme_begins_with_what_has_run_and_what_is_refused() -> None:
    head = README.read_text().partition("\n## ")[0]
    assert re.findall(r"^\| \*\*([\w ]+)\*\* \|", head, re.MULTILINE) == [
        "has run",
        "has not run",
        "is guarded",
        "is refused",
        "needs",
    ]
    for state in (State.GUARDED, State.REFUSED):
        (named,) = re.findall(rf"^\| \*\*is {state.value}\*\* \| (.*?): (?:at the start|never run)", head, re.MULTILINE)
        features = {feature.name.casefold() for feature in FEATURES if feature.state is state}
        names = [
            name.casefold() for name in re.sub(r" schedule", "", named).replace("the combined", "combined").split(", ")
        ]
        assert all(any(name in feature for feature in features) for name in names), (state, names)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_planner_says_of_all_schedules_what_the_readme_says_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The README's command searches two schedules; of all schedules another one is the fastest, without balancing."""
    (command,) = [command for command, _ in SHOWN[README]]
    restricted = ["--schedule", "1f1b", "interleaved-1f1b"]
    asked = command.split()[1:]
    place = asked.index(restricted[0])
    assert asked[place : place + 3] == restricted
    assert cli.main([*asked[:place], *asked[place + 3 :]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("Use bpipe without balancing: ")
    assert f'"{lines[-1]}"' in " ".join(README.read_text().split())


def test_the_readme_says_what_each_schedule_holds_and_waits(capsys: pytest.CaptureFixture[str]) -> None:
    table = dict(re.findall(r"^\| ([\w ,-]+) \| ([\d.]+ \| [\d.]+) \|$", README.read_text(), re.MULTILINE))
    options = {
        "1F1B": "--schedule 1f1b",
        "1F1B, balanced": "--schedule 1f1b --balance bpipe",
        "V-Half": "--schedule v-half --vp 2",
        "1F1B in 8 slices": "--schedule 1f1b --slices 8",
        "grouped interleaving in 4 slices, balanced": "--schedule grouped-interleaved --vp 2 --slices 4 --balance bpipe",
    }
    assert table.keys() == options.keys()
    for name, flags in options.items():
        command = [
            "schedule",
            *flags.split(),
            *["--pp", "8", "--microbatches", "32", "--costs", "1,1,1", "--format", "json"],
        ]
        assert cli.main(command) == 0
        result = json.loads(capsys.readouterr().out)
        parts = result["chunks"] * result.get("slices", 1)
        peak = max(rank["peak"] for rank in result["ranks"]) / parts
        stated_peak, stated_bubble = map(float, table[name].split(" | "))
        assert abs(peak - stated_peak) < 0.0051, name
        assert f"{result['bubble_percent']:.1f}" == f"{stated_bubble}", name


def shown(page: Path) -> list[tuple[str, str]]:
    """Return every command after a `$`, with the output that the page shows."""
    commands = []
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.replace("\\\n", " ").partition("\n")
            if command.startswith(("bpipe ", "python ")):
                commands.append((command, output))
    return commands


SHOWN = {page: examples for page in PAGES if (examples := shown(page))}


def write_files(page: Path, folder: Path) -> None:
    """Write the files that the page shows."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if match := FILE.match(block):
            (folder / match[1]).write_text(block)


def _pattern(line: str) -> str:
    if line == "...":
        return r"(?:.*\n)*?"
    return re.escape(line.removesuffix("...")) + (r".*\n" if line.endswith("...") else r"\n")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plans", [pytest.param(False, id="no plans"), pytest.param(True, id="plans", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_commands_print_what_the_page_shows(
    page: Path, plans: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in one folder with the files that the page shows. Plans search every family, so they run as slow tests.

    `...` stands for any lines, at the end of a line for its rest.
    """
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    for command, output in SHOWN[page]:
        if command.startswith("bpipe plan") and not plans:
            continue
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


OOM = ROOT / "docs/oom.md"


@pytest.mark.timeout(100)
def test_each_remedy_needs_and_takes_what_the_table_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(OOM, tmp_path)
    assert cli.main(["capture", "--output", "launch.json", "--", "bash", "run.sh"]) == 0
    capsys.readouterr()
    command = next(command for command, _ in SHOWN[OOM] if command.startswith("bpipe simulate"))
    remedies = re.findall(r"^\| ([\w ,().]+) \| (.*) \| ([\d.]+) \| ([\d.]+) \| \d \|$", OOM.read_text(), re.MULTILINE)
    assert len(remedies) >= 10
    for name, flags, gib, seconds in remedies:
        assert cli.main([*shlex.split(command)[1:], *shlex.split(flags.strip("`")), "--format", "json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert f"{max(stage['peak_bytes'] for stage in result['stages']) / 2**30:.1f}" == gib, name
        assert f"{result['iteration_time_s']:.1f}" == seconds, name


def test_there_are_commands_with_their_output() -> None:
    assert sum(map(len, SHOWN.values())) >= 9


def test_a_family_of_ones_own_is_one_short_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an entry in the table, all commands accept it."""
    page = ROOT / "docs/schedules.md"
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
