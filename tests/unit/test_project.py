"""The project's layout: the shared `megatron` namespace, packaging, and which modules may import which."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from importlinter.cli import lint_imports
from packaging.requirements import Requirement

from bpipe import __version__
from bpipe.extras import MODULES

ROOT = Path(__file__).resolve().parents[2]


def test_megatron_is_a_namespace_shared_with_the_wheel() -> None:
    """An __init__.py, a core/ or a training/ here would hide the installed Megatron from programs run in the
    repository."""
    tracked = {path.name for path in (ROOT / "megatron").iterdir()} - {"__pycache__"}
    assert tracked == {"scheduling"}


@pytest.mark.parametrize("isolated", [False, True], ids=["from the checkout", "from elsewhere"])
def test_both_halves_of_megatron_are_found(isolated: bool, tmp_path: Path) -> None:
    program = (
        "import importlib.util as u; print(*(u.find_spec(n).origin for n in ('megatron.scheduling', "
        "'megatron.core', 'bpipe')))"
    )
    command = [sys.executable, *(["-I"] if isolated else []), "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=tmp_path if isolated else ROOT)
    assert result.returncode == 0, result.stderr
    ours, theirs, bpipe = result.stdout.split()
    assert Path(ours).parts[-3:] == ("megatron", "scheduling", "__init__.py")
    assert "site-packages" in theirs
    assert Path(bpipe).parts[-2:] == ("bpipe", "__init__.py")


def test_unit_tests_mirror_the_source_tree() -> None:
    rooms = {path.name for path in (ROOT / "bpipe").iterdir() if (path / "__init__.py").exists()}
    folders = {path.name for path in (ROOT / "tests/unit").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders - rooms == {"scheduling"}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_project_alone_needs_only_what_installs_in_seconds() -> None:
    """Printing a schedule or planning required torch and Megatron: 5.5 GB."""
    assert PROJECT["dependencies"] == list(MODULES[""])


def test_the_torch_of_a_container_is_kept() -> None:
    """`torch>=2.11` leaves pre-releases out, so `pip install` in a vendor's container replaced its torch with the
    one of PyPI."""
    (torch,) = [requirement for requirement in map(Requirement, EXTRAS["torch"]) if requirement.name == "torch"]
    # As in pip: pre-releases count only if the specifier itself names one.
    assert torch.specifier.contains("2.11.0a0+eb65b36.nv26.5")
    assert not torch.specifier.contains("2.10.0a0+b558c98.nv26.1")


def test_what_is_cited_is_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The wheel of a release of github.com/owner/name."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("bpipe", "megatron"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = "-m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir ."
    built = subprocess.run(
        [sys.executable, *command.split(), str(source)],
        cwd=folder,
        env=os.environ | {"BPIPE_REPOSITORY": "https://github.com/owner/name"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.Path(path)


def test_the_wheel_says_that_it_is_typed(wheel: zipfile.Path) -> None:
    """pyproject.toml listed py.typed from the first day on, but there was none: type checkers took everything for
    Any."""
    names = set(wheel.root.namelist())
    assert {
        "bpipe/py.typed",
        "megatron/scheduling/py.typed",
        "bpipe/record/report/output/assets/page.html",
    } <= names
    # Either would hide the installed Megatron.
    assert not {"megatron/__init__.py", "megatron/py.typed"} & names
    assert not any(name.startswith("terra/") for name in names), "a project of its own"


def test_a_release_links_to_the_repository(wheel: zipfile.Path) -> None:
    """PyPI shows the README without the files that it links to."""
    shown = (wheel / f"torch_bpipe-{__version__}.dist-info/METADATA").read_text()
    assert "\nProject-URL: Source, https://github.com/owner/name\n" in shown
    links = re.findall(r"\]\(([^)]+)\)", shown)
    written = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    base = f"https://github.com/owner/name/blob/v{__version__}/"
    expected = [link if re.match("https:|#", link) else base + link for link in written]
    images = {link for link in expected if link.endswith(".svg")}
    assert links == [link.replace("/blob/", "/raw/") if link in images else link for link in expected]
    assert len(images) == 1


def test_a_build_without_a_release_leaves_the_readme_as_it_is() -> None:
    described = runpy.run_path(str(ROOT / "setup.py"))["described"]("")
    assert described["long_description"] == (ROOT / "README.md").read_text()
    assert described["project_urls"] == {}


def test_the_contracts_are_kept() -> None:
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_the_command_loads_nothing_heavy() -> None:
    program = (
        "import sys; import bpipe.cli as cli; "
        "cli.main(['schedule', '--schedule', '1f1b', '--pp', '4', '--microbatches', '4', '--format', 'svg']); "
        "heavy = {'torch', 'megatron', 'matplotlib', 'numpy'} & set(sys.modules); sys.exit(' '.join(heavy) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stderr
