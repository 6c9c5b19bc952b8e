"""The deadlock checker and late devices, held to each other: of every plan both say whether somebody waits for ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from bpipe.check.deadlock import WaitLevel, blocked_ranks
from bpipe.ir.action import Kind
from bpipe.transport.announcement import shapes_of
from bpipe.transport.edges import Edges
from tests.late.cases import SCHEDULES
from tests.late.devices import Draw
from tests.late.pipeline import LatePipeline
from tests.unit.hand_made import far_ahead
from tests.unit.runtime.pipeline import ROWS, WIDTH

PLANS = {**SCHEDULES, "far ahead": far_ahead}
CONNECTIONS = {WaitLevel.ASYNCHRONOUS: 0, WaitLevel.ONE_QUEUE: 1}


@pytest.fixture
def shapes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker knows nothing of the messages that tell shapes, and with one queue these matter:
    `test_one_queue_and_two_first_messages_that_cross`."""
    init, shapes = Edges.__init__, shapes_of((torch.zeros(ROWS, WIDTH),))

    def knowing(self: Edges, rank: int, groups: Mapping[int, Any], device: torch.device) -> None:
        init(self, rank, groups, device)
        for neighbour, inbound in self._inbound.items():
            for sort in ((stage, kind) for stage in range(8) for kind in Kind):
                inbound.shapes[sort] = self._announced[neighbour, sort] = shapes

    monkeypatch.setattr(Edges, "__init__", knowing)


@pytest.mark.usefixtures("shapes_are_known")
@pytest.mark.parametrize("kind", ["two-sided", "host"])
@pytest.mark.parametrize("name", PLANS)
def test_both_say_the_same_of_a_plan(name: str, kind: str) -> None:
    schedule = PLANS[name]()
    for waits, connections in CONNECTIONS.items():
        stands_still = False
        try:
            LatePipeline(schedule, kind).run(Draw(1, connections=connections), 1)
        except RuntimeError as error:
            if "nobody can go on" not in str(error):
                raise
            stands_still = True
        assert stands_still == bool(blocked_ranks(schedule, waits)), f"with {connections or 'all'} queues"
