"""Evicting to a node's own memory: what ranks then hold, and the speed of its link."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.cli import main
from bpipe.plan.options import setup_from
from bpipe.predict.layout import Setup
from bpipe.schedule.hosts import HOST

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


def test_gpipe_is_balanced_with_own_memory_and_predicted_so() -> None:
    """All of its ranks hold every micro-batch, so none could host for another."""
    plain = replace(setup(HOST), schedule="gpipe", balance=BalanceConfig(hosts=HOST))
    bounded = replace(plain, balance=BalanceConfig((4,), hosts=HOST))
    from bpipe.predict.activations import activations, moves_anything

    assert moves_anything(plain)
    ((own, hosted), *_) = activations(bounded)
    (whole, _), *_ = activations(replace(bounded, balance=None))
    assert (own, hosted) == (whole * 4 // 16, 0)


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
    assert times["usual"]["iteration_time_s"] < times["slow"]["iteration_time_s"] < times["shared"]["iteration_time_s"]
