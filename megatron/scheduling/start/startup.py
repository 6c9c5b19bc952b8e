"""Make this process ready to import and run Megatron: the CPU stand-in where there is no GPU, and the repairs.

In: a fresh process. Out: one where `megatron.training` runs. Must be called before `megatron.core` is imported.
Importing this module imports no torch, so that whoever starts without it is told how to install it.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any


def prepare(*, repairing: bool = True) -> None:
    """Install what this machine needs. Rank 0 says what was done, a line each.

    `repairing`: mend Megatron, too. Whoever parses --bpipe-no-repairs calls `repair` once that is known.
    """
    # Without this, importing megatron.core appends the commit of whatever git checkout the process stands in to its
    # version.
    os.environ.setdefault("NO_VCS_VERSION", "1")
    import torch

    if not torch.cuda.is_available():
        from megatron.scheduling import cpu as cpu_runtime

        cpu_runtime.install()
    if repairing:
        repair()
    from megatron.scheduling.start import tokenizer

    without = tokenizer.install_byte_level_tokenizer()
    if without is not None:
        _say(without)


@functools.cache
def repair() -> None:
    """Mend what of the installed Megatron would stop a run, once in a process: a second time would wrap the
    wrappers."""
    from megatron.scheduling.hooks import repairs

    for line in repairs.apply():
        _say(line)


def leave_unrepaired() -> None:
    """Leave Megatron as it is, and say what nobody sees to then.

    Raises ValueError where it has been mended in this process.
    """
    from megatron.scheduling.hooks import repairs

    if repair.cache_info().currsize:
        raise ValueError(
            "--bpipe-no-repairs: this process repaired Megatron before these arguments were parsed; start a new process"
        )
    left = "; ".join(repair.mends for repair in repairs.REPAIRS)
    _say(f"--bpipe-no-repairs: Megatron is left unrepaired; without repairs it must itself ensure that {left}")


def device_type() -> str:
    """Return what activations lie on here: "cuda", or the type of what only stands in for it."""
    stand_in = _stand_in()
    if stand_in is not None:
        return str(stand_in.standing_in())
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def complete_arguments() -> None:
    """Add to the command line what a machine without a GPU needs; what the user gives wins."""
    stand_in = _stand_in()
    if stand_in is not None and tuple(sys.argv[1 : len(stand_in.ARGUMENTS) + 1]) != stand_in.ARGUMENTS:
        # In front: argparse lets the last value win, and that is the user's.
        sys.argv[1:1] = stand_in.ARGUMENTS
        where = "the CPU" if device_type() == "cpu" else f"{device_type()} devices"
        _say(f"no CUDA device: running on {where} with {' '.join(stand_in.ARGUMENTS)}")


def share_gpus(args: Any) -> None:
    """Give this rank a GPU that others may have, too, if the arguments ask for it.

    Raises ValueError if there are fewer GPUs than ranks and they do not.
    """
    import torch

    from megatron.scheduling.start import gpu_sharing

    line = gpu_sharing.apply(args, None if _stand_in() is not None else torch.cuda.device_count())
    if line is not None:
        _say(line)


def _stand_in() -> Any:
    """The module that answers for the CUDA runtime, where one does."""
    module = sys.modules.get("megatron.scheduling.cpu")
    return module if module is not None and module.standing_in() else None


def _say(line: str) -> None:
    """One line to the training log, from rank 0 (there is no process group yet to ask)."""
    if os.environ.get("RANK", "0") == "0":
        print(f"bpipe: {line}", flush=True)
