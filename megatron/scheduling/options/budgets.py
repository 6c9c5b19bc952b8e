"""Plan the balance of a run within `--bpipe-memory` before anything is measured.

The prediction is that of `bpipe simulate -- FLAGS`, by the same function; only `--bpipe-cluster` tells how long transfers
take. Imports no Megatron.
"""

import os
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.config.flags.values import AUTO, MemoryBudget
from bpipe.config.launch.megatron_settings import MegatronSettings
from bpipe.plan.budget import (
    balanced_costs,
    plan_in_time,
    plan_lines,
    predicted_devices,
    tightest_plan,
    within_prediction,
)
from bpipe.plan.options import setup_from
from bpipe.predict.cluster import cluster_named
from bpipe.schedule.families.families import FAMILIES
from bpipe.simulate.cost import Costs

# Bytes do not depend on the kind of device.
_ANY_DEVICE = "h100-80g"


class FirstPlan(NamedTuple):
    """The balance of a run before anything is measured."""

    balance: BalanceConfig | None = None

    lines: tuple[str, ...] = ()
    """Lines for the log: who hosts for whom, how much, and why."""

    costs: Costs | None = None
    """Costs of a plan in time once bytes are measured; None without a cluster, or if this plan is final."""


def first_plan(args: Any, config: ScheduleConfig) -> FirstPlan:
    """Return the plan of a schedule within the budget. Raises ValueError if no plan keeps it."""
    asked: MemoryBudget = args.bpipe_memory
    if args.bpipe_bound is not None:
        raise ValueError("--bpipe-memory and --bpipe-bound both say how to balance: give only one of them")
    budgets = budget_of(asked)
    if args.padded_vocab_size is None and args.vocab_size is None:
        # The tokenizer knows it later, and nothing trains before that.
        return FirstPlan(BalanceConfig(hosts=args.bpipe_hosts))
    nodes = max(1, args.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)))
    sizes = (args.padded_vocab_size or args.vocab_size, nodes, args.world_size // nodes, args.bpipe_min_bytes)
    if config.written is None and args.step_batch_size_schedule is not None:
        # Their number changes; more than fill the pipeline take no more memory.
        filling = FAMILIES[config.schedule].filling(config.num_ranks)
        config = replace(config, num_microbatches=max(config.num_microbatches, filling))
    how = (asked.learns, _on_cpu(), args.bpipe_hosts)
    settings = MegatronSettings.from_args(args)
    return _plan(settings, sizes, replace(config, balance=None), budgets, how, args.bpipe_cluster)


def budget_of(asked: MemoryBudget) -> tuple[int, ...]:
    """Return the budget in bytes. Raises ValueError for a device's own memory on a CPU, which has none."""
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
    # Not at the top: reading the flags needs no torch.
    from megatron.scheduling.start import startup

    return startup.is_cpu()


@lru_cache(maxsize=4)
def _plan(
    settings: MegatronSettings,
    sizes: tuple[int, int, int, int],
    config: ScheduleConfig,
    budgets: tuple[int, ...],
    how: tuple[bool, bool, str],
    cluster: str | None,
) -> FirstPlan:
    """Return the plan, cached: the start of a run asks for it several times.

    Args:
        sizes: The vocabulary, nodes, processes of each, and the fewest bytes of a storage that moves.
        how: Whether measured bytes will replace predicted ones, whether this is a CPU, and who may host.
        cluster: Its name or file, if the links are known.
    """
    (vocabulary, nodes, processes, minimum_bytes), (learns, on_cpu, hosts) = sizes, how
    try:
        placed = cluster_named(cluster or _ANY_DEVICE, (nodes, processes))
        setup = setup_from(settings, placed, vocabulary, "cpu" if on_cpu else "gpu")
        if (setup.pipeline, setup.num_stages) != (config.num_ranks, config.num_ranks * config.num_chunks):
            raise ValueError(
                f"the prediction has {setup.num_stages} stages on {setup.pipeline} ranks, but the schedule has "
                f"{config.num_ranks} ranks"
            )
        devices = replace(predicted_devices(setup, budgets, minimum_bytes), schedule=build(config))
    except ValueError as error:
        unknown = f"the memory of this run cannot be predicted ({error}): "
        if not learns:
            raise ValueError(f"--bpipe-memory: {unknown}let it be measured with {AUTO}:GIB") from None
        by_bytes = "" if cluster is None else ", and plans are made from bytes alone"
        return FirstPlan(
            BalanceConfig(hosts=hosts), (f"{unknown}the first iteration keeps the smallest bound{by_bytes}",)
        )
    if learns:
        fit = tightest_plan(devices)
        lines = ("the first iteration moves as much as helps, until bytes are measured:", *plan_lines(fit))
        return FirstPlan(fit.how, lines, None if cluster is None else balanced_costs(setup, devices, fit))
    try:
        fit = within_prediction(devices)
        if cluster is not None:
            fit = plan_in_time(setup, devices, fit)
    except ValueError as error:
        raise ValueError(f"--bpipe-memory: {error}. With {AUTO}:GIB the run starts anyway and measures") from None
    return FirstPlan(fit.how, tuple(plan_lines(fit)))
