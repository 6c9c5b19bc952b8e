"""Changes of a configuration that make it fit, or take less time: one list of all, alone and in pairs.

Each change is one that Megatron or this project has a flag for: recomputation, the micro-batch, another cut, layers
moved, balancing, schedules, chunks, shards of the vocabulary, types of gradients and optimizer state, overlaps, slices.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from bpipe.balance.config import BalanceConfig
from bpipe.plan.bounds import Bounds
from bpipe.plan.budget import within_budget_or_none
from bpipe.plan.predict import Candidate, predict
from bpipe.plan.refusals import Others, guarded, refused
from bpipe.plan.space import fewest_layers, stands_still, with_block, with_shards
from bpipe.predict.layout import Setup, split_layers
from bpipe.predict.memory import peak_bytes, predict_memory, roomy_bytes
from bpipe.predict.profile import Profile
from bpipe.predict.recompute import MODULES
from bpipe.schedule.families.families import FAMILIES, default_family
from bpipe.schedule.families.family import TAKEN
from bpipe.schedule.hosts import ALL, HOST, PAIR, POOL
from bpipe.schedule.layout import Vocabulary


class _Change(NamedTuple):
    """One change of a configuration."""

    kind: str
    """What it changes; a pair has two kinds."""
    name: str
    make: Callable[[], Setup]
    """Returns the changed configuration; raises ValueError if Megatron's rules or what is modelled do not allow it."""
    planned_hosts: str | None = None
    """Hosts of evictions that are still to be planned by bytes, which is slow."""


# Ratio of memory needs up to which a change helps.
HELPFUL = 0.99
# Chunks per rank tried for schedules that are made for a bound.
_CHUNKS = range(2, 9)
# Hosts other than node memory.
_DEVICES = (PAIR, POOL)
# Changes of each sort tried in pairs: the fastest that fit, and the fastest and the smallest of the others.
_SEEDS = 4


def ways_to_fit(
    setup: Setup, others: Others = (), profile: Profile | None = None, planned: Callable[[Setup], Setup] | None = None
) -> list[Candidate]:
    """Return every change that helps, alone or with another one: first those that fit, the fastest first and tight ones
    last, then those that do not fit, by the bytes that they need.

    A change alone helps if it needs clearly less memory, or fits and takes less time; a pair only if it is faster than
    all single changes. Of changes with the same figures (hosts, if pairs have room), the first is returned.

    Args:
        setup: The configuration as it is.
        others: Flags of the launch that the trainer may refuse.
        profile: Measured costs of its stages, if there are any.
        planned: Plans evictions within the launch's budget; it is applied to every change, too.
    """
    record = _Tried(setup, others, profile, planned)
    for change in _changes(setup):
        record.take(change)
    # Planning who hosts for whom among many ranks takes long.
    has_pairs = planned is None or setup.hosts in (PAIR, HOST)
    for trial in record.seeds() if has_pairs else ():
        for change in _changes(trial.changed):
            if change.planned_hosts in (None, PAIR, HOST):
                record.take(change, after=trial)
    return sorted((trial.row for trial in record.trials if record.helps(trial.row)), key=_place)


class _Trial(NamedTuple):
    """A change that was tried, or a pair."""

    row: Candidate
    kind: str
    """What the change affects; for a pair, what the second one does."""
    changed: Setup
    """The changed configuration, before it is planned."""


class _Tried:
    """Changes that were tried."""

    def __init__(
        self, setup: Setup, others: Others, profile: Profile | None, planned: Callable[[Setup], Setup] | None
    ) -> None:
        self._others, self._profile, self._planned = others, profile, planned
        self._now = predict(setup, profile)
        self._setups = {setup}
        self.trials: list[_Trial] = []

    def seeds(self) -> list[_Trial]:
        """Return the changes to combine with others: the fastest that fit, and the fastest and smallest that do not.
        A change with a plan is not combined."""
        trials = [trial for trial in self.trials if trial.changed.activation_budget is None]
        able, unable = ([trial for trial in trials if trial.row.can_run is can_run] for can_run in (True, False))
        sorts = (
            sorted(able, key=lambda trial: _place(trial.row)),
            sorted(unable, key=lambda trial: trial.row.iteration_s),
            sorted(unable, key=lambda trial: trial.row.peak_bytes),
        )
        by_name = {trial.row.name: trial for of_sort in sorts for trial in of_sort[:_SEEDS]}
        return list(by_name.values())

    def helps(self, row: Candidate) -> bool:
        """Whether it needs clearly less memory, or fits and takes less time. A plan always fills its budget."""
        is_less = self._planned is not None or row.peak_bytes <= HELPFUL * self._now.peak_bytes
        return is_less or (row.can_run and row.iteration_s < self._now.iteration_s)

    def _fastest_s(self, setup: Setup) -> float:
        """Return the time that a pair has to beat. Rows updated by the CPU count only for setups that are, too."""
        now_s = self._now.iteration_s if self._now.fits and not self._now.is_tight else inf
        rows = (trial.row for trial in self.trials)
        alike = (row for row in rows if row.can_run and not (row.is_tight or _on_cpu(row.setup) > _on_cpu(setup)))
        return min((row.iteration_s for row in alike), default=now_s)

    def take(self, change: _Change, after: _Trial | None = None) -> None:
        """Predict a change, alone or after another one; a pair only if it may be the fastest."""
        if after is not None and after.kind == change.kind:
            return
        try:
            plain = change.make()
            if after is not None and Bounds(self._profile).seconds(plain) >= self._fastest_s(plain):
                return
            if change.planned_hosts is not None:
                plain = _planned(plain, self._profile)
            changed = plain if self._planned is None else self._planned(plain)
            if changed in self._setups or (after is not None and peak_bytes(changed) > min(changed.limit_bytes)):
                return
            self._setups.add(changed)
            if stands_still(changed):
                return
            row = predict(changed, self._profile)
        except ValueError:
            # Megatron's rules, what is modelled, or what was measured do not allow it.
            return
        name = change.name if after is None else f"{after.row.name}; {change.name}"
        reasons, is_guarded = refused(changed, self._others), guarded(changed, self._others)
        row = replace(row, name=name, refused=reasons, is_guarded=is_guarded)
        is_worth_a_row = after is None or (row.can_run and row.iteration_s < self._fastest_s(changed))
        if is_worth_a_row and not any(_stands_for(trial.row, row) for trial in self.trials):
            self.trials.append(_Trial(row, change.kind, plain))


def _place(row: Candidate) -> tuple[int, float]:
    """Return the sort key: rows that take longer than predicted come after the others that can run."""
    is_slower = row.is_tight or _on_cpu(row.setup)
    return (int(is_slower), row.iteration_s) if row.can_run else (2, row.peak_bytes)


def _on_cpu(setup: Setup) -> bool:
    return setup.state_types.on_cpu > 0


def _stands_for(row: Candidate, other: Candidate) -> bool:
    """Whether `row` has the figures of `other`, or no worse ones if they differ only in the devices that host."""
    figures, others = ((row_of.iteration_s, row_of.peak_bytes, row_of.can_run) for row_of in (row, other))
    plain = {replace(row_of.setup, balance=None, budget_bytes=None) for row_of in (row, other)}
    are_balanced = all(row_of.setup.balance is not None and row_of.setup.hosts in _DEVICES for row_of in (row, other))
    alike = len(plain) == 1 and are_balanced
    return figures == others or (alike and row.can_run and figures[0] <= others[0] and figures[1] <= others[1])


def _changes(setup: Setup) -> Iterator[_Change]:
    """Yield all changes, whether or not they are allowed."""
    yield from _recomputed(setup)
    if setup.splits and setup.keeps_halves:
        yield _with(setup, "halves", "weights' halves right after inputs'", keep_weights_halves="none")
    for size in (setup.micro_batch // 2, 2 * setup.micro_batch):
        if size:
            yield _with(setup, "batch", f"micro-batch {size}", micro_batch=size)
    yield from _types(setup)
    yield from _cut(setup)
    yield from _layer_moved(setup)
    yield from _schedules(setup)
    yield from _balanced(setup)
    yield from _sharded(setup)
    for slices in (2, 4, 8):
        if slices > setup.slices:
            yield _with(setup, "slices", f"{slices} slices per sequence", slices=slices)


def _with(setup: Setup, kind: str, name: str, **changes: Any) -> _Change:
    return _Change(kind, name, partial(replace, setup, **changes))


def _types(setup: Setup) -> Iterator[_Change]:
    """Types of gradients and optimizer state, and flags that cost nothing."""
    if not setup.distributed_optimizer:
        yield _with(setup, "optimizer", "distributed optimizer", distributed_optimizer=True)
    switches, types = setup.switches, setup.state_types
    if setup.precision == "bf16" and not switches.grad_reduce_in_bf16:
        short = replace(switches, grad_reduce_in_bf16=True)
        yield _with(setup, "gradients", "gradients in 16 bits (rounds differently)", switches=short)
    if setup.distributed_optimizer and not types.use_precision_aware_optimizer:
        moments = replace(types, use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
        yield _with(setup, "optimizer", "moments of Adam in 16 bits (rounds differently)", state_types=moments)
    if setup.distributed_optimizer and not types.optimizer_cpu_offload:
        offloaded = replace(types, use_precision_aware_optimizer=True, optimizer_cpu_offload=True)
        yield _with(setup, "optimizer", "optimizer on the CPU (its time is not known)", state_types=offloaded)
    if setup.fp8 is not None and not setup.fp8.param_gather:
        yield _with(setup, "weights", "weights gathered in 8 bits", fp8=replace(setup.fp8, param_gather=True))
    overlaps = switches.with_overlaps(distributed_optimizer=setup.distributed_optimizer)
    if overlaps != switches:
        yield _with(setup, "overlap", "overlap of reductions and gathers with computation", switches=overlaps)


def _recomputed(setup: Setup) -> Iterator[_Change]:
    recomputed = setup.recomputed
    if setup.recompute != "none":
        yield _with(setup, "recompute", "recompute nothing", recompute="none")
    if recomputed.method is not None and recomputed.method != "uniform":
        return
    for module in MODULES:
        if recomputed.method is None and module not in recomputed.modules:
            text = "selective:" + "+".join(name for name in MODULES if name in (*recomputed.modules, module))
            yield _with(setup, "recompute", f"recompute {module}", recompute=text)
    number = next(filter(None, (_enough_layers(setup, min(limits)) for limits in _limits(setup))), None)
    if number is not None:
        name = f"recompute {number} layer{'s' * (number > 1)} of each stage"
        yield _Change("recompute", name, partial(with_block, setup, number))
    if recomputed.method is None:
        yield _with(setup, "recompute", "recompute all layers", recompute="full")


def _enough_layers(setup: Setup, limit: int) -> int | None:
    try:
        return fewest_layers(max(setup.layers) - 1, lambda number: peak_bytes(with_block(setup, number)) <= limit)
    except ValueError:
        return None


def _cut(setup: Setup) -> Iterator[_Change]:
    """Twice the tensor, context or pipeline parallelism, for fewer replicas or in place of another."""
    t, p, c = setup.tensor, setup.pipeline, setup.context
    yield _with(setup, "cut", f"tensor parallel {2 * t}", tensor=2 * t, sequence_parallel=True)
    yield _with(setup, "cut", f"context parallel {2 * c}", context=2 * c)
    for tensor, pipeline in ((t, 2 * p), (t // 2, p), (t // 2, 2 * p), (t, p // 2), (2 * t, p // 2)):
        sizes = ("tensor", tensor, t), ("pipeline", pipeline, p)
        name = ", ".join(f"{what} parallel {size}" for what, size, now in sizes if size != now)
        if tensor and pipeline:
            yield _Change("cut", name, partial(_cut_anew, setup, tensor, pipeline))


def _cut_anew(setup: Setup, tensor: int, pipeline: int) -> Setup:
    return replace(
        setup,
        tensor=tensor,
        pipeline=pipeline,
        layers=_layers_over(setup, pipeline, setup.num_chunks),
        mtp_stage=None,
        sequence_parallel=tensor > 1,
        budget_bytes=setup.budget_bytes and (min(setup.budget_bytes),) * pipeline,
    )


def _layers_over(setup: Setup, pipeline: int, chunks: int) -> tuple[int, ...]:
    layers = split_layers(setup.model.num_layers, pipeline * chunks, allow_uneven=True)
    if layers is None:
        raise ValueError(f"{setup.model.num_layers} layers are too few for {pipeline} ranks with {chunks} chunks")
    return layers


def _layer_moved(setup: Setup) -> Iterator[_Change]:
    """Move a layer from the rank that needs most to the one that needs least."""
    if setup.num_stages != setup.pipeline:
        return
    needs = [rank.peak_bytes for rank in predict_memory(setup)]
    fullest, emptiest = needs.index(max(needs)), needs.index(min(needs))
    if setup.layers[fullest] > 1 and fullest != emptiest:
        layers = tuple(count - (rank == fullest) + (rank == emptiest) for rank, count in enumerate(setup.layers))
        yield _with(setup, "layers", f"layers {','.join(map(str, layers))}", layers=layers)


def _schedules(setup: Setup) -> Iterator[_Change]:
    """Other numbers of chunks, and each family made for a bound with the number that needs least memory."""
    current = FAMILIES[setup.schedule]
    if current.num_pipes > 1:
        return
    layers = setup.model.num_layers
    even = [chunks for chunks in _CHUNKS if layers % (setup.pipeline * chunks) == 0]
    for chunks in even or _CHUNKS:
        name = setup.schedule if chunks in current.chunks(_CHUNKS[-1]) else default_family(chunks)
        if chunks != setup.num_chunks and FAMILIES[name].max_chunks != 1:
            yield _Change("schedule", f"{name} with {chunks} chunks", partial(_in_chunks, setup, name, chunks))
    if setup.num_chunks > 1:
        yield _Change("schedule", default_family(1), partial(_in_chunks, setup, default_family(1), 1))
    if setup.is_sharded:
        return
    for name in (name for name, family in FAMILIES.items() if family.within is not None and name != setup.schedule):
        variants: list[tuple[int, int]] = []
        for chunks in even or _CHUNKS:
            with suppress(ValueError):
                variants.append((peak_bytes(_in_chunks(setup, name, chunks)), chunks))
        if variants:
            _, chunks = min(variants)
            yield _Change("schedule", f"{name} with {chunks} chunks", partial(_in_chunks, setup, name, chunks))


def _in_chunks(setup: Setup, name: str, chunks: int) -> Setup:
    # Options of the order are reset; slices stay.
    options: dict[str, Any] = {option: field.default for option, field in TAKEN.items() if option != "slices"}
    options |= {"schedule": name, "num_chunks": chunks, "layers": _layers_over(setup, setup.pipeline, chunks)}
    return replace(setup, mtp_stage=None, **options)


def _balanced(setup: Setup) -> Iterator[_Change]:
    excluded = () if setup.balance is None else (PAIR, setup.hosts)
    names = {PAIR: "balance within pairs", POOL: "balance over a pool", HOST: "evict to CPU memory"}
    for hosts, name in {**names, ALL: "balance over a pool and CPU memory"}.items():
        if hosts in excluded:
            continue
        even = _with(setup, "balance", name, balance=BalanceConfig(hosts=hosts))
        if hosts in _DEVICES:
            yield even
        yield even._replace(name=f"{name}, only what must leave", planned_hosts=hosts)


def _limits(setup: Setup) -> Iterator[tuple[int, ...]]:
    """Yield the budgets; without budgets, limits that leave room, and then all memory."""
    if setup.budget_bytes is None:
        yield (roomy_bytes(setup.cluster, setup.kernels),) * setup.pipeline
    yield setup.limit_bytes


def _planned(setup: Setup, profile: Profile | None) -> Setup:
    plans = (within_budget_or_none(setup, limits, profile) for limits in _limits(setup))
    plan = next(filter(None, plans), None)
    if plan is None:
        raise ValueError("no plan keeps the limits")
    return plan


def _sharded(setup: Setup) -> Iterator[_Change]:
    family = setup.schedule if FAMILIES[setup.schedule].sharded is not None else default_family(setup.num_chunks)
    with suppress(ValueError):
        for changed in with_shards(replace(setup, schedule=family), (Vocabulary.ONE.value, Vocabulary.TWO.value)):
            layers = "output layer and embedding" if changed.input_shards else "output layer"
            yield _with(changed, "vocabulary", f"{layers} in shards ({changed.vocabulary.value})")
