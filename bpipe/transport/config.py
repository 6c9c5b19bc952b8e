"""Settings of transfers."""

from dataclasses import dataclass, field, fields
from typing import Any

from bpipe.transport import AUTO


def _of_flag(flag: str, default: Any) -> Any:
    """Return a field that a training with Megatron sets by `flag`, which errors name."""
    return field(default=default, metadata={"flag": flag})


@dataclass(frozen=True)
class TransferConfig:
    """How activations travel, and whether that is checked."""

    transport: str = _of_flag("--bpipe-transport", AUTO)
    """One of `bpipe.transport.NAMES`, or "auto": whichever is measured as the fastest."""

    timeout_s: float = _of_flag("--bpipe-timeout", 300.0)
    """Seconds after which a transfer that has not ended ends the run."""

    minimum_bytes: int = _of_flag("--bpipe-min-bytes", 65536)
    """Bytes of the smallest storage that moves: moving smaller ones costs more than it frees."""

    differing: bool = _of_flag("--bpipe-differing-sizes", False)
    """Whether micro-batches of one stage may differ in size, as with experts without a capacity."""

    verify: float | None = _of_flag("--bpipe-verify", None)
    """Number of first iterations whose transfers are checked by checksums, infinity for all. None: 2 in a training with
    Megatron that uses a guarded feature, else 0."""

    poison: bool = _of_flag("--bpipe-poison", False)
    """For tests: fill memory with NaN before it is freed and before activations return, so that a missing wait shows."""

    synchronous: bool = _of_flag("--bpipe-sync-transfers", False)
    """For measurements: wait for every transfer where it is issued."""


FIELD_OF_FLAG: dict[str, str] = {setting.metadata["flag"]: setting.name for setting in fields(TransferConfig)}
