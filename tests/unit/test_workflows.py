"""What runs on the repository's host, and before a commit: files that parse, run what is there, and get no more
rights than they need."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict), path
    return found


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return read(path)["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_of_this_repository_is_there(path: Path) -> None:
    text = path.read_text()
    for local in re.findall(r"(?:run|uses): \./(\S+)", text):
        assert (ROOT / local).is_file(), local
        assert local.endswith(".yml") or os.access(ROOT / local, os.X_OK), f"{local} cannot be run"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_job_ends_and_only_the_publishing_one_may_write(path: Path) -> None:
    assert read(path)["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text()
    for name, job in jobs(path).items():
        assert "uses" in job or job["timeout-minutes"] <= 60
        assert job.get("permissions") == (
            {"id-token": "write"} if (path.stem, name) == ("release", "publish") else None
        )


def test_a_release_is_tested_before_it_is_published() -> None:
    assert set(jobs(ROOT / ".github/workflows/release.yml")["publish"]["needs"]) == {"test", "build"}
