"""The runtime's errors, and the check of everything that changes state: activations and host buffers."""

from collections.abc import Mapping
from enum import Enum

from bpipe.schedule.action import Action


class RuntimeFault(RuntimeError):
    """The run left its program: a wait is missing, an operation came out of order, or storages changed between
    micro-batches."""


class TransferError(RuntimeError):
    """A transfer failed or did not end in time."""


def advance[S: Enum](now: S, wanted: S, following: Mapping[S, S], subject: str, cause: Action) -> S:
    """Return `wanted` if it follows `now`.

    Raises RuntimeFault naming the subject, both states and the action otherwise.
    """
    if following[now] is not wanted:
        raise RuntimeFault(
            f"{subject}: {now.name} -> {wanted.name} on {cause}, but only {following[now].name} may follow {now.name}; "
            f"is a wait missing?"
        )
    return wanted
