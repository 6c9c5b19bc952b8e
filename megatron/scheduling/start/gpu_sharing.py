"""Let the ranks of a node share its GPUs (--bpipe-share-gpus), or refuse a run with too few of them.

NCCL refuses two ranks on one device if their hosts have the same hash. `NCCL_HOSTID` sets that hash, so that every rank
is a node of its own for NCCL, which then uses loopback sockets. Call it before CUDA and process groups are initialized.
"""

import os
from collections.abc import MutableMapping
from typing import Any

FLAG = "--bpipe-share-gpus"


def apply(args: Any, num_gpus: int | None, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Give this rank its GPU, and say what is shared.

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
        return f"{FLAG}: there is no GPU here to share" if sharing else None
    if num_ranks <= num_gpus:
        return f"{FLAG}: {num_ranks} ranks have {num_gpus} GPUs, so none is shared" if sharing else None
    if not sharing:
        raise ValueError(
            f"{num_ranks} ranks on this node, but torch sees {num_gpus} GPUs: start fewer ranks, or add {FLAG} to try "
            "them on shared GPUs (right, but slow)"
        )
    world = int(environment.get("WORLD_SIZE", num_ranks))
    if world > num_ranks:
        raise ValueError(
            f"{FLAG}: {world} ranks, of which {num_ranks} are on this node: ranks share GPUs on one node only"
        )
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    args.local_rank = local_rank % num_gpus
    make_node_of_its_own(local_rank, environment)
    return (
        f"WARNING: {num_ranks} ranks share {num_gpus} GPU{'s' if num_gpus > 1 else ''} ({FLAG}): results are as with a "
        "GPU each, but no time or bandwidth of this run means anything"
    )


def make_node_of_its_own(local_rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let NCCL take this process for a node, so that its GPU can be shared. The user's own settings stay."""
    environment["NCCL_HOSTID"] = f"bpipe-{local_rank}"
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    environment.setdefault("NCCL_IB_DISABLE", "1")
