"""Say how options are called here that an error names as flags of a training with Megatron.

In: an error. Out: the same with a note, where it names any. The engine and the transports know one spelling.
"""

from __future__ import annotations

# By the flag, the argument of `BalancedSchedule`.
ARGUMENTS = {
    "--bpipe-bound": "bounds",
    "--bpipe-differing-sizes": "differing=True",
    "--bpipe-hosts": "hosts",
    "--bpipe-memory": "memory",
    "--bpipe-min-bytes": "minimum_bytes",
    "--bpipe-timeout": "timeout_s",
    "--bpipe-transport": "transport",
}


def name_arguments(error: BaseException) -> None:
    """Add a note to an error that names flags: what they are called as arguments of `BalancedSchedule`."""
    text = str(error)
    named = [f"{flag} is {argument}" for flag, argument in ARGUMENTS.items() if flag in text]
    if named:
        error.add_note(f"bpipe: under torch.distributed.pipelining {', '.join(named)}")
