"""How a run ends: what is released in which order, and that no rank waits for another once something has failed."""

from __future__ import annotations

from typing import Any

import pytest

from bpipe.runtime.links import disconnect


class Noted:
    """An engine or a connection that records the calls it receives."""

    ended_well = True

    def __init__(self, name: str, notes: list[str], error: Exception | None = None) -> None:
        self._name, self._notes, self._error = name, notes, error

    def release(self) -> None:
        self._notes.append(f"{self._name} gives back")
        if self._error is not None:
            raise self._error

    close = release

    def abandon(self) -> None:
        self._notes.append(f"{self._name} is dropped")


def parts(notes: list[str], error: Exception | None = None) -> tuple[Any, list[Any]]:
    """Return an engine and connections; None is the connection of a rank in no pair."""
    return Noted("engine", notes), [Noted("first", notes, error), None, Noted("second", notes)]


DROPPED = ["engine is dropped", "first is dropped", "second is dropped"]


def test_a_run_that_failed_between_iterations_waits_for_nobody() -> None:
    notes: list[str] = []
    assert disconnect(*parts(notes), failed=True) == "the run failed"
    assert notes == DROPPED


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), TimeoutError("no copy within 5 s")])
def test_where_the_partner_is_gone_everything_is_dropped_and_the_reason_is_told(error: Exception) -> None:
    """The run is over and has its result, so it must not fail."""
    notes: list[str] = []
    assert disconnect(*parts(notes, error)) == f"{type(error).__name__}: {error}"
    assert notes == ["engine gives back", "first gives back", *DROPPED]


def test_a_run_without_an_iteration_ends_what_it_was_connected_by() -> None:
    notes: list[str] = []
    _, connections = parts(notes)
    assert disconnect(None, connections) is None
    assert notes == ["first gives back", "second gives back"]
