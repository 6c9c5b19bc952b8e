"""The audit of whole programs finds what their features say, and nothing else."""

from itertools import count
from pathlib import Path

import pytest

import terra
from terra import Kind
from tests.programs.judge import compare, random_states_kept
from tests.programs.program import Feature
from tests.programs.trainings import PROGRAMS

# By feature: kinds of which at least one must be found.
MUST: dict[Feature, set[Kind]] = {
    Feature.BATCH: {Kind.FROM_PYTHON, Kind.REPLACED, Kind.SHAPE},
    Feature.FROM_PYTHON: {Kind.FROM_PYTHON},
    Feature.NUMBER: {Kind.SCALAR},
    Feature.SCHEDULE: {Kind.SCALAR},
    Feature.READ: {Kind.HOST_READ},
    Feature.LIBRARY: {Kind.HOST_READ},
    Feature.BRANCH: {Kind.SOMETIMES},
    Feature.LOOP: {Kind.SOMETIMES},
    Feature.IDENTITY: {Kind.SOURCE},
    Feature.SHAPE: {Kind.SHAPE},
    Feature.DATA_SIZE: {Kind.SIZE},
    Feature.GENERATOR: {Kind.GENERATOR},
    Feature.RESEED: {Kind.SEED},
    Feature.CARRIED: {Kind.REPLACED},
}
# Kinds that may also be found: a branch's result has another source and size; a number may be a size.
MAY: dict[Feature, set[Kind]] = {
    **MUST,
    Feature.NUMBER: {Kind.SCALAR, Kind.HOST_READ},
    Feature.BRANCH: {Kind.SOMETIMES, Kind.SOURCE, Kind.SHAPE, Kind.REPLACED},
    Feature.LOOP: {Kind.SOMETIMES, Kind.SOURCE, Kind.ATTRIBUTE},
    Feature.SHAPE: {Kind.SHAPE, Kind.SCALAR},
    Feature.DATA_SIZE: {Kind.SIZE, Kind.SHAPE, Kind.REPLACED},
}
STEPS = 6


@pytest.fixture(scope="module")
def audits() -> dict[str, terra.Audit]:
    return {}


def audit_of(name: str, audits: dict[str, terra.Audit]) -> terra.Audit:
    if name not in audits:
        with random_states_kept():
            program, numbers = PROGRAMS[name](0), count()
            audits[name] = terra.audit(lambda: program.step(next(numbers)), num_steps=STEPS)
    return audits[name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_has_is_found_and_nothing_else(name: str, audits: dict[str, terra.Audit]) -> None:
    features, kinds = PROGRAMS[name].features, {finding.kind for finding in audit_of(name, audits).findings}
    missing = {feature.name for feature in features if feature in MUST and not MUST[feature] & kinds}
    assert not missing, f"found: {sorted(kind.name for kind in kinds)}"
    allowed = set().union(*(MAY.get(feature, set()) for feature in features))
    assert kinds <= allowed, [finding for finding in audit_of(name, audits).findings if finding.kind not in allowed]


@pytest.mark.parametrize("name", PROGRAMS)
def test_places_are_lines_of_the_program(name: str, audits: dict[str, terra.Audit]) -> None:
    files = {Path(finding.place.file).name for finding in audit_of(name, audits).findings}
    assert {"trainings.py"} <= files <= {"trainings.py", "layers.py"}
    assert max(len(finding.detail) for finding in audit_of(name, audits).findings) < 200


def test_ones_own_backward_and_hooks_are_named_there(audits: dict[str, terra.Audit]) -> None:
    """The findings are the number by which `Clipped` divides its gradient, and the factor of a parameter's hook."""
    for name, function in (("functions", "Clipped.backward"), ("hooks", "Hooks.scaled")):
        findings = [finding for finding in audit_of(name, audits).findings if finding.place.function == function]
        assert [finding.kind for finding in findings] == [Kind.SCALAR]
        assert findings[0].place.backward_of


def test_what_cannot_be_seen_is_said(audits: dict[str, terra.Audit]) -> None:
    """The array is overwritten after an operation."""
    assert any("through an array" in line for line in audit_of("numpy memory", audits).unseen)


@pytest.mark.parametrize("name", PROGRAMS)
def test_looking_on_changes_no_bit(name: str) -> None:
    recorder, numbers = terra.Recorder(), count()

    def watched(step):
        with recorder.running(), recorder.step(next(numbers)):
            return step()

    assert compare(PROGRAMS[name], 3, watched, each_step=True) is None
