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
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict), path
    return found


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return read(path)["jobs"]


def test_the_workflows_are_ci_docs_release_and_torch() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "release", "torch"]


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


def test_ci_runs_the_checks_that_a_clean_checkout_gets() -> None:
    assert {"run": "./.ci/run"} in jobs(ROOT / ".github/workflows/ci.yml")["test"]["steps"]
    assert "scripts/test.sh" in (ROOT / ".ci/run").read_text()


def test_hooks_before_a_commit_are_the_quick_part_of_the_gate() -> None:
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"] for hook in local["hooks"]]
    gate = re.findall(r'^step "[^"]+" ((?:ruff|mypy).*)$', (ROOT / "scripts/test.sh").read_text(), re.MULTILINE)
    assert entries == [re.sub(r" --check| \.", "", step) for step in gate] == ["ruff format", "ruff check", "mypy"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_the_host_asks_of_one(path: Path) -> None:
    form = read(path)
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)) > 0
    assert all(field["attributes"]["label"] for field in form["body"])
    # YAML reads a bare no as a truth, which is no option.
    options = [option for field in form["body"] for option in field["attributes"].get("options", [])]
    assert all(isinstance(option, str) for option in options)
