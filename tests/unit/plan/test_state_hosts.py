"""Optimizer state on other ranks: no more of it than must leave, where there is room, and what that costs beside
balancing."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.flags.budgets import HostedState, read_moves, write_moves
from bpipe.models.cluster import GIB, Cluster, parse_cluster
from bpipe.models.layout import EVENLY, Setup
from bpipe.models.model import PRESETS
from bpipe.models.on_nodes import rank_nodes
from bpipe.plan.predict import predict
from bpipe.plan.state_hosts import StateHosts, instead_of_balancing, state_hosts


def setup(gib: float = 40.0, cluster: Cluster | None = None, **changes: Any) -> Setup:
    """GPT-3 13B on eight devices, of which the first need 48 GiB."""
    on = cluster or parse_cluster("a100-40g:1x8")
    on = replace(on, device=replace(on.device, memory_bytes=int(gib * GIB)))
    usual: dict[str, Any] = {
        "tensor": 1,
        "pipeline": 8,
        "micro_batch": 1,
        "global_batch": 64,
        "sequence": 2048,
        "recompute": "none",
    }
    return Setup(PRESETS["gpt3-13b"], on, **{**usual, "layers": (5,) * 8, **changes})


def hosted(mine: Setup) -> StateHosts:
    found = state_hosts(predict(mine))
    assert found is not None
    return found


@pytest.mark.parametrize("gib", [39.0, 40.0, 44.0])
@pytest.mark.parametrize(
    "changes", [{}, {"precision": "fp16"}, {"distributed_optimizer": False}, {"precision": "fp32", "micro_batch": 1}]
)
def test_every_rank_fits_then_and_what_moves_is_what_lacks(gib: float, changes: dict[str, Any]) -> None:
    mine = setup(gib + (14 if "fp32" in changes.values() else 0), **changes)
    before = predict(mine).memory
    found = hosted(mine)
    assert all(row.fits for row in found.memory)
    assert sum(row.optimizer_bytes for row in found.memory) == sum(row.optimizer_bytes for row in before), (
        "none is lost"
    )
    sent = [sum(move.num_bytes for move in found.moves if move.giver == rank) for rank in range(8)]
    assert sent == [max(0, row.peak_bytes - row.limit_bytes) for row in before]
    assert all(row.peak_bytes == row.limit_bytes for row, one in zip(found.memory, sent, strict=True) if one), (
        "none less would do"
    )
    assert found.moved_bytes == 2 * sum(sent)
    assert not {move.giver for move in found.moves} & {move.host for move in found.moves}


def test_it_takes_as_long_as_its_exchanges_which_pass_one_by_one_on_a_rank() -> None:
    mine = setup()
    found = hosted(mine)
    link = 0.8 * mine.cluster.device.inside_bytes_per_s
    shares = [sum(move.num_bytes for move in found.moves if rank in move[:2]) for rank in range(8)]
    assert 2 * max(shares) / mine.cluster.device.inside_bytes_per_s < found.longer_s < found.moved_bytes / link * 1.5
    assert hosted(setup(cluster=parse_cluster("a100-40g:8x1"))).longer_s > found.longer_s, (
        "links between nodes are slower"
    )


def test_it_moves_a_tenth_of_what_balancing_does_or_less() -> None:
    """And reaches a budget that pairs cannot: activations are on the host while it computes, as moments are, but
    twice as many leave."""
    balanced = predict(setup(44.0, balance=EVENLY))
    assert balanced.fits
    assert balanced.bandwidth is not None
    sent = 2 * sum(balanced.transfers) * balanced.bandwidth.transfer_bytes
    found = instead_of_balancing(balanced.setup)
    assert found is not None
    assert 10 * found.moved_bytes < sent
    assert not predict(setup(40.0, balance=EVENLY)).fits
    assert hosted(setup(40.0)).iteration_s < 1.02 * predict(setup(40.0)).timing.iteration_s


def test_hosts_on_the_same_node_come_first() -> None:
    mine = setup(45.0, parse_cluster("a100-40g:2x4"))
    nodes = rank_nodes(mine)
    assert len(set(nodes)) == 2
    assert all(nodes[move.giver] == nodes[move.host] for move in hosted(mine).moves)


def test_there_is_none_where_all_fit_or_something_is_in_the_way() -> None:
    assert state_hosts(predict(setup(80.0))) is None
    assert state_hosts(predict(setup(20.0))) is None, "all of the state together is too much"
    assert state_hosts(predict(setup(40.0, balance=EVENLY))) is None, "activations move already"
    # Moments are two thirds of 20.6 GiB, and what lacks is more.
    assert state_hosts(predict(setup(33.0, global_batch=16))) is None


def test_it_is_found_wherever_there_is_room_enough() -> None:
    """Beside the sums of what lacks and of what there is room for: what leaves one rank may be in any pieces."""
    seen = set()
    for gib, schedule in product((36.0, 37.5, 38.5, 41.0, 46.0), ("1f1b", "zb-h1", "gpipe")):
        prediction = predict(setup(gib, schedule=schedule, global_batch=16))
        if prediction.fits:
            continue
        activation_budget = [row.limit_bytes - row.peak_bytes for row in prediction.memory]
        movable = all(
            -room <= 2 * row.optimizer_bytes // 3
            for room, row in zip(activation_budget, prediction.memory, strict=True)
        )
        found = state_hosts(prediction) is not None
        assert found is (sum(activation_budget) >= 0 and movable), (gib, schedule)
        seen.add(found)
    assert seen == {True, False}


def test_what_is_printed_is_read_and_is_enough() -> None:
    moves = hosted(setup()).moves
    again = read_moves(write_moves(moves))
    assert [move[:2] for move in again] == [move[:2] for move in moves]
    assert all(0 <= one.num_bytes - other.num_bytes <= GIB / 100 for one, other in zip(again, moves, strict=True))
    assert read_moves("0:3:0.5,1:2:1") == (HostedState(0, 3, GIB // 2), HostedState(1, 2, GIB))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0:3", "'0:3' must be RANK:HOST:GIB, such as 0:6:7.9"),
        ("0:3:0", "must be RANK:HOST:GIB"),
        ("0:3:-1", "must be RANK:HOST:GIB"),
        ("0:3:1,", "'' must be RANK:HOST:GIB"),
        ("0:0:1", "rank 0 both hosts and sends optimizer state"),
        ("0:3:1,3:2:1", "rank 3 both hosts and sends"),
        ("0:3:1,0:3:2", "names the same rank and host twice"),
    ],
)
def test_what_cannot_be_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_moves(text)


def test_simulate_and_plan_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model", "gpt3-13b", "--cluster", "a100-40g:1x8", "--gbs", "64"]
    one = [*("simulate", *sizes, "--pp", "8"), "--recompute", "none"]
    assert main(one) == 0
    assert (
        "moments on other ranks it would fit without balancing: --bpipe-optimizer-hosts 0:6:7."
        in capsys.readouterr().out
    )
    assert main([*one, "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)["optimizer_state_hosts"]
    assert said["moves"][0]["rank"] == 0
    assert max(said["peak_bytes"]) <= parse_cluster("a100-40g:1x8").device.memory_bytes
    sizes[3] = "a100-80g:1x8"
    assert (
        main(["plan", *sizes, "--schedule", "1f1b", "--recompute", "none", "--max-micro-batch", "1", "--memory", "44"])
        == 0
    )
    out = capsys.readouterr().out
    assert "fits only with balancing" in out
    assert "moments on other ranks it would fit without balancing" in out
