"""Orders of many micro-batches from those of few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families import v_shape
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import ALIKE, FamilyOptions, UnitCosts
from bpipe.schedule.families.v_shape import lengthened

V_SHAPES = ("zb-v", "v-half", "v-min")


def orders_of(name: str, p: int, m: int, slices: int = 1, costs: UnitCosts = ALIKE) -> list[list[Action]]:
    v_shape.orders_within.cache_clear()
    return [list(order) for order in FAMILIES[name].orders(p, m, 2, FamilyOptions(slices=slices, costs=costs))]


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("p", [1, 2, 4, 7, 9])
@pytest.mark.parametrize("name", V_SHAPES)
def test_a_v_of_many_micro_batches_is_the_same_as_if_all_were_moved(
    monkeypatch: pytest.MonkeyPatch, name: str, p: int, slices: int
) -> None:
    few = v_shape._num_steady(p, slices)
    found: list[object] = []

    def noting(*asked: Any) -> object:
        found.append(lengthened(*asked))
        return found[-1]

    for further in (1, p + 2):
        with monkeypatch.context() as patched:
            patched.setattr(v_shape, "lengthened", noting)
            made = orders_of(name, p, few + further, slices)
        with monkeypatch.context() as patched:
            patched.setattr(v_shape, "lengthened", lambda *asked: None)
            assert made == orders_of(name, p, few + further, slices)
    assert len(found) == 2
    assert None not in found


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_step_of_several_micro_batches_is_repeated_as_often_as_asked(name: str) -> None:
    family, p = FAMILIES[name], 4
    for m, step, times in ((12, 1, 0), (12, 1, 5), (14, 3, 2)):
        few, many = (family.orders(p, each, 1, FamilyOptions()) for each in (m, m + step * times))
        layout = family.layout(p, 1)
        costs = ALIKE if family.splits else UnitCosts(1, 2)
        assert lengthened(layout, m, few, step, times, costs) == [list(order) for order in many]


def test_where_no_step_repeats_there_are_none() -> None:
    family = FAMILIES["1f1b"]
    few = family.orders(4, 4, 1, FamilyOptions())
    assert lengthened(family.layout(4, 1), 4, few, 1, 3, ALIKE) is None, "the pipeline is never full"
    # GPipe computes all forwards, then all backwards: nothing stands twice that is a whole step.
    family = FAMILIES["gpipe"]
    assert lengthened(family.layout(4, 1), 30, family.orders(4, 30, 1, FamilyOptions()), 1, 3, ALIKE) is None


def test_uneven_durations_are_all_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v_shape, "lengthened", lambda *asked: pytest.fail("nobody knows when a step repeats"))
    for costs in (UnitCosts(1, 1, 2), UnitCosts(1, 1, 1, 1)):
        orders_of("v-half", 2, 12, costs=costs)


def test_a_step_has_all_that_a_micro_batch_is_computed_with() -> None:
    orders = orders_of("v-min", 3, 40, 2)
    for rank, order in enumerate(orders):
        stages = replace(v_shape.layout(3, 2), slices=2).stages_of(rank)
        expected = {
            Action(stage, kind, number)
            for stage in stages
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            for number in range(80)
        }
        assert len(order) == len(expected)
        assert set(order) == expected
