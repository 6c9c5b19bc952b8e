"""Ranks that share GPUs: who gets which, what NCCL is told, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.scheduling.start import sharing


def environment(local_rank: int = 0, local_world: int = 8, world: int = 8) -> dict[str, str]:
    return {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_world), "WORLD_SIZE": str(world)}


def arguments(local_rank: int = 0, shares: bool = True) -> SimpleNamespace:
    return SimpleNamespace(local_rank=local_rank, bpipe_share_gpus=shares)


def test_ranks_take_the_gpus_in_turn_and_are_nodes_of_their_own_for_nccl() -> None:
    hosts, gpus = set(), []
    for rank in range(8):
        args, variables = arguments(rank), environment(rank)
        line = sharing.apply(args, 3, variables)
        assert line is not None
        assert line.startswith("WARNING: 8 ranks share 3 GPUs (--bpipe-share-gpus)")
        gpus.append(args.local_rank)
        hosts.add(variables["NCCL_HOSTID"])
        assert variables["NCCL_SOCKET_IFNAME"] == "lo"
        assert variables["NCCL_IB_DISABLE"] == "1"
    assert gpus == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(hosts) == 8, "NCCL refuses two ranks of one host on one GPU"


def test_what_the_user_sets_for_nccl_stays() -> None:
    variables = environment() | {"NCCL_SOCKET_IFNAME": "eth0"}
    sharing.apply(arguments(), 1, variables)
    assert variables["NCCL_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize("num_gpus", [8, None])
def test_where_nothing_is_to_be_shared_nothing_changes(num_gpus: int | None) -> None:
    args, variables = arguments(5), environment(5)
    line = sharing.apply(args, num_gpus, variables)
    assert line is not None
    assert "WARNING" not in line
    assert args.local_rank == 5
    assert variables == environment(5)
    assert sharing.apply(arguments(shares=False), num_gpus, environment()) is None


def test_too_few_gpus_are_refused_with_the_flag_that_shares_them() -> None:
    """Megatron ended with "invalid device ordinal"."""
    variables = environment(7)
    with pytest.raises(ValueError, match=r"^8 ranks on this node, but torch sees 1 GPUs: .* add --bpipe-share-gpus"):
        sharing.apply(arguments(7, shares=False), 1, variables)
    assert variables == environment(7)


def test_ranks_of_several_nodes_are_refused() -> None:
    """Loopback reaches one node."""
    with pytest.raises(ValueError, match="16 ranks, of which 8 are on this node"):
        sharing.apply(arguments(), 1, environment(world=16))
