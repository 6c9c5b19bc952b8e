"""Errors of the engine and the transports name flags of a training with Megatron: here they are arguments."""

from __future__ import annotations

from bpipe.torch.schedule import name_arguments


def test_an_error_that_names_flags_says_the_arguments() -> None:
    error, other = RuntimeError("the time-out is 60 s, --bpipe-timeout: --bpipe-transport host"), ValueError("1F1B")
    name_arguments(error)
    name_arguments(other)
    assert error.__notes__ == [
        "bpipe: under torch.distributed.pipelining --bpipe-transport is transport of TransferConfig, "
        "--bpipe-timeout is timeout_s of TransferConfig"
    ]
    assert not hasattr(other, "__notes__")
