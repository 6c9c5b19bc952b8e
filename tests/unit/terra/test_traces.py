"""Traces merged into a graph: what it covers, against the pairs of operations that follow each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from terra.trace.graph import Key, TraceGraph


def keys(names: str) -> tuple[Key, ...]:
    return tuple((name, (), "line") for name in names)


def merged(*traces: str) -> TraceGraph:
    graph = TraceGraph()
    for trace in traces:
        graph.merge(keys(trace))
    return graph


# A few letters, so that traces meet, part and come round again.
TRACES = st.lists(st.text("abcdef", max_size=9), min_size=1, max_size=6)


@given(TRACES, st.text("abcdef", max_size=9))
def test_a_graph_covers_what_was_merged_and_what_has_no_edge_of_its_own(traces: list[str], other: str) -> None:
    graph = merged(*traces)
    assert all(graph.covers(keys(trace)) for trace in traces)
    seen = {pair for trace in traces for pair in zip(f"<{trace}", f"{trace}>", strict=True)}
    assert graph.covers(keys(other)) == (set(zip(f"<{other}", f"{other}>", strict=True)) <= seen)


@given(TRACES)
def test_merging_says_what_is_new_and_takes_nothing_twice(traces: list[str]) -> None:
    graph = TraceGraph()
    for trace in traces:
        covered = graph.covers(keys(trace))
        assert graph.merge(keys(trace)) == (not covered)
    size = len(graph)
    assert not any(graph.merge(keys(trace)) for trace in traces)
    assert len(graph) == size
