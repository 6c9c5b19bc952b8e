"""The deadlock checker and late devices, held to each other: of every plan both say whether somebody waits for ever."""

from __future__ import annotations

import pytest

from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from tests.late.cases import SCHEDULES
from tests.late.devices import Draw
from tests.late.pipeline import LatePipeline
from tests.support.hand_made import far_ahead

PLANS = {**SCHEDULES, "far ahead": far_ahead}
CONNECTIONS = {WaitLevel.ASYNCHRONOUS: 0, WaitLevel.ONE_QUEUE: 1}


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
