"""Reductions of gradients behind and beside what is computed: by hand, and what two pipes expose of them."""

from __future__ import annotations

from dataclasses import replace

from bpipe.build import ScheduleConfig, build
from bpipe.simulate.cost import Link, Links, StageCost, uniform
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Reduced


def test_two_ranks_by_hand() -> None:
    """f = 1, b = 2, a message takes 1, a reduction 4:

    rank 0  0F0 0-1    1F1 2-3  1B1 3-5    0B0 6-8        and rank 1 is its mirror image
    messages        1-2               5-6
    """
    schedule = build(ScheduleConfig("chimera", 2, 2))
    costs = uniform(2, StageCost(1, 2, sent_bytes=1, reduction_s=4, optimizer_s=1), Links(Link(1)))
    lazily, eagerly = (simulate(schedule, replace(costs, eager=eager)) for eager in (False, True))
    assert lazily.pipeline_s == eagerly.pipeline_s == 8
    # Stage 1's gradients are complete on both ranks at 5, and gradients of its inputs pass the ports until 6.
    assert lazily.reductions == ((Reduced(1, 8, 12), Reduced(0, 12, 16)),) * 2
    assert eagerly.reductions == ((Reduced(1, 5, 10), Reduced(0, 10, 14)),) * 2
    # Each rank updates both of its stages.
    assert (lazily.makespan_s, eagerly.makespan_s) == (16 + 2, 14 + 2)
    assert (lazily.exposed_reduction_s, eagerly.exposed_reduction_s) == (8, 6)
