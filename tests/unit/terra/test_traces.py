"""Traces merged into a graph, and a graph's nodes assigned to cases: against enumeration of every way through random
graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terra.trace.cases import END, START, Cases, assign_cases, segments, without_loops
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


def ways(edges: Sequence[tuple[int, int]], node: int = START) -> Iterator[tuple[int, ...]]:
    if node == END:
        yield (END,)
    for one, other in edges:
        if one == node:
            for way in ways(edges, other):
                yield (node, *way)


# -- the graph
# ----------------------------------------------------------------------------------------------------------------------


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
    size, edges = len(graph), set(graph.edges())
    assert not any(graph.merge(keys(trace)) for trace in traces)
    assert (len(graph), set(graph.edges())) == (size, edges)


def test_branches_meet_in_all_combinations() -> None:
    graph = merged("abde", "acdf")
    assert graph.covers(keys("abdf"))
    assert graph.covers(keys("acde"))
    assert not graph.covers(keys("ade"))


def test_a_shorter_step_is_not_covered_by_a_longer_one() -> None:
    graph = merged("abc")
    assert not graph.covers(keys("ab"))
    assert not graph.covers(())


def test_a_loop_is_an_edge_back_and_covers_any_number_of_turns() -> None:
    graph = merged("abcbcd")
    a, b, c, d = (number for number in graph.numbers(keys("abcd"))[1:-1])
    assert graph.back_edges() == {(c, b)}
    assert graph.covers(keys("abcbcbcbcd"))
    assert set(graph.edges()) == {(START, a), (a, b), (b, c), (c, b), (c, d), (d, END)}


def test_an_edge_to_an_earlier_node_is_no_loop_by_itself() -> None:
    assert merged("ac", "abc").back_edges() == frozenset()


def test_operands_are_no_part_of_a_node() -> None:
    """The published equality leaves them out, and its graph takes a stale operand; here whoever runs the operations
    has to look."""
    one, other = ("add", (("T", 1),), "line 3"), ("add", (("T", 2),), "line 3")
    graph = TraceGraph()
    graph.merge([one])
    assert graph.covers([("add", (("T", 1),), "line 3")])
    assert not graph.covers([other]), "what never changes of the arguments is part of it"
    assert not graph.covers([("add", (("T", 1),), "line 4")])


def test_a_trace_that_is_not_covered_has_no_numbers() -> None:
    with pytest.raises(ValueError, match="does not cover"):
        merged("ab").numbers(keys("ba"))


# -- cases
# ----------------------------------------------------------------------------------------------------------------------


@given(TRACES)
def test_every_trace_of_a_graph_is_run_by_its_choice(traces: list[str]) -> None:
    graph = merged(*traces)
    back = graph.back_edges()
    cases = assign_cases(without_loops(graph.edges(), back))
    for trace in traces:
        numbers = graph.numbers(keys(trace))
        parts = segments(numbers, back)
        for part in parts:
            assert cases.run(cases.choose(part)) == part
        # Put together again, without the jumps, it is the trace.
        assert [node for part in parts for node in part[1:-1]] == list(numbers[1:-1])


@given(TRACES)
def test_every_way_has_one_choice_and_every_node_one_case(traces: list[str]) -> None:
    """Every way through the graph, also those that no trace took."""
    graph = merged(*(dict.fromkeys("".join(trace)) for trace in map("".join, traces)))  # type: ignore[arg-type]
    edges = without_loops(graph.edges(), graph.back_edges())
    cases = assign_cases(edges)
    nodes = [node for switch in cases.switches for case in switch for node in case]
    assert sorted(nodes) == sorted({node for edge in edges for node in edge})
    found = list(ways(edges))
    assert len({cases.choose(way) for way in found}) == len(found)
    for place in cases.always:
        assert {cases.choose(way)[place] for way in found} == {0}
    assert cases.num_choices == sum(
        len({cases.choose(way)[place] for way in found}) > 1 for place in range(len(cases.switches))
    )


def test_the_empty_case_is_what_the_published_algorithm_lacks() -> None:
    """`1 -> end | 1 -> 2 -> end`: with no case but nodes, 2 would run in both."""
    cases = assign_cases([(START, 2), (2, END), (2, 3), (3, END)])
    assert cases == Cases((((START, 2),), ((3,),), ((END,),)), frozenset({0, 2}))
    assert cases.choose((START, 2, END)) == (0, None, 0)
    assert cases.choose((START, 2, 3, END)) == (0, 0, 0)
    without = [choice for choice in product((0,), repeat=3) if cases.run(choice) == (START, 2, END)]
    assert without == []


def test_branches_that_do_not_nest_are_two_switches() -> None:
    """3 and 4 meet in 6, which 5 passes by."""
    edges = [(START, 2), (2, 3), (2, 4), (2, 5), (3, 6), (4, 6), (6, 7), (5, 7), (7, END)]
    cases = assign_cases(edges)
    assert cases.switches == (((START, 2),), ((3,), (4,), (5,)), ((6,),), ((7, END),))
    assert cases.num_choices == 2
    assert cases.choose((START, 2, 5, 7, END)) == (0, 2, None, 0)


def test_what_is_no_trace_is_refused() -> None:
    cases = assign_cases([(START, 2), (2, 3), (3, END), (2, END)])
    with pytest.raises(ValueError, match="no trace of this graph"):
        cases.choose((START, 3, END))
    with pytest.raises(ValueError, match="into a loop"):
        assign_cases([(START, 2), (2, 2), (2, END)])
