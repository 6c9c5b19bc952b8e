"""The arrows of the architecture: who may import whom, read from the source and tried in a fresh interpreter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import bpipe

PACKAGE = Path(bpipe.__file__).parent
ROOT = PACKAGE.parent

# Every place of the package, lowest first, and what of the others it may import: whole places, or single modules of
# them. docs/architecture.md draws this.
MAY: dict[str, set[str]] = {
    "values": set(),
    "names": set(),
    "extras": set(),
    "placement": set(),
    "features": set(),
    "vocabulary": set(),
    "ir": set(),
    "generate": {"ir"},
    "lower": {"ir", "generate.place"},
    "balance": {"names", "ir"},
    "formats": {"values", "ir"},
    "check": {"ir", "formats.grid", "lower.lower"},
    "build": {"names", "ir", "generate", "balance", "formats.text", "check"},
    "simulate": {"ir", "lower.lower"},
    "models": {
        "values",
        "names",
        "placement",
        "ir",
        "generate.families",
        "generate.turns",
        "balance.budget",
        "balance.config",
        "balance.pairs",
        "build",
        "simulate.cost",
    },
    "record": {
        "values",
        "ir",
        "formats.text",
        "generate.family",
        "balance.budget",
        "balance.config",
        "balance.deadlines",
        "build",
        "models.flops",
    },
    "transport": {"ir.action", "ir.hosts", "ir.program", "simulate.bandwidth"},
    "flags": {
        "names",
        "placement",
        "ir",
        "formats.text",
        "generate.families",
        "generate.family",
        "balance.config",
        "models",
        "transport",
    },
    "runtime": {"ir", "lower.answered", "record.format", "transport", "vocabulary"},
    "launch": {"values", "flags", "names", "ir.hosts", "ir.layout", "generate.families", "balance.config", "models"},
    "plan": {
        "flags",
        "launch",
        "features",
        "ir",
        "check",
        "generate.families",
        "generate.family",
        "balance.config",
        "balance.pairs",
        "balance.pool",
        "balance.budget",
        "balance.tiers",
        "balance.deadlines",
        "build",
        "simulate",
        "models",
    },
    "report": {"ir", "generate.families", "balance.config", "build", "simulate", "models.flops", "record"},
    "report.out": {"ir", "formats.text", "simulate", "record.format", "report"},
    "recording": {
        *("ir", "build", "models.cluster", "record.format", "record.write", "report.memory", "runtime", "transport"),
    },
    "torch": {
        *("names", "ir", "flags.budgets", "generate.families", "lower.align", "lower.lower", "formats.read"),
        *(
            "formats.text",
            "balance.config",
            "balance.pairs",
            "check.deadlock",
            "build",
            "models.memory",
            "plan.budget",
            "plan.fit",
            "record.format",
            "record.write",
            "recording",
            "transport",
            "runtime",
            "report.memory",
        ),
    },
    "compare": {"values", "record.format", "record.keys", "record.one_run"},
    "draw": {"ir", "simulate.report"},
    "commands": {
        *(
            "values",
            "extras",
            "features",
            "ir",
            "flags",
            "generate.families",
            "generate.family",
            "generate.timing",
        ),
        *("formats", "lower.align", "lower.answered", "balance.config", "check.deadlock", "build", "simulate"),
        *("models", "launch", "plan", "record", "report", "report.out", "compare", "draw"),
    },
    "cli": {"values", "extras", "flags"},
    "reference": {"flags", "cli"},
    "__main__": {"cli"},
}

# Who may load what is not Python's own: any place of these, and no other.
FOREIGN = {
    "torch": {"transport", "recording", "runtime", "torch", "vocabulary"},
    "numpy": set[str](),
    "matplotlib": {"draw"},
    "megatron": set[str](),
    "torchtitan": {"torch"},
}


def name_of(path: Path) -> str:
    """`ir.action`; a package's own file is named by the package, the outermost by nothing."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path: Path) -> Iterator[str]:
    """Every module that a file names, anywhere in it; of `from a import b` both `a.b` and, where that is no module
    of ours, `a`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("bpipe.") in MODULES else node.module


def ours(module: str) -> set[str]:
    """What a module imports of the package, itself left out."""
    names = {name.removeprefix("bpipe.") for name in imported(MODULES[module]) if name.startswith("bpipe.")}
    assert names <= MODULES.keys(), f"{module} imports {names - MODULES.keys()}"
    return names - {module}


def place_of(module: str) -> str:
    """The place in which a module lies: the innermost that has a row of its own."""
    found = [place for place in MAY if module == place or module.startswith(f"{place}.")]
    assert found, f"bpipe/{module.replace('.', '/')} has no row in MAY: say whom it may import"
    return max(found, key=len)


INSIDE = [module for module in MODULES if module]


def test_the_table_runs_one_way() -> None:
    places = list(MAY)
    for number, (place, others) in enumerate(MAY.items()):
        for other in others:
            assert place_of(other) in places[:number], f"{place} may import {other}, which does not stand before it"


@pytest.mark.parametrize("place", MAY)
def test_a_place_imports_what_it_may_and_nothing_else(place: str) -> None:
    held = [module for module in INSIDE if place_of(module) == place]
    assert held
    used = set()
    for module in held:
        for other in ours(module):
            if place_of(other) == place:
                continue
            allowed = MAY[place] & {place_of(other), other}
            assert allowed, (
                f"{MODULES[module]} imports bpipe.{other}: {place} may import "
                f"{', '.join(sorted(MAY[place])) or 'nothing'}"
            )
            used |= allowed
    assert used == MAY[place], (
        f"nothing in {place} imports {', '.join(sorted(MAY[place] - used))} any more: take it out of MAY"
    )


def test_nowhere_do_imports_come_back() -> None:
    """Also where no floors are given, and where an import waits inside a function."""
    left = {module: ours(module) for module in MODULES}
    loose = {""}
    while loose:
        wanted = set().union(*left.values())
        loose = {module for module, others in left.items() if module not in wanted or not others & left.keys()}
        left = {module: others for module, others in left.items() if module not in loose}
    assert not left, f"these import each other in a ring: {', '.join(sorted(left))}"


@pytest.mark.parametrize("library", FOREIGN)
def test_a_library_stays_in_its_places(library: str) -> None:
    for module, path in MODULES.items():
        if library in {name.split(".")[0] for name in imported(path)}:
            assert place_of(module) in FOREIGN[library], f"{path} imports {library}"


def test_only_the_hooks_import_megatron() -> None:
    """Of what the trainer loads: its entry point and its hooks."""
    hooks = [path for path in (ROOT / "megatron").rglob("*.py") if ROOT / "megatron/scheduling" not in path.parents]
    assert not hooks, "any other file under megatron/ would hide the installed one"
    for path in (ROOT / "megatron/scheduling").rglob("*.py"):
        for name in imported(path):
            assert not name.startswith(("bpipe.commands", "bpipe.draw", "bpipe.cli", "tests", "scripts")), (
                f"{path} imports {name}"
            )


def test_terra_stands_alone() -> None:
    """It is a package of its own, and whoever trains without an audit never loads it."""
    for path in (ROOT / "terra").rglob("*.py"):
        wrong = {name for name in imported(path) if name.split(".")[0] in ("bpipe", "megatron", "scripts", "tests")}
        assert not wrong, f"{path} imports {wrong}"
    for folder in ("bpipe", "megatron"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != ROOT / "megatron/scheduling/report/audit.py":
                assert not any(name.split(".")[0] == "terra" for name in imported(path)), f"{path} imports terra"
