"""One transition function for everything that is reused: activations that leave and return, host buffers that fill and
empty.

In: where a thing is, where it is to go, and what follows what. Out: the new state, or a refusal that explains itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from bpipe.runtime.errors import RuntimeFault
from bpipe.schedule.action import Action


def advance[S: Enum](now: S, wanted: S, following: Mapping[S, S], what: str, cause: Action) -> S:
    """Return `wanted` if it follows `now`.

    Raises RuntimeFault naming the thing, both states and the action otherwise.
    """
    if following[now] is not wanted:
        raise RuntimeFault(
            f"{what}: {now.name} -> {wanted.name} on {cause}, but only {following[now].name} may follow {now.name}; "
            f"is a wait missing?"
        )
    return wanted
