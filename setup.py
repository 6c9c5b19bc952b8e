"""Build the package that pyproject.toml describes, with links that also work outside of the repository.

In: BPIPE_REPOSITORY, the address of the repository, which a release sets; nothing where it is not set. Out: the
project's URLs, and the README with links to the files of the released version. pyproject.toml has all other settings.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def linked(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose links to files lead to the repository's files at the tag."""

    def absolute(found: re.Match[str]) -> str:
        view = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}]({repository}/{view}/{tag}/{found[3]})"

    return re.sub(r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)]+)\)", absolute, text)


def described(repository: str) -> dict[str, object]:
    """Return the README and the URLs for a release of the repository; without one, the README as it is."""
    text = (ROOT / "README.md").read_text()
    if repository:
        (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "bpipe/__init__.py").read_text(), re.MULTILINE)
        text = linked(text, repository, f"v{version}")
    urls = {
        "Source": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Issues": f"{repository}/issues",
        "Changes": f"{repository}/blob/main/CHANGELOG.md",
    }
    return {
        "long_description": text,
        "long_description_content_type": "text/markdown",
        "project_urls": urls if repository else {},
    }


if __name__ == "__main__":
    setup(**described(os.environ.get("BPIPE_REPOSITORY", "")))
