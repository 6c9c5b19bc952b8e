"""Keep a setup within budgets, or say what else would make it fit.

In: a Setup, budgets in bytes. Out: the setup as it is balanced, a `Fit`, or an error that names the remedies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bpipe.balance.config import BalanceConfig
from bpipe.build import build
from bpipe.flags.budgets import MINIMUM_BYTES, budget_text
from bpipe.generate.families import FAMILIES
from bpipe.ir.hosts import ALL, PAIR, POOL
from bpipe.ir.layout import Vocabulary
from bpipe.models.activations import parts_of, sizes_of
from bpipe.models.layer_counts import split_layers
from bpipe.models.layout import Setup
from bpipe.models.memory import besides_of, link_bytes
from bpipe.models.profile import Profile
from bpipe.plan.budget import Devices, OverBudget, one_budget_a_rank, plan_in_time, smallest_bytes, within
from bpipe.plan.fewest_layers import more_recomputed
from bpipe.plan.fit import Fit

# How many chunks a rank schedules are tried with that are made for a bound.
_CHUNKS = range(2, 9)
# What needs hardly less is no help.
HELPFUL = 0.99


def predicted_devices(setup: Setup, budget_bytes: Sequence[int], minimum_bytes: int = MINIMUM_BYTES) -> Devices:
    """Return the predicted inputs of a plan for a setup."""
    budgets = one_budget_a_rank(budget_bytes, setup.pipeline)
    plain, moving = (replace(setup, balance=name, how=BalanceConfig()) for name in ("none", "bpipe"))
    nodes = setup.how.hosts in (POOL, ALL) and len(set(moving.nodes())) > 1
    return Devices(
        build(plain.program()),
        sizes_of(setup, minimum_bytes),
        besides_of(plain),
        budgets,
        besides_of(moving),
        setup.how.hosts,
        moving.nodes() if nodes else (),
        link_bytes(setup),
        parts_of(setup, minimum_bytes),
    )


def within_budget(
    setup: Setup, budget_bytes: Sequence[int], minimum_bytes: int = MINIMUM_BYTES, profile: Profile | None = None
) -> tuple[Setup, Fit]:
    """Return the setup balanced within budgets, and its plan.

    Raises ValueError where no plan keeps them, with what would help.
    """
    devices = predicted_devices(setup, budget_bytes, minimum_bytes)
    found = within_or_remedies(setup, devices, minimum_bytes)
    if not found.moved_bytes:
        return replace(setup, balance="none", how=BalanceConfig(), budget_bytes=devices.budget_bytes), found
    found = plan_in_time(setup, devices, found, profile)
    return replace(setup, balance="bpipe", how=found.how, budget_bytes=devices.budget_bytes), found


def within_or_remedies(setup: Setup, devices: Devices, minimum_bytes: int = MINIMUM_BYTES) -> Fit:
    """Return the plan within budgets. Raises ValueError where there is none, with what would help."""
    try:
        return within(devices)
    except OverBudget as error:
        helpful = sorted(remedies(setup, devices, minimum_bytes), key=lambda way: way.need_bytes)
        lower = [way for way in helpful if way.need_bytes < HELPFUL * max(error.smallest_bytes)]
        said = ", ".join(f"{way.what} ({budget_text([way.need_bytes])} GiB{way.beside})" for way in lower)
        raise ValueError(
            f"by prediction {error}. "
            f"{f'What else would help: {said}' if lower else 'Nothing that was tried needs less'}"
        ) from None


@dataclass(frozen=True, slots=True)
class Remedy:
    """Another way to make it fit: the smallest budget with it. `beside`: what it takes within the present budget."""

    what: str
    need_bytes: int
    beside: str = ""


def remedies(setup: Setup, devices: Devices, minimum_bytes: int = MINIMUM_BYTES) -> Iterator[Remedy]:
    """Yield other ways to make it fit."""
    if devices.hosts == PAIR:
        yield Remedy(
            "any rank with room as host, --bpipe-hosts pool",
            smallest_bytes(_hosted(setup, POOL, devices, minimum_bytes)),
        )
    if devices.hosts in (PAIR, POOL):
        tiers = _hosted(setup, ALL, devices, minimum_bytes)
        yield Remedy("its node's memory behind other devices, --bpipe-hosts all", smallest_bytes(tiers), _beside(tiers))
    tried: list[tuple[str, Callable[[], Setup]]] = [
        (f"recompute {scope}", lambda scope=scope: replace(setup, recompute=scope))  # type: ignore[misc]
        for scope in more_recomputed(setup, partial(_keeps, devices, minimum_bytes))
    ]
    if setup.micro_batch > 1:
        half = setup.micro_batch // 2
        tried.append((f"micro-batch {half}", lambda: replace(setup, micro_batch=half)))
    moved = _layer_moved(setup, devices)
    if moved is not None:
        tried.append((f"layers {','.join(map(str, moved))}", lambda: replace(setup, layers=moved)))
    for what, change in tried:
        found = _way(what, change, minimum_bytes)
        if found is not None:
            yield found
    # Of the families that are made for a bound the way that needs least.
    for name in (name for name, family in FAMILIES.items() if family.within is not None):
        found_ways = (_way(*_chunked(setup, name, chunks), minimum_bytes) for chunks in _CHUNKS)
        yield from sorted((way for way in found_ways if way is not None), key=lambda way: way.need_bytes)[:1]


def _hosted(setup: Setup, hosts: str, devices: Devices, minimum_bytes: int) -> Devices:
    """The same with other hosts."""
    return predicted_devices(replace(setup, how=replace(setup.how, hosts=hosts)), devices.budget_bytes, minimum_bytes)


def _beside(devices: Devices) -> str:
    """What a device then has in its node's memory, if a plan keeps the budgets so."""
    try:
        most = max(within(devices).own_bytes)
    except OverBudget:
        return ""
    return (
        f"; within {budget_text(devices.budget_bytes)} with up to {budget_text([most])} of the node's memory a device"
        if most
        else ""
    )


def _way(what: str, change: Callable[[], Setup], minimum_bytes: int) -> Remedy | None:
    """None where this cannot be."""
    try:
        changed = change()
        return Remedy(what, smallest_bytes(predicted_devices(changed, [1], minimum_bytes)))
    except ValueError:
        return None


def _keeps(devices: Devices, minimum_bytes: int, changed: Setup) -> bool:
    """Return whether the changed plan keeps the smallest budget there is."""
    found = _way("", lambda: changed, minimum_bytes)
    return found is not None and found.need_bytes <= min(devices.budget_bytes)


def _chunked(setup: Setup, name: str, chunks: int) -> tuple[str, Callable[[], Setup]]:
    layers = split_layers(setup.model.num_layers, setup.pipeline * chunks)

    def change() -> Setup:
        if (
            layers is None
            or setup.schedule == name
            or FAMILIES[setup.schedule].num_pipes > 1
            or setup.vocabulary_parallel != Vocabulary.WHOLE.value
        ):
            raise ValueError("not another schedule of the same layers")
        return replace(setup, schedule=name, chunks=chunks, layers=layers, group=None, delay=0)

    return f"{name} with {chunks} chunks", change


def _layer_moved(setup: Setup, devices: Devices) -> tuple[int, ...] | None:
    """Return a layer less on the rank that needs most alone, one more on the one that needs least.

    None with chunks, or where it has only one.
    """
    needs = devices.need_bytes(devices.schedule)
    most, least = needs.index(max(needs)), needs.index(min(needs))
    if setup.num_stages != setup.pipeline or setup.layers[most] < 2 or most == least:
        return None
    return tuple(count - (stage == most) + (stage == least) for stage, count in enumerate(setup.layers))
