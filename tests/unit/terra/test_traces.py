"""Traces merged into a graph, against the pairs of operations that follow each other."""

from hypothesis import given
from hypothesis import strategies as st

from terra.trace.graph import Key, TraceGraph


def keys(names: str) -> tuple[Key, ...]:
    return tuple((name, (), "line") for name in names)


# A few letters, so that traces meet, part and come round again.
@given(st.lists(st.text("abcdef", max_size=9), min_size=1, max_size=12))
def test_merging_says_what_is_new_and_takes_nothing_twice(traces: list[str]) -> None:
    """What was merged needs nothing new, and neither does another trace that has no pair of its own."""
    graph, seen = TraceGraph(), set[tuple[str, str]]()
    for trace in traces:
        pairs = set(zip(f"<{trace}", f"{trace}>", strict=True))
        assert graph.merge(keys(trace)) == (not pairs <= seen)
        seen |= pairs
    size = len(graph)
    assert not any(graph.merge(keys(trace)) for trace in traces)
    assert len(graph) == size
