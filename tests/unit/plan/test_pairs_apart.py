"""Where tensor parallelism fills a node, pairs lie on two, and the prediction says so, what it costs and what else
to take."""

from __future__ import annotations

import json
import re

import pytest

from bpipe.cli import main
from tests.support.words import command_words

SIMULATE = ["simulate", "--model", "gpt3-175b", "--cluster", "a100-80g:64x8", "--pp", "8", "--gbs", "1536"]
SIMULATE += ["--attention", "unfused", "--precision", "fp16"]


def simulated(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main([*SIMULATE, *more]) == 0
    return capsys.readouterr().out


def seconds(text: str) -> float:
    found = re.search(r"^iteration ([0-9.]+) s", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_it_says_why_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-3 175B on 64 nodes of 8 A100s with t = 8 was predicted to take over half as long again, and nothing said
    why."""
    found, plain = simulated(capsys, "--tp", "8", "--balance", "bpipe"), simulated(capsys, "--tp", "8")
    (line,) = [line for line in found.splitlines() if line.startswith("pairs span two nodes")]
    assert (
        "because a rank has 8 of a node's 8 devices: transfers go through each device's port of 19 GB/s; links inside a "
        "node have 231." in line
    )
    longer = re.search(r"An iteration takes (\d+) % longer than without balancing", line)
    assert longer is not None
    assert int(longer[1]) == round(100 * (seconds(found) / seconds(plain) - 1)) > 50
    for way in (
        "--tp 4, so that pairs share a node",
        "--hosts host, which has 25 GB/s",
        "--recompute",
        "--schedule v-half",
    ):
        assert way in line
    assert "pairs span" not in plain


def test_where_a_pair_shares_a_node_there_is_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    """The way out that it names is one."""
    assert "pairs span" not in simulated(capsys, "--tp", "4", "--balance", "bpipe")
    assert "pairs span" not in simulated(capsys, "--tp", "8", "--balance", "bpipe", "--hosts", "host")


def test_what_hides_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "--tp", "8", "--balance", "bpipe", "--recompute", "selective")
    assert "links inside a node have 231; here computations hide them" in found


def test_plans_and_programs_are_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(simulated(capsys, "--tp", "8", "--balance", "bpipe", "--format", "json"))
    assert document["pairs_apart"].startswith("pairs span two nodes")
    plan = command_words("plan --model gpt3-175b --cluster a100-80g:64x8 --gbs 1536 --attention unfused --memory 45")
    plan += ["--tp", "8", "--pp", "8", "--mbs", "1", "--schedule", "1f1b", "--recompute", "none", "--precision", "fp16"]
    assert main([*plan, "--balance", "bpipe", "--vocabulary", "none"]) == 0
    assert "     pairs span two nodes, because a rank has 8 of a node's 8 devices" in capsys.readouterr().out
