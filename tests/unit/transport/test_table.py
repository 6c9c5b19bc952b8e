"""What the log says of the links between pairs."""

from __future__ import annotations

import pytest

from bpipe.simulate.cost import required_bytes_per_s, steady_bytes_per_s
from bpipe.transport.connect import MeasuredLink
from bpipe.transport.table import describe, sufficiency


def test_pairs_of_the_same_stages_share_a_line() -> None:
    links = [
        MeasuredLink((0, 6), "peer", {"nccl": 200e9, "peer": 180e9}, {"host": "RuntimeError: no pinned memory"}),
        MeasuredLink((1, 7), "peer", {"nccl": 210e9, "peer": 190e9}, {"host": "RuntimeError: no pinned memory"}),
        MeasuredLink((2, 4), "nccl", {"nccl": 20e9}, {"peer": "a and b are different machines"}),
    ]
    stages = {(0, 6): (0, 3), (1, 7): (0, 3), (2, 4): (2, 1)}
    assert describe(links, stages).split("\nbpipe: ") == [
        "links, measured in both directions:",
        "  stages 0 and 3, 2 pairs of ranks: peer 180 to 190 GB/s (nccl 200 to 210 GB/s; host not usable: RuntimeError: no "
        "pinned memory)",
        "  stages 1 and 2: nccl 20 GB/s (peer not usable: a and b are different machines)",
    ]


def test_the_papers_own_case() -> None:
    """GPT-3 96B, t=4, p=8, b=2 with recomputed attention: 3.48 GB within a forward of 143.37 ms."""
    assert required_bytes_per_s(3_477_012_480, 0.14337) / 1e9 == pytest.approx(24.25, rel=1e-3)
    assert steady_bytes_per_s(3_477_012_480, 0.14337) / 1e9 == pytest.approx(16.17, rel=1e-3)


def test_a_link_that_keeps_up_and_one_that_does_not() -> None:
    enough, sentence = sufficiency(0, 7, 3_000_000_000, 0.3, 25e9)
    assert enough
    assert sentence == (
        "stage 0 moves 3000 MB to stage 7 and back while a micro-batch computes, about 300 ms: 20 GB/s of the link's "
        "25 GB/s, enough"
    )
    enough, sentence = sufficiency(0, 7, 3_000_000_000, 0.3, 12.5e9)
    assert not enough
    assert "20 GB/s of the link's 12.5 GB/s, NOT enough: transfers will delay the computation" in sentence
