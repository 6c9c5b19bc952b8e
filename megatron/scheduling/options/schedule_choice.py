"""Find the schedule that a run's validated arguments ask for, and whether our own loop runs it.

Within `--bpipe-memory` its balance is planned by the function of `bpipe simulate -- FLAGS`, before anything is measured.
Knows no tensors and imports no Megatron.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build, built, config_of_schedule
from bpipe.config.features.queries import asked_by, reasons_of, sliced_reasons
from bpipe.config.features.table import PLACED, SHARDED, Settings
from bpipe.config.flags import schedules
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
from bpipe.predict.slices import even_bounds, listed_bounds
from bpipe.schedule.check.rules import check_microbatch_order
from bpipe.schedule.families.families import (
    FAMILIES,
    default_family,
    families_that_take,
    families_with_shards,
)
from bpipe.schedule.families.family import TAKEN, Family
from bpipe.schedule.hosts import HOST, PAIR
from bpipe.schedule.layout import EVEN, Vocabulary
from bpipe.schedule.memory import plain
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs
from megatron.scheduling.options.flags import Sizes, of_file
from megatron.scheduling.placement.positions import Positions

# What a launch says of a generated schedule.
_ROWS = (*schedules.GENERATED, schedules.VOCABULARY, schedules.VOCABULARY_INPUT)
_WAY_OUT = (
    "a rank's chunks are its virtual stages, --num-virtual-stages-per-pipeline-rank or "
    "--num-layers-per-virtual-pipeline-stage"
)


class FirstPlan(NamedTuple):
    """The balance of a run before anything is measured."""

    balance: BalanceConfig | None = None

    lines: tuple[str, ...] = ()
    """Lines for the log: who hosts for whom, how much, and why."""

    costs: Costs | None = None
    """Costs of a plan in time once bytes are measured; None without a cluster, or if this plan is final."""


class Requested(NamedTuple):
    """The schedule that a run asks for."""

    config: ScheduleConfig
    """The schedule, balanced within the budget if there is one."""

    own_loop: bool
    """Whether our own loop runs it, and not Megatron's."""

    plan: FirstPlan = FirstPlan()
    """The balance within a budget."""

    @property
    def own(self) -> ScheduleConfig | None:
        """The schedule if our own loop runs it."""
        return self.config if self.own_loop else None


def requested(args: Any) -> Requested:
    """Return the schedule that the arguments ask for.

    Raises ValueError if there is no such schedule, or if it does not fit the run's sizes or its budget.
    """
    config, own_loop = _as_named(args)
    if args.bpipe_memory is None:
        if args.bpipe_cluster is not None:
            raise ValueError(
                f"--bpipe-cluster {args.bpipe_cluster} says how long transfers take within a budget: give "
                "--bpipe-memory too"
            )
        return Requested(config, own_loop)
    if config.balance is None:
        raise ValueError("--bpipe-memory says how to balance: give --bpipe too, or leave it out")
    if config.slices > 1 and config.vocabulary is not Vocabulary.WHOLE:
        raise ValueError(
            f"--bpipe-memory: budgets in bytes do not yet support {config.slices} slices together with vocabulary "
            "shards: use --bpipe-bound, which counts slices of a chunk, or leave out one of the three"
        )
    plan = first_plan(args, config)
    return Requested(replace(config, balance=plan.balance), own_loop, plan)


def first_schedule(args: Any) -> Schedule:
    """Return the schedule with which the run begins, whoever runs it.

    If the number of micro-batches is unknown, they fill the pipeline. Raises ValueError as `requested` does.
    """
    config = requested(args).config
    if config.written is None and Sizes.of(args, config.layout.num_pipes).num_microbatches is None:
        config = replace(config, num_microbatches=FAMILIES[config.schedule].filling(config.num_ranks))
    return built(config)


def _as_named(args: Any) -> tuple[ScheduleConfig, bool]:
    name = args.bpipe_schedule or default_family(args.virtual_pipeline_model_parallel_size or 1, _combines(args))
    bounds, hosts, balance = args.bpipe_bound, args.bpipe_hosts, None
    if args.bpipe:
        # With bounds, host buffers exist all the time.
        balance = BalanceConfig(bounds, buffers_stay=bounds is not None, hosts=hosts)
    elif bounds is not None or hosts != PAIR:
        wanted = f"--bpipe-hosts {hosts}" if bounds is None else f"--bpipe-bound {','.join(map(str, bounds))}"
        raise ValueError(f"{wanted} says how to balance: give --bpipe too, or leave it out")
    if hosts == HOST and args.bpipe_transport not in (AUTO, HOST):
        carried = f"--bpipe-transport {args.bpipe_transport} has nothing to carry"
        raise ValueError(f"--bpipe-hosts {hosts}: nothing goes to another rank, so {carried}")
    if hosts not in (PAIR, HOST) and args.bpipe_transport == "host":
        raise ValueError(
            f"--bpipe-hosts {hosts}: with --bpipe-transport host each rank keeps evicted activations in its own CPU "
            "memory: leave one of them out"
        )
    vocabulary = vocabulary_of(args)
    if name not in FAMILIES:
        if vocabulary is not Vocabulary.WHOLE:
            raise ValueError(
                f"--bpipe-vocabulary {vocabulary.value}: --bpipe-schedule {name} is a file; choose from "
                f"{families_with_shards()}"
            )
        return _from_file(args, name, balance), True
    return _of_family(args, FAMILIES[name], balance, vocabulary)


def _of_family(
    args: Any, family: Family, balance: BalanceConfig | None, vocabulary: Vocabulary
) -> tuple[ScheduleConfig, bool]:
    sizes = Sizes.of(args, family.num_pipes)
    values = {flag.field: getattr(args, flag.of_launch.field) for flag in _ROWS}
    asked = schedules.schedule_fields(values)
    ours = args.bpipe_executor or not _is_megatrons(family) or vocabulary is not Vocabulary.WHOLE or asked["slices"] > 1
    _check_asked(args, family, asked)
    first = sizes.num_microbatches
    try:
        config = ScheduleConfig(
            schedule=family.name,
            num_ranks=sizes.num_ranks,
            num_microbatches=first or family.num_pipes,
            num_chunks=sizes.num_chunks,
            balance=balance,
            exchange=Exchange.POSTED if ours else None,
            **asked,
        )
        # Of Megatron's own schedule only a bound can be more than there is.
        if first is not None and (ours or args.bpipe_bound is not None):
            built(config)
    except ValueError as error:
        raise ValueError(f"--bpipe-schedule {family.name}: {error}\n  {_WAY_OUT}") from None
    return config, ours


def vocabulary_of(args: Any) -> Vocabulary:
    return Vocabulary.WHOLE if args.bpipe_vocabulary is None else Vocabulary(args.bpipe_vocabulary)


def unplaced(args: Any, own: ScheduleConfig) -> list[str]:
    """Return why these arguments do not fit the schedule's placement of stages and shards, a line per reason."""
    problems = [] if Positions.of(own.layout).native else reasons_of(PLACED, args, asked_by(args))
    if own.vocabulary is not Vocabulary.WHOLE:
        # Not at the top: reading the flags needs no torch.
        from bpipe.runtime.shards import Rows

        problems += reasons_of(SHARDED, args, f"--bpipe-vocabulary {args.bpipe_vocabulary}")
        try:
            if args.padded_vocab_size is not None:
                Rows(args.padded_vocab_size, args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
        except ValueError as error:
            problems.append(f"--bpipe-vocabulary {args.bpipe_vocabulary}: {error}")
    if own.slices == 1 and args.bpipe_slice_lengths != EVEN:
        problems.append("--bpipe-slice-lengths says how long slices are: give --bpipe-slices too, or leave it out")
    if own.slices > 1:
        problems += [*sliced_reasons(args, own.slices, args.bpipe_strict), *_uncut(args, own.slices)]
    return problems


def _uncut(args: Any, slices: int) -> list[str]:
    """Return why a sequence has no slices of the lengths asked for, if it has none."""
    lengths = args.bpipe_slice_lengths
    sizes = (args.seq_length, slices, args.tensor_model_parallel_size if args.sequence_parallel else 1)
    try:
        listed_bounds(lengths, *sizes) if isinstance(lengths, tuple) else even_bounds(*sizes)
    except ValueError as error:
        named = lengths if isinstance(lengths, str) else ",".join(map(str, lengths))
        return [f"--bpipe-slices {slices} --bpipe-slice-lengths {named}: {error}"]
    return []


def _is_megatrons(family: Family) -> bool:
    return family.exchange is not Exchange.POSTED


def _combines(args: Any) -> bool:
    """Whether Megatron's loop is to run forwards and backwards at once."""
    return bool(Settings(args).overlap_moe_expert_parallel_comm)


def _check_asked(args: Any, family: Family, asked: Mapping[str, Any]) -> None:
    if _is_megatrons(family) and family.overlaps is not _combines(args):
        way_out = "give that flag, or leave" if family.overlaps else "drop that flag, or leave"
        raise ValueError(
            f"--bpipe-schedule {family.name}: Megatron's loop runs it {'with' if family.overlaps else 'without'} "
            f"--overlap-moe-expert-parallel-comm only: {way_out} --bpipe-schedule out"
        )
    for flag in schedules.ORDER:
        name, option = flag.field, TAKEN[flag.field]
        if asked[name] != option.default and not family.takes(name):
            raise ValueError(
                f"{flag.in_launch} {asked[name]}: {family.name} {option.metadata['lack']}: choose from "
                f"{families_that_take(name)}"
            )
    if asked["group_size"] is not None and _is_megatrons(family):
        raise ValueError(
            f"--bpipe-group {asked['group_size']}: for Megatron's own schedule, use "
            "--microbatch-group-size-per-virtual-pipeline-stage"
        )
    if args.bpipe_costs is not None and not family.splits:
        raise ValueError(f"--bpipe-costs: {family.name} has the same order at any costs: leave it out")
    if args.bpipe_hop is not None and args.bpipe_costs is None:
        raise ValueError(
            f"--bpipe-hop {plain(args.bpipe_hop)} is in the unit of --bpipe-costs: give --bpipe-costs too, or leave "
            "it out"
        )
    if asked["input_shards"] and asked["vocabulary"] is Vocabulary.WHOLE:
        raise ValueError(
            "--bpipe-vocabulary-input splits the embedding in addition to the output layer: give --bpipe-vocabulary 1, "
            "2 or interlaced too"
        )


# -- from a file
# ----------------------------------------------------------------------------------------------------------------------


def _from_file(args: Any, name: str, balance: BalanceConfig | None) -> ScheduleConfig:
    schedule = of_file(name)
    problems = list(_unlike(args, schedule, Sizes.of(args, schedule.layout.num_pipes)))
    if not problems:
        try:
            config = config_of_schedule(schedule, balance)
            check_microbatch_order(built(config))
            return config
        except ValueError as error:
            problems = [str(error)]
    raise ValueError("\n  ".join(f"--bpipe-schedule {name}: {problem}" for problem in problems))


def _unlike(args: Any, schedule: Schedule, sizes: Sizes) -> Iterator[str]:
    """Yield the differences of the file and the run."""
    microbatches = sizes.num_microbatches
    if schedule.num_ranks != sizes.num_ranks:
        yield (
            f"it has {schedule.num_ranks} ranks, but the pipeline has {sizes.num_ranks}: use "
            f"--pipeline-model-parallel-size {schedule.num_ranks}"
        )
    elif schedule.num_chunks != sizes.num_chunks:
        yield f"it has {schedule.num_chunks} stages per rank, but this run has {sizes.num_chunks}: {_WAY_OUT}"
    if microbatches is not None and schedule.num_whole_microbatches != microbatches:
        size = schedule.num_whole_microbatches * args.micro_batch_size * sizes.num_replicas
        yield (
            f"it has {schedule.num_whole_microbatches} micro-batches, but an iteration has {microbatches}: use "
            f"--global-batch-size {size}"
        )
    if args.bpipe_slices not in (None, schedule.layout.slices):
        yield (
            f"it has {schedule.layout.slices} slices per micro-batch, not {args.bpipe_slices}: leave --bpipe-slices out"
        )
    yield from _not_for_a_file(args, schedule)
    if schedule.layout.shard_kinds:
        yield "schedule files with vocabulary shards cannot be trained yet: use one without shards"


def _not_for_a_file(args: Any, schedule: Schedule) -> Iterator[str]:
    """Yield the flags that a file replaces, and those that it needs."""
    for flag in schedules.GENERATED:
        # The file says how many slices it has.
        if flag is not schedules.SLICES and getattr(args, flag.of_launch.field) not in (None, AUTO):
            yield f"{flag.in_launch} applies only to generated schedules: leave it out"
    if schedule.hosts is not None:
        for name, value in {"bound": args.bpipe_bound, "memory": args.bpipe_memory}.items():
            if value is not None:
                yield f"it moves activations itself, within its own bounds: leave --bpipe-{name} out"
        if not args.bpipe:
            yield "it moves activations: give --bpipe too"


# Bytes do not depend on the kind of device.
_ANY_DEVICE = "h100-80g"


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
