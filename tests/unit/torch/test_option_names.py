"""Errors of the engine and the transports name flags of a training with Megatron: here they are arguments."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import bpipe.runtime
import bpipe.transport
from bpipe.torch import BalancedSchedule
from bpipe.torch.option_names import ARGUMENTS, name_arguments


def test_an_error_that_names_flags_says_the_arguments() -> None:
    error, other = RuntimeError("the time-out is 60 s, --bpipe-timeout: --bpipe-transport host"), ValueError("1F1B")
    name_arguments(error)
    name_arguments(other)
    assert error.__notes__ == [
        "bpipe: under torch.distributed.pipelining --bpipe-timeout is timeout_s, --bpipe-transport is transport"
    ]
    assert not hasattr(other, "__notes__")


def test_the_arguments_are_there_and_the_flags_are_all_that_errors_name() -> None:
    known = inspect.signature(BalancedSchedule.__init__).parameters
    assert all(argument.partition("=")[0] in known for argument in ARGUMENTS.values())
    folders = [Path(next(iter(package.__path__))) for package in (bpipe.runtime, bpipe.transport)]
    named = {
        flag
        for folder in folders
        for path in folder.glob("*.py")
        for flag in re.findall(r"--bpipe-[a-z-]+\b", path.read_text())
    }
    # A budget, waits in place, and what a record of Megatron's is given: none is asked for here.
    trainers = {"--bpipe-memory", "--bpipe-peak-tflops", "--bpipe-report", "--bpipe-sync-transfers"}
    assert named - trainers <= ARGUMENTS.keys()
