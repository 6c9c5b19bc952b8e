"""Prepare a process for Megatron: the CPU stand-in if there is no GPU, and the repairs.

Call it before `megatron.core` is imported. Importing this module imports no torch, so that a missing one can be named.
"""

import functools
import os
import sys
from typing import Any


def prepare() -> None:
    """Install what this machine needs, with a line in the log for each change."""
    # Otherwise megatron.core appends the commit of the current folder's git checkout to its version.
    os.environ.setdefault("NO_VCS_VERSION", "1")
    import torch

    if not torch.cuda.is_available():
        from megatron.scheduling import cpu as cpu_runtime

        cpu_runtime.install()
    repair()
    from megatron.scheduling.start import tokenizer

    without = tokenizer.install_byte_level_tokenizer()
    if without is not None:
        _say(without)


@functools.cache
def repair() -> None:
    """Repair the installed Megatron, once in a process: a second time would wrap the wrappers."""
    from megatron.scheduling.hooks import repairs

    for line in repairs.apply():
        _say(line)


# The device type of a training that only its arguments stand for here.
_assumed: list[str] = []


def assume_device(kind: str) -> None:
    """Answer for a training on another machine, whose devices have this type."""
    _assumed[:] = [kind]


def is_cpu() -> bool:
    """Whether activations are in CPU memory."""
    return device_type() == "cpu"


def device_type() -> str:
    """Return the type of the device of activations: "cuda", or what stands in for it."""
    if _assumed:
        return _assumed[0]
    stand_in = _stand_in()
    if stand_in is not None:
        return str(stand_in.standing_in())
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def complete_arguments() -> None:
    """Add the flags that a machine without a GPU needs in front of the user's, which override them."""
    stand_in = _stand_in()
    if stand_in is not None and tuple(sys.argv[1 : len(stand_in.ARGUMENTS) + 1]) != stand_in.ARGUMENTS:
        sys.argv[1:1] = stand_in.ARGUMENTS
        where = "the CPU" if device_type() == "cpu" else f"{device_type()} devices"
        _say(f"no CUDA device: running on {where} with {' '.join(stand_in.ARGUMENTS)}")


def share_gpus(args: Any) -> None:
    """Give this rank a shared GPU if the arguments ask for it, or raise ValueError if there are too few GPUs."""
    import torch

    from megatron.scheduling.start import gpu_sharing

    line = gpu_sharing.apply(args, None if _stand_in() is not None else torch.cuda.device_count())
    if line is not None:
        _say(line)


def _stand_in() -> Any:
    """Return the module that replaces the CUDA runtime, if it does."""
    module = sys.modules.get("megatron.scheduling.cpu")
    return module if module is not None and module.standing_in() else None


def _say(line: str) -> None:
    """Print a line to the training log, from rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"bpipe: {line}", flush=True)
