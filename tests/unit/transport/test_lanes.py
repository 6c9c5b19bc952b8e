"""The threads that stand for copy engines: their order, what they wait for, and what they leave behind."""

from __future__ import annotations

import threading

import pytest

from bpipe.transport.lanes import ThreadLane


class Gate:
    """A job that begins and then waits to be let through."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.open.wait(5.0)


def test_jobs_of_a_lane_run_in_the_order_they_were_asked_for(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    ran: list[int] = []
    gate = Gate()
    lanes[0].run(gate)
    tickets = [lanes[0].run(lambda number=number: ran.append(number)) for number in range(50)]  # type: ignore[misc]
    assert ran == []
    gate.open.set()
    tickets[-1].wait()
    assert ran == list(range(50))


def test_a_job_waits_for_those_of_the_other_lane_it_comes_after(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    outbound, inbound = lanes
    ran: list[str] = []
    gate = Gate()
    first = outbound.run(lambda: (gate(), ran.append("put"))[0])
    second = inbound.run(lambda: ran.append("get"), after=[first])
    assert gate.begun.wait(5.0)
    assert ran == []
    gate.open.set()
    second.wait()
    assert ran == ["put", "get"]


def test_an_error_is_raised_where_somebody_waits_and_the_lane_lives_on(lanes: tuple[ThreadLane, ThreadLane]) -> None:
    def fail() -> None:
        raise OSError("no such memory")

    ran: list[str] = []
    failed = lanes[0].run(fail)
    follows = lanes[1].run(lambda: ran.append("never"), after=[failed])
    other = lanes[0].run(lambda: ran.append("other"))
    other.wait()
    for ticket in (failed, failed, follows):
        with pytest.raises(OSError, match="no such memory"):
            ticket.wait()
    assert ran == ["other"], "a job whose predecessor failed has nothing to work on"


def test_a_job_that_does_not_end_is_a_time_out() -> None:
    lane = ThreadLane("outbound", 0.05)
    gate = Gate()
    ticket = lane.run(gate)
    with pytest.raises(TimeoutError, match=r"no copy within 0\.05 s"):
        ticket.wait()
    gate.open.set()
    lane.close()
