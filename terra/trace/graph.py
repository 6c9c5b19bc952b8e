"""Merge the traces of a program's steps into one graph.

In: traces, each the operations that a step issued, in order. Out: `TraceGraph`.

A node is an operation with its static attributes and the place that issued it; an edge says that some step issued one
right after the other. The same node again in a trace is a loop, whose edge leads back. A step is covered where all its
edges are known: then what came before in other steps tells, of every operation, which may come next.

Two nodes are equal without a look at what they take: the published definition of equality does so too, and its graph
would hand `(x if c else y) + 1` the operand of the step that was traced. Here a graph says what may come next and
nothing of operands: which value each one is belongs to whoever runs the operations (`terra.run.blocks`). Knows no
tensors. Paper: Kim et al., Terra, NeurIPS 2021.
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
    """A node. `following` has the nodes that were issued right after it; `number` is its place among all of the
    graph."""

    key: Key
    number: int
    following: dict[Key, Node] = field(default_factory=dict, repr=False)

    @property
    def is_fork(self) -> bool:
        """Whether only the next step can tell what comes after it."""
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
        """Add what is new in a step's operations; whether anything was."""
        node, grown = self.start, False
        for key in (*trace, END):
            found = node.following.get(key)
            if found is None:
                found, grown = self._node(key), True
                node.following[key] = found
            node = found
        return grown

    def covers(self, trace: Iterable[Key]) -> bool:
        """Return whether a step with these operations needs nothing new.

        It need not have been merged: two branches meet in all combinations.
        """
        node = self.start
        for key in (*trace, END):
            following = node.following.get(key)
            if following is None:
                return False
            node = following
        return True
