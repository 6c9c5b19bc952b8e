"""Budgets that no pair and no pool keeps, with a node's own memory: planned, recommended with the numbers, and
printed; and its link."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import allocated_bytes
from bpipe.cli import main
from bpipe.plan.budget import OverBudget, smallest_bytes, within
from bpipe.plan.budget_fit import predicted_devices, within_budget
from bpipe.plan.fit import plan_lines, plan_values
from bpipe.plan.options import setup_from
from bpipe.predict.layout import Setup
from bpipe.predict.links import links
from bpipe.schedule.hosts import ALL, HOST, PAIR, POOL

GIB = 2**30
MODEL = ("--model", "llama3-8b", "--pp", "4", "--seq", "8192", "--gbs", "16")


def setup(hosts: str) -> Setup:
    words = ["--num-layers", "32", "--hidden-size", "4096", "--ffn-hidden-size", "14336", "--num-attention-heads", "32"]
    words += "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192".split()
    words += "--swiglu --disable-bias-linear --position-embedding-type rope --normalization RMSNorm --bf16".split()
    words += (
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --attention-backend flash"
    ).split()
    words += ["--pipeline-model-parallel-size", "4", "--micro-batch-size", "1", "--global-batch-size", "16"]
    words += ["--use-distributed-optimizer", "--bpipe", "--bpipe-hosts", hosts]
    return setup_from(words, "h100-80g:1x4", 128256, "gpu")


def test_own_memory_keeps_what_no_device_can() -> None:
    least = {hosts: smallest_bytes(predicted_devices(setup(hosts), [1])) for hosts in (PAIR, POOL, HOST, ALL)}
    assert least[HOST] == least[ALL] < 0.95 * least[POOL] < least[POOL] <= least[PAIR]
    for hosts in (HOST, ALL):
        devices = predicted_devices(setup(hosts), [least[hosts]])
        found = within(devices)
        assert max(found.need_bytes) <= least[hosts]
        with pytest.raises(OverBudget):
            within(replace(devices, budget_bytes=(least[hosts] - 1,) * 4))
        assert max(found.own_bytes) > 0
        # Devices have nothing of it.
        held = [allocated_bytes(found.schedule, rank, found.memory) for rank in range(4)]
        assert all(hosted == 0 for _, hosted in held) if hosts == HOST else True


def test_with_devices_first_less_goes_to_the_nodes() -> None:
    budget = [66 * GIB]
    alone, behind = (within(predicted_devices(setup(hosts), budget)) for hosts in (HOST, ALL))
    assert behind.moved_bytes == alone.moved_bytes
    assert behind.own_bytes != alone.own_bytes
    assert sum(behind.own_bytes) < sum(alone.own_bytes)


def test_the_plan_says_where_everything_goes() -> None:
    _, found = within_budget(setup(ALL), [66 * GIB])
    told = plan_lines(found)
    assert any("its own node hosts " in line and " host buffers of " in line for line in told)
    assert any(
        re.search(r"its own node hosts .*, rank \d hosts ", line) or re.search(r"; rank \d hosts ", line)
        for line in told
    )
    (alone,) = [line for line in plan_lines(within_budget(setup(HOST), [66 * GIB])[1]) if line.startswith("rank 0")]
    assert re.search(r"rank 0 would need \S+ GiB; its own node hosts .* GiB in all: it needs \S+ GiB$", alone)
    written = plan_values(found)
    assert written["own_bytes"] == list(found.own_bytes)
    assert any(one["host"] == one["rank"] for one in written["hosts"])


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("pair", "balance bpipe GiB"),
        ("pool", "balance bpipe in a pool GiB"),
        ("host", "balance bpipe with node memory GiB"),
        ("all", "balance bpipe in a pool with node memory GiB"),
    ],
)
def test_the_text_says_which_hosts(hosts: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(
        ["simulate", *MODEL, "--balance", "bpipe", "--hosts", hosts, "--cluster", "h100-80g:1x4", "--memory", "75"]
    ) in (0, None)
    assert words in " ".join(capsys.readouterr().out.split())


def test_gpipe_is_balanced_with_own_memory_and_predicted_so() -> None:
    """All of its ranks hold every micro-batch, so none could host for another."""
    plain = replace(setup(HOST), schedule="gpipe", balance=BalanceConfig(hosts=HOST))
    bounded = replace(plain, balance=BalanceConfig((4,), hosts=HOST))
    from bpipe.predict.activations import activations, moves_anything

    assert moves_anything(plain)
    ((own, hosted), *_) = activations(bounded)
    (whole, _), *_ = activations(replace(bounded, balance=None))
    assert (own, hosted) == (whole * 4 // 16, 0)


# -- its link
# ----------------------------------------------------------------------------------------------------------------------


def shared(tmp_path: Path, **keys: float) -> str:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"nodes": 1, "gpus_per_node": 4, "device": {"like": "h100-80g", **keys}}))
    return str(path)


def test_a_cluster_file_says_how_fast_the_nodes_memory_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = {}
    for name, keys in (("usual", {}), ("slow", {"host_gb_per_s": 32}), ("shared", {"host_node_gb_per_s": 32})):
        command = ["simulate", "--cluster", shared(tmp_path, **keys), *MODEL, "--balance", "bpipe", "--hosts", "host"]
        assert main([*command, "--bound", "2", "--format", "json"]) in (0, None)
        times[name] = json.loads(capsys.readouterr().out)
    available = {name: found["available_bytes_per_s"] for name, found in times.items()}
    assert available["usual"] == pytest.approx(64e9 * 0.77)
    assert available["slow"] == pytest.approx(32e9 * 0.77)
    # Two of the node's four devices send: 32 / 2.
    assert available["shared"] == pytest.approx(16e9 * 0.77)
    assert times["usual"]["iteration_time_s"] < times["slow"]["iteration_time_s"] < times["shared"]["iteration_time_s"]


def test_who_does_not_send_leaves_the_others_more() -> None:
    device = replace(setup(HOST).cluster.device, host_node_bytes_per_s=32e9)
    one = replace(setup(HOST), balance=BalanceConfig((3,), hosts=HOST))
    one = replace(one, cluster=replace(one.cluster, device=device))
    two = replace(one, balance=BalanceConfig((2,), hosts=HOST))
    none = replace(one, balance=None)
    assert [links(each).host.bytes_per_s for each in (none, one, two)] == pytest.approx(
        [32e9 * 0.77, 32e9 * 0.77, 16e9 * 0.77]
    )
