"""Say how activations travel and how that is checked."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from bpipe.transport import AUTO


def _of_flag(flag: str, default: Any) -> Any:
    """Return a field that a training with Megatron gets as `flag`, which errors name."""
    return field(default=default, metadata={"flag": flag})


@dataclass(frozen=True)
class TransferConfig:
    """How activations travel, and how that is checked."""

    transport: str = _of_flag("--bpipe-transport", AUTO)
    """What carries them: "auto", whichever is measured as the fastest, or one of `bpipe.transport.NAMES`."""

    timeout_s: float = _of_flag("--bpipe-timeout", 300.0)
    """Seconds after which a transfer that has not ended ends the run."""

    minimum_bytes: int = _of_flag("--bpipe-min-bytes", 65536)
    """Smaller storages stay: moving them costs more than it frees."""

    differing: bool = _of_flag("--bpipe-differing-sizes", False)
    """Whether micro-batches of one stage may differ in size, as with experts without a capacity."""

    verify: float | None = _of_flag("--bpipe-verify", None)
    """Number of first iterations in which checksums are compared, infinity for all. None: 2 in a training with Megatron
    that uses a guarded feature, else 0."""

    poison: bool = _of_flag("--bpipe-poison", False)
    """For tests: fill memory with NaN before it is freed and before activations return, so that a missing wait shows."""

    synchronous: bool = _of_flag("--bpipe-sync-transfers", False)
    """For measurements: wait for every transfer where it is issued."""


# By flag, the field that it gives.
FIELD_OF_FLAG: dict[str, str] = {each.metadata["flag"]: each.name for each in fields(TransferConfig)}
