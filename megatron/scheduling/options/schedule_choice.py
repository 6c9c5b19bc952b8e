"""Find out which schedule a run is to have, and whether our own loop runs it.

In: Megatron's arguments, once it has judged them. Out: what to build, or None where Megatron's own loop runs what was
asked for. Raises ValueError with the way out. Knows no tensors and imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, built, config_of_schedule
from bpipe.config.features.feature import Settings
from bpipe.config.features.queries import asked_by, reasons_of, sliced_reasons
from bpipe.config.features.table import PLACED, SHARDED
from bpipe.config.flags import schedules
from bpipe.runtime.vocabulary.rows import Rows
from bpipe.schedule.check.rules import check_microbatch_order
from bpipe.schedule.families.families import (
    FAMILIES,
    default_family,
    families_that_take,
    families_with_shards,
)
from bpipe.schedule.families.family import TAKEN, Family
from bpipe.schedule.hosts import HOST, PAIR
from bpipe.schedule.layout import EVEN, REDISTRIBUTE, Vocabulary
from bpipe.schedule.memory import plain
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs
from bpipe.transport import AUTO
from megatron.scheduling.hooks import upstream
from megatron.scheduling.options import budgets
from megatron.scheduling.options.derived_flags import of_file
from megatron.scheduling.options.sizes import Sizes
from megatron.scheduling.placement.positions import Positions

# What a launch says of a generated schedule.
_ROWS = (*schedules.GENERATED, schedules.VOCABULARY, schedules.VOCABULARY_INPUT)
_WAY_OUT = (
    "a rank's chunks are its virtual stages, --num-virtual-stages-per-pipeline-rank or "
    "--num-layers-per-virtual-pipeline-stage"
)


def own_schedule(args: Any) -> ScheduleConfig | None:
    """Return what our own loop is to run at first; None where Megatron's own loop runs it.

    Raises ValueError where it does not fit the run's sizes, and for what is no schedule.
    """
    config, ours = _asked_for(args)
    return config if ours else None


def first_schedule(args: Any) -> Schedule:
    """Return the schedule with which the run begins, whoever runs it; with a full pipeline where the number of
    micro-batches is unknown.

    Raises ValueError as `own_schedule` does.
    """
    config, _ = _asked_for(args)
    if config.written is None and Sizes.of(args, config.layout.num_pipes).num_microbatches is None:
        config = replace(config, num_microbatches=FAMILIES[config.schedule].filling(config.num_ranks))
    return built(config)


def requested_balance(args: Any) -> tuple[BalanceConfig | None, tuple[str, ...]]:
    """Return how to balance whatever runs, and lines that say why it is balanced so.

    Raises ValueError as `own_schedule` does.
    """
    config, _ = _asked_for(args)
    return config.balance, () if args.bpipe_memory is None else budgets.lines_of_plan(args, config)


def requested_costs(args: Any) -> Costs | None:
    """Return the costs by which to plan in time once bytes are measured. Raises ValueError as `own_schedule` does."""
    config, _ = _asked_for(args)
    return None if args.bpipe_memory is None else budgets.planned_costs(args, config)


def _asked_for(args: Any) -> tuple[ScheduleConfig, bool]:
    """Return the schedule, within its budget, and whether our own loop runs it."""
    config, ours = _as_named(args)
    if args.bpipe_memory is None:
        if args.bpipe_cluster is not None:
            raise ValueError(
                f"--bpipe-cluster {args.bpipe_cluster} says how long transfers take within a budget: give "
                "--bpipe-memory too"
            )
        return config, ours
    if config.balance is None:
        raise ValueError("--bpipe-memory says how to balance: give --bpipe too, or leave it out")
    if config.slices > 1 and config.vocabulary is not Vocabulary.WHOLE:
        raise ValueError(
            f"--bpipe-memory: budgets in bytes do not yet support {config.slices} slices together with vocabulary "
            "shards: use --bpipe-bound, which counts slices of a chunk, or leave out one of the three"
        )
    return budgets.budgeted(args, config), ours


def _as_named(args: Any) -> tuple[ScheduleConfig, bool]:
    upstream.require(args, "schedule_choice")
    name = args.bpipe_schedule or default_family(args.virtual_pipeline_model_parallel_size or 1, _combines(args))
    balance = balance_of(args.bpipe, args.bpipe_bound, args.bpipe_hosts)
    if args.bpipe_bound is not None and balance is None:
        raise ValueError(
            f"--bpipe-bound {_listed(args.bpipe_bound)} says how to balance: give --bpipe too, or leave it out"
        )
    if args.bpipe_hosts != PAIR:
        _check_hosts(args, balance)
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


def balance_of(balance: bool, bounds: tuple[int, ...] | None, hosts: str = PAIR) -> BalanceConfig | None:
    """Return how to balance; None for not at all. `bounds`: micro-batches of a chunk, for all ranks or each.

    With bounds host buffers are there all the time. `hosts`: who may host (`schedule.hosts`).
    """
    return BalanceConfig(bounds, buffers_stay=bounds is not None, hosts=hosts) if balance else None


def _check_hosts(args: Any, balance: BalanceConfig | None) -> None:
    wanted = f"--bpipe-hosts {args.bpipe_hosts}"
    if balance is None:
        raise ValueError(f"{wanted} says how to balance: give --bpipe too, or leave it out")
    if args.bpipe_hosts == HOST:
        if args.bpipe_transport not in (AUTO, HOST):
            raise ValueError(
                f"{wanted}: nothing goes to another rank, so --bpipe-transport {args.bpipe_transport} has nothing to "
                f"carry"
            )
    elif args.bpipe_transport == "host":
        raise ValueError(
            f"{wanted}: with --bpipe-transport host each rank keeps evicted activations in its own CPU memory: leave "
            "one of them out"
        )


def _listed(bounds: tuple[int, ...]) -> str:
    return ",".join(map(str, bounds))


def vocabulary_of(args: Any) -> Vocabulary:
    """Return how the output layer is split."""
    # Fewer layers for the last stage are a layout, which Megatron has by now.
    whole = args.bpipe_vocabulary in (None, REDISTRIBUTE)
    return Vocabulary.WHOLE if whole else Vocabulary(args.bpipe_vocabulary)


def unplaced(args: Any, own: ScheduleConfig) -> list[str]:
    """Return why these arguments do not go together with the schedule's placement of stages and shards: a line each."""
    found = [] if Positions.of(own.layout).native else reasons_of(PLACED, args, asked_by(args))
    if own.vocabulary is not Vocabulary.WHOLE:
        found += reasons_of(SHARDED, args, f"--bpipe-vocabulary {args.bpipe_vocabulary}")
        found += _unequal_shards(args)
    if own.slices == 1 and args.bpipe_slice_lengths != EVEN:
        found.append("--bpipe-slice-lengths says how long slices are: give --bpipe-slices too, or leave it out")
    if own.slices > 1:
        found += sliced_reasons(args, own.slices, args.bpipe_strict)
    return found


def _unequal_shards(args: Any) -> Iterator[str]:
    if args.padded_vocab_size is None:
        return
    try:
        Rows(args.padded_vocab_size, args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    except ValueError as error:
        yield f"--bpipe-vocabulary {args.bpipe_vocabulary}: {error}"


def _is_megatrons(family: Family) -> bool:
    return family.exchange is not Exchange.POSTED


def _combines(args: Any) -> bool:
    """Return whether Megatron's loop is to run forwards and backwards at once."""
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
    if args.bpipe_kept is not None and not family.splits:
        raise ValueError(
            f"--bpipe-kept {plain(args.bpipe_kept)}: {family.name} does not split backwards into halves: leave it out"
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
    """In what the file differs from the run."""
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
    """Which flags say what the file says itself, and the other way round."""
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
