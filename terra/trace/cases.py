"""Assign the nodes of a graph of traces to cases of switches.

In: edges without loops. Out: `Cases`: switches in order, with cases each.

A graph executor that knows no branches but a switch runs the switches one after the other, and is told of each which
case to run. Nodes that always come together are one case. A case's level is the longest way to it from the start; cases
of one level exclude each other, for a way from one to another would make that one's level greater. So a level is a
switch, and a trace takes at most one case of it. It may take none: the empty case, which no node stands for. The
published algorithm gives a switch no other cases than nodes, and fails on `1 -> end | 1 -> 2 -> end`: nothing there
says that 2 is left out.

Off the way of what runs: blocks of operations are sent as they come (`terra.run.blocks`), for here a trace needs a
choice at every switch. Pure; knows no tensors. Source: the case assignment of the dissertation on Terra, Algorithm 1,
with the empty case it lacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

# Where a trace begins and ends, as `TraceGraph` numbers them.
START, END = 0, 1
Edges = Iterable[tuple[int, int]]
# Of every switch the number of the case that is run; None for the empty one.
Choice = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Cases:
    """Cases of switches: `switches[i][j]` are the nodes of case j of switch i, in the order in which they run."""

    switches: tuple[tuple[tuple[int, ...], ...], ...]
    always: frozenset[int]

    def choose(self, trace: Sequence[int]) -> Choice:
        """Return what to tell every switch so that it runs this trace.

        Raises ValueError for what is no trace of the graph.
        """
        nodes = set(trace)
        chosen = tuple(
            next((place for place, case in enumerate(each) if case[0] in nodes), None) for each in self.switches
        )
        if self.run(chosen) != tuple(trace):
            raise ValueError(f"no choice of cases runs {tuple(trace)}: it is no trace of this graph")
        return chosen

    def run(self, choice: Choice) -> tuple[int, ...]:
        """Return the nodes that run."""
        chosen = zip(self.switches, choice, strict=True)
        return tuple(node for each, place in chosen if place is not None for node in each[place])

    @property
    def num_choices(self) -> int:
        """How many switches have to be told: those with one case that every trace takes need not be."""
        return len(self.switches) - len(self.always)


def assign_cases(edges: Edges) -> Cases:
    """Assign cases to edges.

    Raises ValueError for edges with a loop: take them apart first (`without_loops`, `segments`).
    """
    following, before = _neighbours(edges)
    order = _in_order(following, before)
    # A node that can only follow one that only it can follow belongs to that one's case.
    heads: dict[int, int] = {}
    cases: dict[int, list[int]] = {}
    levels: dict[int, int] = {}
    for node in order:
        above = before.get(node, ())
        if len(above) == 1 and len(following[above[0]]) == 1:
            heads[node] = heads[above[0]]
            cases[heads[node]].append(node)
        else:
            heads[node] = node
            cases[node] = [node]
            levels[node] = 1 + max((levels[heads[each]] for each in above), default=-1)
    switches: list[list[tuple[int, ...]]] = [[] for _ in range(1 + max(levels.values(), default=-1))]
    for head, level in levels.items():
        switches[level].append(tuple(cases[head]))
    skipped = _skipped(following, {node: levels[head] for node, head in heads.items()})
    always = frozenset(place for place, each in enumerate(switches) if len(each) == 1 and place not in skipped)
    return Cases(tuple(map(tuple, switches)), always)


def _neighbours(edges: Edges) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    following: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for one, other in dict.fromkeys(edges):
        following.setdefault(one, []).append(other)
        following.setdefault(other, [])
        before.setdefault(other, []).append(one)
    return following, before


def _in_order(following: Mapping[int, Sequence[int]], before: Mapping[int, Sequence[int]]) -> list[int]:
    """Order the nodes, every node behind those it follows."""
    left = Counter({node: len(each) for node, each in before.items()})
    ready = [node for node in following if not left[node]]
    for node in ready:
        for after in following[node]:
            left[after] -= 1
            if not left[after]:
                ready.append(after)
    if len(ready) < len(following):
        raise ValueError(
            f"the edges of nodes {sorted(following.keys() - set(ready))} lead into a loop or out of one: cases have "
            f"none"
        )
    return ready


def _skipped(following: Mapping[int, Sequence[int]], levels: Mapping[int, int]) -> set[int]:
    """Levels that some edge passes over."""
    return {
        level for node, each in following.items() for after in each for level in range(levels[node] + 1, levels[after])
    }


# -- loops
# ----------------------------------------------------------------------------------------------------------------------


def without_loops(edges: Edges, back: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the edges of what runs between two jumps: an edge back ends one run of the switches, and the next
    begins where it led."""
    back = dict.fromkeys(back)
    forward = [edge for edge in edges if edge not in back]
    ends = [(one, END) for one, _ in back]
    begins = [(START, other) for _, other in back]
    return tuple(dict.fromkeys((*forward, *ends, *begins)))


def segments(trace: Sequence[int], back: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return a trace with both ends, as the runs of the switches that make it up."""
    jumps = frozenset(back)
    parts: list[list[int]] = [[trace[0]]]
    for one, other in pairwise(trace):
        if (one, other) in jumps:
            parts[-1].append(END)
            parts.append([START])
        parts[-1].append(other)
    return tuple(map(tuple, parts))
