"""Say how options are called here that an error names as flags of a training with Megatron.

In: an error. Out: the same with a note, where it names any. The engine and the transports know one spelling.
"""

from __future__ import annotations

from bpipe.transport.config import FIELD_OF_FLAG

# By flag, the option of `BalancedSchedule`.
ARGUMENTS = {
    "--bpipe-bound": "bounds of BalanceConfig",
    "--bpipe-hosts": "hosts of BalanceConfig",
    "--bpipe-memory": "memory",
    **{flag: f"{name} of TransferConfig" for flag, name in FIELD_OF_FLAG.items()},
}


def name_arguments(error: BaseException) -> None:
    """Add a note to an error that names flags: what they are called under `BalancedSchedule`."""
    text = str(error)
    named = [f"{flag} is {argument}" for flag, argument in ARGUMENTS.items() if flag in text]
    if named:
        error.add_note(f"bpipe: under torch.distributed.pipelining {', '.join(named)}")
