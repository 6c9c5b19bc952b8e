"""Prepare a process for Megatron: the CPU stand-in if there is no GPU, and the repairs.

Call it before `megatron.core` is imported. Importing this module imports no torch, so that a missing one can be named.
"""

import functools
import os
import sys
from collections.abc import MutableMapping
from typing import Any

_SHARE_GPUS = "--bpipe-share-gpus"


def prepare() -> None:
    """Install what this machine needs, with a line in the log for each change."""
    # Otherwise megatron.core appends the commit of the current folder's git checkout to its version.
    os.environ.setdefault("NO_VCS_VERSION", "1")
    import torch

    if not torch.cuda.is_available():
        from megatron.scheduling import cpu as cpu_runtime

        cpu_runtime.install()
    repair()


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

    line = gpu_of_rank(args, None if _stand_in() is not None else torch.cuda.device_count())
    if line is not None:
        _say(line)


def gpu_of_rank(args: Any, num_gpus: int | None, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Give this rank its GPU, and say what is shared (--bpipe-share-gpus). Before CUDA and process groups are initialized.

    Args:
        args: Megatron's arguments; `local_rank` becomes the index of this rank's GPU if GPUs are shared.
        num_gpus: GPUs that this process sees; None on the CPU.
        environment: the process's environment, which gets NCCL's settings if GPUs are shared.

    Returns:
        A line for the log, or None if there is nothing to say.

    Raises:
        ValueError: there are more ranks than GPUs and the flag was not given, or ranks on several nodes.
    """
    sharing = bool(getattr(args, "bpipe_share_gpus", False))
    num_ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if num_gpus is None:
        return f"{_SHARE_GPUS}: there is no GPU here to share" if sharing else None
    if num_ranks <= num_gpus:
        return f"{_SHARE_GPUS}: {num_ranks} ranks have {num_gpus} GPUs, so none is shared" if sharing else None
    if not sharing:
        raise ValueError(
            f"{num_ranks} ranks on this node, but torch sees {num_gpus} GPUs: start fewer ranks, or add {_SHARE_GPUS} to try "
            "them on shared GPUs (right, but slow)"
        )
    world = int(environment.get("WORLD_SIZE", num_ranks))
    if world > num_ranks:
        raise ValueError(
            f"{_SHARE_GPUS}: {world} ranks, of which {num_ranks} are on this node: ranks share GPUs on one node only"
        )
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    args.local_rank = local_rank % num_gpus
    make_node_of_its_own(local_rank, environment)
    return (
        f"WARNING: {num_ranks} ranks share {num_gpus} GPU{'s' if num_gpus > 1 else ''} ({_SHARE_GPUS}): results are as with a "
        "GPU each, but no time or bandwidth of this run means anything"
    )


def make_node_of_its_own(local_rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let NCCL take this process for a node, so that its GPU can be shared. The user's own settings stay.

    NCCL refuses two ranks on one device if their hosts have the same hash, which `NCCL_HOSTID` sets. Ranks then use
    loopback sockets.
    """
    environment["NCCL_HOSTID"] = f"bpipe-{local_rank}"
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    environment.setdefault("NCCL_IB_DISABLE", "1")


def _stand_in() -> Any:
    """Return the module that replaces the CUDA runtime, if it does."""
    module = sys.modules.get("megatron.scheduling.cpu")
    return module if module is not None and module.standing_in() else None


def _say(line: str) -> None:
    """Print a line to the training log, from rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"bpipe: {line}", flush=True)
