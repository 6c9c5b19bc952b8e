"""Say what else would make a configuration fit, and what that costs.

In: a Setup. Out: candidates, each one change of it with its prediction: those that fit first, of these the fastest
first, and those that fill a device behind the others.

One change at a time, each as Megatron or this project has a flag for it: recomputation of parts or of as few layers as
do, a smaller micro-batch, another cut, a layer moved, balancing over partners, a pool or host memory, schedules made for
a bound, the vocabulary in shards, the distributed optimizer, slices. What cannot be, and what needs no less, is none.
Predicts; knows no command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf

from bpipe.balance.config import BalanceConfig
from bpipe.plan.budget_fit import within_budget_or_none
from bpipe.plan.candidates import Candidate
from bpipe.plan.fewest_layers import fewest_layers, with_block
from bpipe.plan.predict import predict
from bpipe.plan.refusals import Others, guarded, refused
from bpipe.predict.layer_counts import split_layers
from bpipe.predict.layout import Setup
from bpipe.predict.memory import peak_bytes, predict_memory, roomy_bytes
from bpipe.predict.profile import Profile
from bpipe.predict.recompute import MODULES
from bpipe.schedule.families.families import FAMILIES, default_family
from bpipe.schedule.hosts import ALL, HOST, PAIR, POOL
from bpipe.schedule.layout import Vocabulary

Change = Callable[[], Setup]
# What needs hardly less is no help.
HELPFUL = 0.99
# How many chunks per rank schedules are tried with that are made for a bound.
_CHUNKS = range(2, 9)
# Who hosts where no memory of a node does.
_DEVICES = (PAIR, POOL)


def ways_to_fit(
    setup: Setup, others: Others = (), profile: Profile | None = None, planned: Callable[[Setup], Setup] | None = None
) -> list[Candidate]:
    """Return every way that needs clearly less than the setup, or keeps its budget: first those that fit, the fastest
    first, those that are tight behind the others, then what does not fit, by what it needs.

    Of ways with the same figures, as hosts have where pairs have room, the first stands for all. `planned`: how
    the launch plans what moves by its budget, which every way does, too.
    """
    # A plan fills its budget.
    most = HELPFUL * peak_bytes(setup) if planned is None else inf
    rows: list[Candidate] = []
    for what, change in _changes(setup, profile):
        try:
            changed = change() if planned is None else planned(change())
            prediction = predict(changed, profile)
        except ValueError:
            # Megatron's rules, what is modelled, or what was measured do not allow it.
            continue
        row = Candidate(prediction, what, refused=refused(changed, others), is_guarded=guarded(changed, others))
        if row.peak_bytes <= most and not any(_stands_for(other, row) for other in rows):
            rows.append(row)
    return sorted(rows, key=_place)


def _place(row: Candidate) -> tuple[int, float]:
    """Where it stands in the list. What a tight one loses is not predicted, so its time is not compared."""
    return (int(row.is_tight), row.iteration_s) if row.can_run else (2, row.peak_bytes)


def _stands_for(row: Candidate, other: Candidate) -> bool:
    """Return whether one has the other's figures, or none worse where they differ in how devices share alone."""
    mine, its = ((one.iteration_s, one.peak_bytes, one.can_run) for one in (row, other))
    plain = {replace(one.setup, balance=None, budget_bytes=None) for one in (row, other)}
    are_balanced = all(one.setup.balance is not None and one.setup.hosts in _DEVICES for one in (row, other))
    alike = len(plain) == 1 and are_balanced
    return mine == its or (alike and row.can_run and mine[0] <= its[0] and mine[1] <= its[1])


def _changes(setup: Setup, profile: Profile | None) -> Iterator[tuple[str, Change]]:
    yield from _recomputed(setup)
    if setup.micro_batch > 1:
        half = setup.micro_batch // 2
        yield f"micro-batch {half}", lambda: replace(setup, micro_batch=half)
    if not setup.distributed_optimizer:
        yield "distributed optimizer", lambda: replace(setup, distributed_optimizer=True)
    yield from _cut(setup)
    yield from _layer_moved(setup)
    yield from _bounded(setup)
    yield from _balanced(setup, profile)
    yield from _sharded(setup)
    for slices in (2, 4, 8):
        if slices > setup.slices:
            yield f"{slices} slices per sequence", _with(setup, slices=slices)


def _with(setup: Setup, **changes: object) -> Change:
    return lambda: replace(setup, **changes)  # type: ignore[arg-type]


def _recomputed(setup: Setup) -> Iterator[tuple[str, Change]]:
    """More recomputation: each part of a layer, as few layers as are enough, all."""
    recomputed = setup.recomputed
    if recomputed.method is not None:
        return
    for module in MODULES:
        if module not in recomputed.modules:
            text = "selective:" + "+".join(one for one in MODULES if one in (*recomputed.modules, module))
            yield f"recompute {module}", _with(setup, recompute=text)
    numbers = (_enough_layers(setup, min(limits)) for limits in _limits(setup))
    number = next(filter(None, numbers), None)
    if number is not None:
        yield f"recompute {number} layer{'s' * (number > 1)} of each stage", lambda: with_block(setup, number)
    yield "recompute all layers", _with(setup, recompute="full")


def _enough_layers(setup: Setup, limit: int) -> int | None:
    """The fewest layers of each stage, but not all, whose recomputation is enough."""
    return fewest_layers(max(setup.layers) - 1, lambda number: peak_bytes(with_block(setup, number)) <= limit)


def _cut(setup: Setup) -> Iterator[tuple[str, Change]]:
    """The same devices with twice the tensor, context or pipeline parallelism, for fewer replicas, or in place of one of
    the others."""
    t, p, c = setup.tensor, setup.pipeline, setup.context
    yield f"tensor parallel {2 * t}", _with(setup, tensor=2 * t, sequence_parallel=True)
    yield f"context parallel {2 * c}", _with(setup, context=2 * c)
    yield f"pipeline parallel {2 * p}", _as_long(setup, t, 2 * p)
    if t > 1:
        yield f"tensor parallel {t // 2}, pipeline parallel {2 * p}", _as_long(setup, t // 2, 2 * p)
    if p > 1:
        yield f"tensor parallel {2 * t}, pipeline parallel {p // 2}", _as_long(setup, 2 * t, p // 2)


def _as_long(setup: Setup, tensor: int, pipeline: int) -> Change:
    """Another pipeline, its layers shared out as evenly as can be."""

    def change() -> Setup:
        layers = split_layers(setup.model.num_layers, pipeline * setup.num_chunks, allow_uneven=True)
        if layers is None:
            raise ValueError(f"{setup.model.num_layers} layers are too few for {pipeline} ranks")
        budgets = setup.budget_bytes and (min(setup.budget_bytes),) * pipeline
        return replace(
            setup, tensor=tensor, pipeline=pipeline, layers=layers, sequence_parallel=tensor > 1, budget_bytes=budgets
        )

    return change


def _layer_moved(setup: Setup) -> Iterator[tuple[str, Change]]:
    """One from the rank that needs most to the one that needs least, where a rank has one stage."""
    if setup.num_stages != setup.pipeline:
        return
    needs = [rank.peak_bytes for rank in predict_memory(setup)]
    most, least = needs.index(max(needs)), needs.index(min(needs))
    if setup.layers[most] > 1 and most != least:
        layers = tuple(count - (rank == most) + (rank == least) for rank, count in enumerate(setup.layers))
        yield f"layers {','.join(map(str, layers))}", _with(setup, layers=layers)


def _bounded(setup: Setup) -> Iterator[tuple[str, Change]]:
    """Of each family whose schedules are made for a bound, with as many chunks as need least."""
    if setup.is_sharded or FAMILIES[setup.schedule].num_pipes > 1:
        return
    for name in (name for name, family in FAMILIES.items() if family.within is not None and name != setup.schedule):
        found: list[tuple[int, Setup]] = []
        for chunks in _CHUNKS:
            layers = split_layers(setup.model.num_layers, setup.pipeline * chunks)
            if layers is not None:
                with suppress(ValueError):
                    changed = replace(setup, schedule=name, num_chunks=chunks, layers=layers, group_size=None, delay=0)
                    found.append((peak_bytes(changed), changed))
        if found:
            _, least = min(found, key=lambda each: each[0])
            yield f"{name} with {least.num_chunks} chunks", lambda least=least: least  # type: ignore[misc]


def _balanced(setup: Setup, profile: Profile | None) -> Iterator[tuple[str, Change]]:
    """Balancing: evenly, and with only what must leave. Of what is balanced, over further hosts."""
    known = () if setup.balance is None else (PAIR, setup.hosts)
    names = {PAIR: "balance within pairs", POOL: "balance over a pool", HOST: "evict to CPU memory"}
    for hosts, name in {**names, ALL: "balance over a pool and CPU memory"}.items():
        if hosts in known:
            continue
        balanced = replace(setup, balance=BalanceConfig(hosts=hosts))
        if hosts in _DEVICES:
            yield name, lambda balanced=balanced: balanced  # type: ignore[misc]
        yield (
            f"{name}, only what must leave",
            lambda balanced=balanced: _planned(balanced, profile),  # type: ignore[misc]
        )


def _limits(setup: Setup) -> Iterator[tuple[int, ...]]:
    """What its ranks may hold: its budgets; without them as much as leaves room, and then all there is."""
    if setup.budget_bytes is None:
        yield (roomy_bytes(setup.cluster, setup.kernels),) * setup.pipeline
    yield setup.limit_bytes


def _planned(setup: Setup, profile: Profile | None) -> Setup:
    """Balanced with what must leave. Raises ValueError where no plan keeps the limits."""
    plans = (within_budget_or_none(setup, limits, profile) for limits in _limits(setup))
    found = next(filter(None, plans), None)
    if found is None:
        raise ValueError("no plan keeps the limits")
    return found


def _sharded(setup: Setup) -> Iterator[tuple[str, Change]]:
    """The vocabulary in shards over all ranks, in a schedule that has a place for them."""
    if setup.is_sharded:
        return
    family = setup.schedule if FAMILIES[setup.schedule].sharded is not None else default_family(setup.num_chunks)
    for shards in (Vocabulary.ONE, Vocabulary.TWO):
        yield f"vocabulary in shards ({shards.value})", _with(setup, schedule=family, vocabulary=shards)
