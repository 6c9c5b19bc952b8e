"""Every style of exchange that a launch can choose in Megatron passes its messages in order; where something that orders
them is taken away, the messages that cross and the ranks that wait are named.

0.19.2 prevents each of these kinds of reports: interleaving over two ranks without overlap is refused
(`validate_args`), even ranks send first and odd ones receive, two ranks have a communicator for each direction
(`_p2p_ops`), and every rank has the same arguments. A script's own configuration of a model may still be otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bpipe.config.launch import validation

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not validation.is_installed(), reason="Megatron is not installed"),
]
# The first lines of what is found.
FOUND = {
    "batches between two": ["rank 1 takes 2B0 of rank 0 for 0F2", "rank 1 takes 0F2 of rank 0 for 2B0"],
    "both send first": ["rank 0 waits for rank 1 to take 0F1", "rank 1 waits for rank 0 to take 1F0"],
    "some tell shapes": ["rank 1 takes the shape of 0F0 of rank 0 for 0F0", "rank 1 takes 0F0 of rank 0 for 0F1"],
    "fewer micro-batches": [
        "rank 0 waits for rank 1 to take 0F3",
        "rank 1 waits for rank 0 to take 1B2",
        "rank 2 waits for rank 1 to send 1F3",
    ],
}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    script = Path(__file__).parent / "check_messages.py"
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result: dict[str, list[str]] = json.loads(ended.stdout.splitlines()[-1])
    return result


def test_megatrons_messages_pass_in_order(answers: dict[str, list[str]]) -> None:
    styles = {name: lines for name, lines in answers.items() if name not in FOUND}
    assert len(styles) == 12
    assert not any(styles.values()), styles


@pytest.mark.parametrize("name", FOUND)
def test_what_is_out_of_order_is_named(name: str, answers: dict[str, list[str]]) -> None:
    assert answers[name][: len(FOUND[name])] == FOUND[name]
