"""Errors of the engine and the transports name flags of a training with Megatron: here they are arguments."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import bpipe.runtime
import bpipe.transport
from bpipe.balance.config import BalanceConfig
from bpipe.torch import BalancedSchedule
from bpipe.torch.option_names import ARGUMENTS, name_arguments
from bpipe.transport.config import TransferConfig


def test_an_error_that_names_flags_says_the_arguments() -> None:
    error, other = RuntimeError("the time-out is 60 s, --bpipe-timeout: --bpipe-transport host"), ValueError("1F1B")
    name_arguments(error)
    name_arguments(other)
    assert error.__notes__ == [
        "bpipe: under torch.distributed.pipelining --bpipe-transport is transport of TransferConfig, "
        "--bpipe-timeout is timeout_s of TransferConfig"
    ]
    assert not hasattr(other, "__notes__")


def test_the_arguments_are_there_and_the_flags_are_all_that_errors_name() -> None:
    known = {
        "": inspect.signature(BalancedSchedule.__init__).parameters,
        **{kind.__name__: inspect.signature(kind).parameters for kind in (BalanceConfig, TransferConfig)},
    }
    named = [option.partition(" of ") for option in ARGUMENTS.values()]
    assert all(name in known[owner] for name, _, owner in named)
    folders = [Path(next(iter(package.__path__))) for package in (bpipe.runtime, bpipe.transport)]
    flags = {
        flag
        for folder in folders
        for path in folder.glob("*.py")
        for flag in re.findall(r"--bpipe-[a-z-]+\b", path.read_text())
    }
    # A budget and a record: neither is asked for here.
    assert flags - {"--bpipe-memory", "--bpipe-report", "--bpipe-peak-tflops"} <= ARGUMENTS.keys()
