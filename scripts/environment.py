"""Print what a Python environment lacks for this project with an extra, one line per unmet requirement.

Usage: environment.py EXTRA | --stamp (a fingerprint of what an installation depends on)

Installs nothing and imports none of the packages it looks for: it runs in an environment that has nothing but pip.
"""

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
    """Yield every requirement line of the project with an extra, and with the extras that it names."""
    project = described(root)
    lines = [*project["dependencies"], *project["optional-dependencies"][extra]]
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            lines += chain.from_iterable(project["optional-dependencies"][name] for name in sorted(requirement.extras))
        else:
            yield line


def unmet(line: str) -> str | None:
    """Return why a requirement is not met here, or None if it is."""
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{line}: not installed"
    # An installation that was cut off can leave a package's record without a version.
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        return f"{line}: {version} is installed"
    return None


def project_unmet(root: Path) -> str | None:
    """Return why the environment's installation of a project is not the one of this folder, or None if it is."""
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
    """Return a fingerprint of the project files and the checkout's place: if it changes, install again."""
    digest = hashlib.sha256(str(root).encode())
    for name in ("pyproject.toml", "setup.py", "terra/pyproject.toml"):
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
    missing += [reason for reason in map(project_unmet, (ROOT, ROOT / "terra")) if reason]
    print("\n".join(missing), end="\n" if missing else "")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
