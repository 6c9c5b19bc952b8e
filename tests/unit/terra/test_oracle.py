"""The oracle of traces and fallbacks: what must hold of any program, what the published ones have, and that the
graph covers just that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terra.trace.graph import TraceGraph
from tests.unit.terra.programs.judge import plain, random_states_kept, run
from tests.unit.terra.programs.oracle import Phase, counts, phases
from tests.unit.terra.programs.paths import paths
from tests.unit.terra.programs.program import Counts, Feature
from tests.unit.terra.programs.registry import HARDER, PUBLISHED

T, C, F, W = Phase.TRACED, Phase.CO_EXECUTED, Phase.FELL_BACK, Phase.WARM_UP

drawn = st.lists(st.lists(st.sampled_from("abcd"), max_size=6), max_size=12)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["x", "ab", "ab", "ab", "ab"], [W, T, T, C, C]),
        (["ab", "ab", "acb", "acb", "acb"], [W, T, T, T, C]),
        (["", "ab", "ab", "ab", "acb", "ab", "ab", "acb"], [W, T, T, C, F, T, C, C]),
        # Two branches after each other: two ways through both tell of all four.
        (["", "axb", "cxd", "axd", "cxb"], [W, T, T, T, C]),
        # Two turns of a loop tell of ten.
        (["", "aab", "ab", "aaaaaaaaaab"], [W, T, T, C]),
        # A step that ends early, or does nothing, is a path too.
        (["", "ab", "ab", "a", "ab", ""], [W, T, T, F, T, F]),
    ],
    ids=["fixed", "branch from the second step on", "late branch", "crossing", "loop", "early end"],
)
def test_phases(steps: list[str], expected: list[Phase]) -> None:
    assert phases(steps) == expected


@given(st.lists(st.integers(), max_size=5), st.integers(2, 9))
def test_a_fixed_path_is_traced_twice(path: list[int], steps: int) -> None:
    assert counts([path] * (1 + steps)) == Counts(2, 0)


@given(drawn, st.integers(0, 3))
def test_each_step_has_one_phase_and_what_was_seen_falls_back_never(steps: list[list[str]], warm_up: int) -> None:
    found = phases(steps, warm_up)
    assert len(found) == len(steps)
    seen: list[list[str]] = []
    for number, (path, phase) in enumerate(zip(steps, found, strict=True)):
        assert (phase is W) == (number < warm_up)
        if phase is F:
            assert path not in seen
        # Every change to co-execution comes right after a traced step, and every fall back after a co-executed one or
        # such a step.
        if phase is C:
            assert found[number - 1] in (T, C)
        if phase is F:
            assert found[number - 1] in (T, C)
            assert found[number + 1 : number + 2] in ([T], [])
        if phase is not W:
            seen.append(path)


@given(drawn)
def test_all_paths_known_nothing_falls_back(steps: list[list[str]]) -> None:
    found = phases([[], *steps, *steps, *steps])
    assert F not in found[1 + len(steps) :]
    assert found[1 + len(steps) :].count(T) <= 1


@given(drawn)
def test_names_do_not_matter(steps: list[list[str]]) -> None:
    assert phases(steps) == phases([[(each, 3) for each in path] for path in steps])


@given(drawn)
def test_the_graph_covers_what_the_oracle_says(steps: list[list[str]]) -> None:
    graph, tracing, found = TraceGraph(), True, []
    for path in steps:
        keys = [(each, (), 0) for each in path]
        covered = graph.covers(keys)
        found.append(T if tracing else C if covered else F)
        assert graph.merge(keys) is not covered
        tracing = not covered
    assert found == phases(steps, warm_up=0)


# -- programs
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, build in PUBLISHED.items() if build.expected is not None])
def test_published_programs_have_the_published_counts(name: str) -> None:
    assert counts(paths(PUBLISHED[name], 6)) == PUBLISHED[name].expected


def test_a_draw_of_sdpoint_decides_its_path() -> None:
    """Each point has a path of its own; a ratio has none, for it is a number. Counts are of the draw."""
    steps = 16
    with random_states_kept():
        points = [note.split()[1] for note in run(PUBLISHED["SDPoint"], steps, plain).program.log]
    # The first makes the optimizer's state.
    drawn_paths = list(zip(points, paths(PUBLISHED["SDPoint"], steps), strict=True))[1:]
    assert {point for point, _ in drawn_paths} == {"-1", "0", "1", "2"}
    for point, path in drawn_paths:
        assert all((path == other) is (point == at) for at, other in drawn_paths)
    last = max(
        number for number, (point, _) in enumerate(drawn_paths) if point not in [at for at, _ in drawn_paths[:number]]
    )
    assert F not in phases([path for _, path in drawn_paths], warm_up=0)[last + 1 :]


@pytest.mark.parametrize("name", HARDER)
def test_features_say_whether_paths_change(name: str) -> None:
    changing = {Feature.BRANCH, Feature.LOOP} & HARDER[name].features
    several = {tuple(path) for path in paths(HARDER[name], 8)[1:]}
    assert (len(several) > 1) is bool(changing)
