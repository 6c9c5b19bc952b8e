"""Plan what leaves a run's devices within `--bpipe-memory`, before anything was measured.

In: Megatron's arguments, and the schedule that was asked for. Out: how to balance it, and lines for the log. The
prediction is that of `bpipe simulate -- FLAGS`, by the same function; only `--bpipe-cluster` says how long transfers
take. Imports no Megatron.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.config.flags.budgets import MemoryBudget
from bpipe.config.flags.values import AUTO
from bpipe.config.launch.megatron_settings import MegatronSettings
from bpipe.plan.budget import Devices, balanced_costs, plan_in_time, tightest_plan
from bpipe.plan.budget_fit import predicted_devices, within_prediction
from bpipe.plan.fit import plan_lines
from bpipe.plan.options import setup_from
from bpipe.predict.cluster_file import cluster_named
from bpipe.predict.layout import Setup
from bpipe.schedule.families.families import FAMILIES
from bpipe.simulate.cost import Costs
from megatron.scheduling.hooks import upstream

# Bytes depend on no kind of device, so any stands for all.
_ANY_DEVICE = "h100-80g"


def budgeted(args: Any, config: ScheduleConfig) -> ScheduleConfig:
    """Return the schedule balanced within the budget. Raises ValueError where no plan keeps it."""
    return replace(config, balance=_planned(args, config).how)


def lines_of_plan(args: Any, config: ScheduleConfig) -> tuple[str, ...]:
    """Return log lines that say who hosts for whom by the plan, how much, and why."""
    return _planned(args, config).told


def planned_costs(args: Any, config: ScheduleConfig) -> Costs | None:
    """Return the costs by which to plan in time once bytes are measured; None where no cluster is given, or the
    first plan is final."""
    return _planned(args, config).costs


class _Plan(NamedTuple):
    """How to balance at first, lines that say why, and seconds and links for whoever plans anew."""

    how: BalanceConfig
    told: tuple[str, ...] = ()
    costs: Costs | None = None


def _planned(args: Any, config: ScheduleConfig) -> _Plan:
    upstream.require(args, "budgets")
    asked: MemoryBudget = args.bpipe_memory
    if args.bpipe_bound is not None:
        raise ValueError("--bpipe-memory and --bpipe-bound both say how to balance: give only one of them")
    budgets = budget_of(asked)
    if args.padded_vocab_size is None and args.vocab_size is None:
        # The tokenizer says it later, and nothing trains before.
        return _Plan(BalanceConfig(hosts=args.bpipe_hosts))
    nodes = max(1, args.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)))
    sizes = (args.padded_vocab_size or args.vocab_size, nodes, args.world_size // nodes, args.bpipe_min_bytes)
    if config.written is None and args.step_batch_size_schedule is not None:
        # They change; more than fill the pipeline take no more room.
        filling = FAMILIES[config.schedule].filling(config.num_ranks)
        config = replace(config, num_microbatches=max(config.num_microbatches, filling))
    how = (asked.learns, _on_cpu(), args.bpipe_hosts)
    settings = MegatronSettings.from_args(args)
    return _plan(settings, sizes, replace(config, balance=None), budgets, how, args.bpipe_cluster)


def budget_of(asked: MemoryBudget) -> tuple[int, ...]:
    """Return the budget in bytes.

    Raises ValueError where a device's own memory was meant and nothing says how much that is.
    """
    if asked.budget_bytes is not None:
        return asked.budget_bytes
    if _on_cpu():
        raise ValueError(
            f"--bpipe-memory {AUTO}: a CPU has no device memory whose size could be read: say how much each rank may "
            f"hold, --bpipe-memory {AUTO}:GIB"
        )
    import torch

    return (int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory),)


def _on_cpu() -> bool:
    # Not at the top: who only reads the flags needs no torch.
    from megatron.scheduling.start import startup

    return startup.device_type() == "cpu"


@lru_cache(maxsize=4)
def _plan(
    settings: MegatronSettings,
    sizes: tuple[int, int, int, int],
    config: ScheduleConfig,
    budgets: tuple[int, ...],
    how: tuple[bool, bool, str],
    cluster: str | None,
) -> _Plan:
    """`how`: whether measured bytes replace predicted ones, whether this is a CPU, and who may host.

    `cluster`: where links are known.
    """
    (vocabulary, nodes, each, minimum_bytes), (learns, on_cpu, hosts) = sizes, how
    try:
        setup = setup_from(
            settings, cluster_named(cluster or _ANY_DEVICE, (nodes, each)), vocabulary, "cpu" if on_cpu else "gpu"
        )
        devices = _devices(setup, config, budgets, minimum_bytes)
    except ValueError as error:
        if not learns:
            raise ValueError(
                f"--bpipe-memory: the memory of this run cannot be predicted ({error}): let it be measured with "
                f"{AUTO}:GIB"
            ) from None
        told = f"the memory of this run cannot be predicted ({error}): the first iteration keeps the smallest bound"
        return _Plan(
            BalanceConfig(hosts=hosts), (told if cluster is None else f"{told}, and plans are made from bytes alone",)
        )
    if learns:
        found = tightest_plan(devices)
        told = "the first iteration moves as much as helps, until bytes are measured:"
        return _Plan(
            found.how, (told, *plan_lines(found)), None if cluster is None else balanced_costs(setup, devices, found)
        )
    try:
        found = within_prediction(devices)
        if cluster is not None:
            found = plan_in_time(setup, devices, found)
    except ValueError as error:
        raise ValueError(f"--bpipe-memory: {error}. With {AUTO}:GIB the run starts anyway and measures") from None
    return _Plan(found.how, tuple(plan_lines(found)))


def _devices(setup: Setup, config: ScheduleConfig, budgets: tuple[int, ...], minimum_bytes: int) -> Devices:
    """What is predicted, with the very schedule that this run has."""
    if (setup.pipeline, setup.num_stages) != (config.num_ranks, config.num_ranks * config.num_chunks):
        raise ValueError(
            f"the prediction has {setup.num_stages} stages on {setup.pipeline} ranks, but the schedule has "
            f"{config.num_ranks} ranks"
        )
    return replace(predicted_devices(setup, budgets, minimum_bytes), schedule=build(config))
