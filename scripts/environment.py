"""Say what a Python environment still lacks for this project.

In: an extra of pyproject.toml beside this folder, and the interpreter that runs the file. Out: one line for each unmet
requirement of the project with that extra. With `--stamp` in its place: a fingerprint of what an installation depends
on. Installs nothing and imports none of the packages it looks for; it runs in an environment that holds nothing but
pip.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

try:
    from packaging.requirements import Requirement
except ImportError:  # before the first installation only pip's own copy is there
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 12)


def described(root: Path) -> dict[str, Any]:
    """Return the project table of a checkout's pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def requirements(root: Path, extra: str) -> Iterator[str]:
    """Yield every requirement line of the project with an extra, those of the extras that it names in place of their
    names."""
    project = described(root)
    lines = [*project["dependencies"], *project["optional-dependencies"][extra]]
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            lines += chain.from_iterable(project["optional-dependencies"][name] for name in sorted(requirement.extras))
        else:
            yield line


def unmet(line: str) -> str | None:
    """Why a requirement does not hold here, or None where it does."""
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{line}: not installed"
    # An installation that was cut off can leave a package's record without a version.
    if found is None or not requirement.specifier.contains(found, prereleases=True):
        return f"{line}: {found} is installed"
    return None


def project_unmet(root: Path) -> str | None:
    """Say where the environment's installation of this project is not this very checkout."""
    name = described(root)["name"]
    try:
        record = metadata.distribution(name).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return f"{name}: not installed"
    url = urlsplit(json.loads(record)["url"] if record else "")
    if url.scheme != "file" or Path(unquote(url.path)).resolve() != root:
        return f"{name}: installed from somewhere else"
    return None


def stamp(root: Path) -> str:
    """Return a fingerprint that changes when an installation has to be repeated: the two project files and the place
    of the checkout."""
    digest = hashlib.sha256(str(root).encode())
    for name in ("pyproject.toml", "setup.py"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def main() -> int:
    if sys.version_info < OLDEST_PYTHON:
        print(f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer: this is {sys.version.split()[0]}")
        return 1
    if sys.argv[1:] == ["--stamp"]:
        print(stamp(ROOT))
        return 0
    (extra,) = sys.argv[1:]
    missing = [reason for reason in map(unmet, requirements(ROOT, extra)) if reason]
    here = project_unmet(ROOT)
    missing += [here] if here else []
    print("\n".join(missing), end="\n" if missing else "")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
