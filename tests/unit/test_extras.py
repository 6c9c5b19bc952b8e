"""bpipe/extras.py, and what runs without any package: a bare Python, without site-packages, stands for the plain
installation."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bpipe
from bpipe import extras

ROOT = Path(bpipe.__file__).parents[1]
# -S: no site-packages. -I: nothing of the environment's variables or the current folder.
BARE = (sys.executable, "-I", "-S", "-c")
FIND = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
MODEL = ("--model", "gpt3-13b", "--cluster", "a100-80g:1x8", "--gbs", "64")


def bare(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BARE, FIND + program], capture_output=True, text=True, timeout=50, cwd=folder, check=False)


def called(*arguments: str) -> str:
    return f"from bpipe.cli import main; sys.exit(main({list(arguments)!r}))"


def launched(module: str, *arguments: str) -> str:
    return (
        f"import runpy; sys.argv = ['', *{list(arguments)!r}]; runpy.run_module({module!r}, run_name='__main__', "
        f"alter_sys=True)"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("schedule", "--schedule", "1f1b", "--pp", "4", "--microbatches", "8", "--balance", "bpipe"),
            "# peak=3,3,2,3",
        ),
        (("schedule", "--schedule", "1f1b", "--pp", "4", "--microbatches", "8", "--format", "svg"), "<svg"),
    ],
    ids=["schedule", "svg"],
)
def test_command_runs_without_any_package(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    ended = bare(called(*arguments), tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert words in ended.stdout


def test_report_and_compare_load_without_any_package(tmp_path: Path) -> None:
    modules = ("simulate", "plan", "profile", "report", "compare")
    ended = bare(
        f"import importlib; [importlib.import_module('bpipe.commands.' + name) for name in {modules!r}]", tmp_path
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("program", "needs", "extra"),
    [
        (called("simulate", *MODEL, "--pp", "8"), "bpipe simulate needs numpy and rich, which are not installed", ""),
        (
            called("profile", "--model", "gpt3-13b"),
            "bpipe profile needs torch and megatron.core, which are not installed",
            "megatron",
        ),
        (
            launched("megatron.scheduling.launch", str(ROOT / "pretrain_gpt.py"), "--bpipe"),
            "training needs torch and megatron.core, which are not installed",
            "megatron",
        ),
        (
            f"import runpy; runpy.run_path({str(ROOT / 'pretrain_gpt.py')!r}, run_name='__main__')",
            "training needs torch and megatron.core, which are not installed",
            "megatron",
        ),
    ],
    ids=["simulate", "profile", "launch", "pretrain_gpt"],
)
def test_command_without_its_packages_says_in_one_line_what_to_install(
    program: str, needs: str, extra: str, tmp_path: Path
) -> None:
    """It ended in an import traceback, and `pip install` fetched 5.5 GB for those who only wanted a schedule."""
    ended = bare(program, tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    brackets = f"[{extra}]" if extra else ""
    assert ended.stderr == f'bpipe: error: {needs}: pip install -e "{ROOT}{brackets}"\n'


@pytest.mark.parametrize(
    ("record", "place"),
    [('{"url": "file:///of/this%20folder", "dir_info": {}}', "/of/this folder"), (None, "torch-bpipe")],
)
def test_install_command_of_a_copy_names_where_it_came_from(
    record: str | None, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metadata = tmp_path / "torch_bpipe-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: torch-bpipe\nVersion: 9\n")
    if record is not None:
        (metadata / "direct_url.json").write_text(record)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "bpipe/extras.py"))
    assert extras.install_command("torch") == f'pip install "{place}[torch]"'


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plain_installation_takes_seconds_and_plans(tmp_path: Path) -> None:
    """In a new virtual environment, including what pip fetches to build it."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], timeout=60, check=True)
    begin = time.monotonic()
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "bpipe", "megatron"):
        (source / name).symlink_to(ROOT / name)
    pip = [environment / "bin/python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", source], timeout=200, check=True)
    took = time.monotonic() - begin
    listed = subprocess.run(
        [*pip, "list", "--format=freeze"], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert {line.split("==")[0] for line in listed} <= {
        "torch-bpipe",
        "pip",
        "setuptools",
        "numpy",
        "rich",
        "Pygments",
        "pygments",
        "markdown-it-py",
        "mdurl",
    }
    # Fetching torch takes minutes.
    assert took < 120
    env = {"PATH": os.environ["PATH"]}
    for arguments in (
        ("schedule", "--schedule", "1f1b", "--pp", "4", "--microbatches", "8"),
        ("simulate", *MODEL, "--pp", "8"),
        ("plan", *MODEL, "--pp", "8", "--rows", "1"),
    ):
        subprocess.run(
            [environment / "bin/bpipe", *arguments],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.DEVNULL,
            timeout=100,
            check=True,
        )
