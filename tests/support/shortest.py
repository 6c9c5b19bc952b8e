"""Find the shortest order of a schedule's computations within a memory bound.

The computations stay on their ranks, and their order is free. Times, dependencies and memory are those of `timing`,
`schedule.dependencies` and `schedule.memory`, written as constraints for OR-tools' CP-SAT. The search ends with a proof
or, if time runs out, with the best order found and a lower bound.

Micro-batches of one pipe are alike. If a stage does not take them in order, its computations of one kind can be renamed
by their start: the k-th still comes after the k-th of its operands, and as many are held at any time. So it suffices to
search orders in which every stage takes a pipe's micro-batches in order.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

from ortools.sat.python import cp_model

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.families.timing import Work, stage_ticks, starts, work_of
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.memory import counting, peak_counts
from bpipe.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Shortest:
    """A shortest order.

    Attributes:
        schedule: The order, as a schedule.
        makespan: Its duration, in units of the costs.
        proven: Lower bound of the makespan within the same memory.
    """

    schedule: Schedule
    makespan: Fraction
    proven: Fraction

    @property
    def is_proven(self) -> bool:
        return self.makespan == self.proven


def shortest(schedule: Schedule, costs: UnitCosts, limit: int, limit_s: float) -> Shortest:
    """Return the shortest order that holds at most `limit` chunk micro-batches on any rank.

    Args:
        schedule: The computations.
        costs: Their durations.
        limit: Most chunk micro-batches on a rank.
        limit_s: Seconds to search.

    Raises:
        ValueError: There is no such order.
    """
    slots = [slot for row in schedule.ranks for slot in row]
    assert not any(slot.overlapped or slot.transfers for slot in slots), "only single computations can be reordered"
    orders = [[slot.compute for slot in row if slot.compute is not None] for row in schedule.ranks]
    stage_costs = stage_ticks(costs, schedule.num_chunks * schedule.layout.slices)
    work = work_of(schedule.layout, schedule.num_microbatches, orders, stage_costs)
    options = _Model(schedule, work, limit)
    if max(peak_counts(schedule)) <= limit:
        options.hint(starts(work))
    begun, ticks, proven = options.solve(limit_s)
    new_orders = [
        [work.actions[job][0] for job in sorted(row, key=lambda job: (begun[job], begun[job] + work.lasts[job]))]
        for row in work.rows
    ]
    placed = place("shortest", schedule.num_microbatches, schedule.layout, new_orders)
    assert max(peak_counts(placed)) <= limit, "the solver and the rule count memory differently"
    return Shortest(placed, Fraction(ticks, stage_costs.per_unit), Fraction(proven, stage_costs.per_unit))


class _Model:
    """The search as a CP-SAT model; its jobs are those of a `Work`."""

    def __init__(self, schedule: Schedule, work: Work[int], limit: int) -> None:
        self._most, self._work = limit, work
        self._model = model = cp_model.CpModel()
        # All computations one after the other, with every message: an upper bound of all orders.
        self._horizon = sum(work.lasts) + sum(max((lag for _, lag in needed), default=0) for needed in work.needed)
        self._starts = [model.new_int_var(0, self._horizon, "") for _ in work.actions]
        self._ends = [start + last for start, last in zip(self._starts, work.lasts, strict=True)]
        self._length = model.new_int_var(0, self._horizon, "length")
        # The intervals during which memory is held, with the jobs at their ends.
        self._spans: list[tuple[Any, int, int]] = []
        for row in work.rows:
            model.add_no_overlap(
                [model.new_fixed_size_interval_var(self._starts[job], work.lasts[job], "") for job in row]
            )
        for job, needed in enumerate(work.needed):
            for maker, lag in needed:
                model.add(self._starts[job] >= self._ends[maker] + lag)
            model.add(self._length >= self._ends[job])
        self._last_at_least()
        self._places = {actions[0]: job for job, actions in enumerate(work.actions)}
        self._in_order(schedule)
        self._hold(schedule)
        model.minimize(self._length)

    def _last_at_least(self) -> None:
        """Add the time before, on and after any rank as a lower bound, which the solver itself finds late."""
        work, jobs = self._work, range(len(self._work.actions))
        after: list[list[tuple[int, int]]] = [[] for _ in jobs]
        for job in jobs:
            for maker, lag in work.needed[job]:
                after[maker].append((job, lag))
        heads, tails = (_ways(edges, work.lasts) for edges in (work.needed, after))
        for row in work.rows:
            if row:
                busy = sum(work.lasts[job] for job in row)
                self._model.add(self._length >= min(heads[job] for job in row) + busy + min(tails[job] for job in row))

    def _in_order(self, schedule: Schedule) -> None:
        """Keep each stage's micro-batches of one pipe in order."""
        rows: dict[tuple[Kind, int, int], list[Action]] = {}
        for action in self._places:
            rows.setdefault((action.kind, action.stage, action.microbatch % schedule.layout.num_pipes), []).append(
                action
            )
        for row in rows.values():
            for earlier, later in pairwise(sorted(row, key=lambda action: action.microbatch)):
                self._model.add(self._starts[self._places[later]] >= self._ends[self._places[earlier]])

    def _hold(self, schedule: Schedule) -> None:
        """Bound what each rank holds: a forward's memory until its backward ends, with the change at the end of I."""
        memory = counting(schedule.num_stages)
        sizes_of_rank: list[list[tuple[Any, int]]] = [[] for _ in self._work.rows]
        for action, job in self._places.items():
            if action.kind is not Kind.FORWARD:
                continue
            size, rank = memory.size(action.stage, action.microbatch), self._work.rank[job]
            first, last = (self._places.get(Action(action.stage, kind, action.microbatch)) for kind in _HALVES)
            if first is None or last is None:
                whole = self._places[Action(action.stage, Kind.BACKWARD, action.microbatch)]
                sizes_of_rank[rank].append((self._held(job, whole), size.saved_bytes))
                continue
            held_bytes, change_bytes = (
                min(size.saved_bytes, size.after_input_bytes),
                size.after_input_bytes - size.saved_bytes,
            )
            sizes_of_rank[rank].append((self._held(job, last), held_bytes))
            if change_bytes:
                sizes_of_rank[rank].append(
                    (self._held(job, first), -change_bytes)
                    if change_bytes < 0
                    else (self._held(first, last), change_bytes)
                )
        for entries in sizes_of_rank:
            spans, sizes = zip(*entries, strict=True)
            self._model.add_cumulative(spans, sizes, self._most)

    def _held(self, first: int, last: int) -> Any:
        """Return the interval from the first job's start to the second job's end."""
        size = self._model.new_int_var(0, self._horizon, "")
        self._spans.append((size, first, last))
        return self._model.new_interval_var(self._starts[first], size, self._ends[last], "")

    def hint(self, begun: Sequence[int]) -> None:
        """Give the solver a complete order to begin with."""
        lasts = self._work.lasts
        for start, tick in zip(self._starts, begun, strict=True):
            self._model.add_hint(start, tick)
        for size, first, last in self._spans:
            self._model.add_hint(size, begun[last] + lasts[last] - begun[first])
        self._model.add_hint(self._length, max(tick + took for tick, took in zip(begun, lasts, strict=True)))

    def solve(self, limit_s: float) -> tuple[list[int], int, int]:
        """Return each job's start, the duration, and its lower bound, in ticks."""
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.num_workers = os.cpu_count() or 1
        status = solver.solve(self._model)
        if status == cp_model.INFEASIBLE:
            raise ValueError(f"no order holds at most {self._most} chunk micro-batches on every rank")
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), f"no order found in {limit_s:g} s"
        length = solver.value(self._length)
        # Times are whole ticks, so the bound is rounded up.
        proven = length if status == cp_model.OPTIMAL else min(length, ceil(solver.best_objective_bound))
        return [solver.value(start) for start in self._starts], length, proven


_HALVES = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def _ways(edges: Sequence[Sequence[tuple[int, int]]], lasts: Sequence[int]) -> list[int]:
    """Return the longest path to each job, without the job itself."""
    ways: dict[int, int] = {}
    left = list(range(len(edges)))
    while left:
        job = left[-1]
        missing = [successor for successor, _ in edges[job] if successor not in ways]
        if missing and job not in ways:
            left += missing
            continue
        left.pop()
        ways[job] = max((ways[successor] + lasts[successor] + lag for successor, lag in edges[job]), default=0)
    return [ways[job] for job in range(len(edges))]
