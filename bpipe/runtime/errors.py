"""The runtime's errors, and the check of everything that changes state: activations and host buffers."""

from enum import Enum

from bpipe.schedule.action import Action


class RuntimeFault(RuntimeError):
    """The run left its program: a wait is missing, an operation came out of order, or storages changed between
    micro-batches."""


class TransferError(RuntimeError):
    """A transfer failed or did not end in time."""


def advance[S: Enum](now: S, wanted: S, subject: str, cause: Action) -> S:
    """Return `wanted` if it follows `now` in the circle of states.

    Raises RuntimeFault naming the subject, both states and the action otherwise.
    """
    states = list(type(now))
    following = states[(states.index(now) + 1) % len(states)]
    if following is not wanted:
        raise RuntimeFault(
            f"{subject}: {now.name} -> {wanted.name} on {cause}, but only {following.name} may follow {now.name}; "
            f"is a wait missing?"
        )
    return wanted
