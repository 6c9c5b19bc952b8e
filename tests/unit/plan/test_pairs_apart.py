"""Where tensor parallelism fills a node, pairs lie on two, and the prediction says so, what it costs and what else
to take."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bpipe.cli import main

SIMULATE = ["simulate", "--model", "gpt3-175b", "--cluster", "a100-80g:64x8", "--pp", "8", "--gbs", "1536"]
SIMULATE += ["--attention", "unfused", "--precision", "fp16"]


def simulated(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*SIMULATE, *more, "--format", "json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_pairs_on_two_nodes_are_reported_with_cause_cost_and_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-3 175B on 64 nodes of 8 A100s with t = 8 was predicted to take over half as long again, and nothing said
    why."""
    balanced, plain = simulated(capsys, "--tp", "8", "--balance", "bpipe"), simulated(capsys, "--tp", "8")
    text = balanced["pairs_apart"]
    assert "because a rank has 8 of a node's 8 devices: transfers go through each device's port of 19 GB/s" in text
    longer = re.search(r"An iteration takes (\d+) % longer than without balancing", text)
    assert longer is not None
    assert int(longer[1]) == round(100 * (balanced["iteration_time_s"] / plain["iteration_time_s"] - 1)) > 50
    for way in ("--tp 4", "--hosts host, which has 25 GB/s", "--recompute", "--schedule v-half"):
        assert way in text
    assert plain["pairs_apart"] is None


@pytest.mark.parametrize("more", ["--tp 4", "--tp 8 --hosts host"])
def test_pairs_on_one_node_are_not_reported(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The way out that it names is one."""
    assert simulated(capsys, *more.split(), "--balance", "bpipe")["pairs_apart"] is None


def test_hidden_transfers_are_reported_as_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulated(capsys, "--tp", "8", "--balance", "bpipe", "--recompute", "selective")
    assert "links inside a node have 231; here computations hide them" in result["pairs_apart"]


def test_plans_report_pairs_on_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = "plan --model gpt3-175b --cluster a100-80g:64x8 --gbs 1536 --attention unfused --memory 45 --tp 8 --pp 8 --mbs 1"
    plan += " --schedule 1f1b --recompute none --precision fp16 --balance bpipe --vocabulary none"
    assert main(plan.split()) == 0
    assert "\n   pairs span two nodes, because a rank has 8 of a node's 8 devices" in capsys.readouterr().out
