"""If tensor parallelism fills a node, pairs span two nodes; predictions say so, and what to use instead."""

from __future__ import annotations

import pytest

from bpipe.cli import main

SIMULATE = "simulate --model gpt3-175b --cluster a100-80g:64x8 --pp 8 --gbs 1536 --attention unfused --precision fp16"
SPAN = "pairs span two nodes, because a rank has 8 of a node's 8 devices: transfers go through each device's port of 19"


@pytest.mark.parametrize(
    ("more", "apart"),
    [
        ("--tp 8 --balance bpipe", True),
        ("--tp 8", False),
        # The remedies that it names work.
        ("--tp 4 --balance bpipe", False),
        ("--tp 8 --hosts host --balance bpipe", False),
    ],
)
def test_pairs_on_two_nodes_are_reported(more: str, apart: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-3 175B on 64 nodes of 8 A100s with t = 8 was predicted to take over 50 % longer, and nothing said why."""
    assert main([*SIMULATE.split(), *more.split()]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (SPAN in text) is apart
    assert ("CPU memory (--hosts host) 25. If transfers are exposed, use a --tp" in text) is apart


def test_plans_report_pairs_on_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = "plan --model gpt3-175b --cluster a100-80g:64x8 --gbs 1536 --attention unfused --memory 45 --tp 8 --pp 8 --mbs 1"
    plan += " --schedule 1f1b --recompute none --precision fp16 --balance bpipe --vocabulary none"
    assert main(plan.split()) == 0
    assert "\n   pairs span two nodes, because a rank has 8 of a node's 8 devices" in capsys.readouterr().out
