"""The runtime's errors: each names the rank, the stage, the action and the state it was in. Knows nothing else."""

from __future__ import annotations


class RuntimeFault(RuntimeError):
    """The run left its program: a wait is missing, an operation came out of order, or storages changed between
    micro-batches."""


class TransferError(RuntimeError):
    """A transfer failed or did not end in time."""
