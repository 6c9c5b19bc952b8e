"""Merge the traces of a program's steps into one graph.

A node is an operation with its static attributes and the place that issued it; an edge means that some step issued one
right after the other. If the same node comes again in a trace, that is a loop, whose edge leads back.

Two nodes are equal whatever they take, as in the published definition, with which a graph would give
`(x if c else y) + 1` the operand of the step that was traced. Here a graph only says what may come next: which value
each operand is belongs to whoever runs the operations (`terra.run.blocks`). Paper: Kim et al., Terra, NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

# An operation's name or function, what of its arguments never changes, and where it was issued.
Key = tuple[Hashable, Hashable, Hashable]
# Where every step begins and ends; no operation has such a name.
START: Key = ("<start>", (), ())
END: Key = ("<end>", (), ())


@dataclass(eq=False, slots=True)
class Node:
    """An operation. `following`: those issued right after it; `number`: its index among all nodes of the graph."""

    key: Key
    number: int
    following: dict[Key, Node] = field(default_factory=dict, repr=False)

    @property
    def is_fork(self) -> bool:
        """Whether several nodes may come after it."""
        return len(self.following) > 1


class TraceGraph:
    """Graph of traces, empty at first: `start` and `end` with no edge between them."""

    def __init__(self) -> None:
        self._nodes: dict[Key, Node] = {}
        self.start, self.end = self._node(START), self._node(END)

    def __len__(self) -> int:
        return len(self._nodes)

    def _node(self, key: Key) -> Node:
        return self._nodes.setdefault(key, Node(key, len(self._nodes)))

    def merge(self, trace: Iterable[Key]) -> bool:
        """Add a step's operations, and return whether any of its edges was new."""
        node, grown = self.start, False
        for key in (*trace, END):
            if key not in node.following:
                node.following[key], grown = self._node(key), True
            node = node.following[key]
        return grown
