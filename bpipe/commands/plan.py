"""`bpipe plan`: the fastest configurations of a model on a cluster, and the gain of balancing."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from bpipe.balance.config import BALANCES
from bpipe.commands.launch import REFUSES, reading_of
from bpipe.commands.plan_output import plan_notes, print_front, print_plan
from bpipe.commands.shared import TRAINED, cluster_of, measured_of, picture_file
from bpipe.commands.simulate import SUFFIXES, budgeted
from bpipe.commands.terminal import progress_of
from bpipe.config.flags import outputs
from bpipe.config.flags.budgets import MemoryBudget
from bpipe.config.flags.configurations import CONFIGURATION, LAUNCHED, MEASURED, SEARCHED_FLAGS
from bpipe.config.flags.flag import Command, Group, Options, Task
from bpipe.config.flags.values import positive
from bpipe.config.launch.megatron_command import Reading
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.answer import LAUNCH
from bpipe.plan.budget import within_budget
from bpipe.plan.candidates import Candidate
from bpipe.plan.explain import verdict
from bpipe.plan.front import find_front
from bpipe.plan.options import filled, fp8_of, model_of, setup_of, training_of
from bpipe.plan.predict import predict
from bpipe.plan.refusals import refused_launch
from bpipe.plan.search import search
from bpipe.plan.slices import usual_slices
from bpipe.plan.space import Space, divisors, usual_contexts, with_free_switches
from bpipe.predict.cluster import Cluster
from bpipe.predict.layout import Setup
from bpipe.predict.memory import roomy_bytes
from bpipe.schedule.families.families import FAMILIES, SEARCHED
from bpipe.schedule.hosts import IN_NODES

# Exit status if nothing was found; 2 is an error of the user's.
NO_ROWS = 3
# How a model is cut: the search chooses, but among what is asked for.
CUT = ("tensor", "pipeline", "micro_batch", "chunks")


COMMAND = Command(
    (
        *TRAINED[:-1],
        MEASURED,
        LAUNCHED,
        SEARCHED_FLAGS,
        Group(
            "output",
            (outputs.rows(10, positive), outputs.FRONT, outputs.PLOT, outputs.HTML, outputs.FORMAT, outputs.EMIT_ARGS),
        ),
    ),
    (
        Task(
            "find the fastest configurations of a model on a cluster",
            "bpipe plan --model gpt3-96b --cluster a100-80g:4x8 --gbs 128",
            ("model", "cluster", "global_batch", "schedule", "recompute", "balance", "rows"),
        ),
        Task(
            "find what to change in a launch",
            "bpipe plan --cluster h100-80g --launch launch.json",
            ("launch", "megatron", "emit_args"),
        ),
        Task(
            "keep within a memory budget",
            "bpipe plan --model llama3-70b --cluster h100-80g:8x8 --gbs 256 --memory 70",
            ("memory", "hosts"),
        ),
        Task(
            "find the fastest configuration for every amount of memory",
            "bpipe plan --model gpt3-96b --cluster a100-80g:4x8 --gbs 128 --front --html front.html",
            ("front", "plot", "html"),
        ),
    ),
)


def run(asked: Options) -> int:
    reading = reading_of(asked, SEARCHED_FLAGS.flags)
    # The search chooses these whatever the launch says; `yours` below is the launch as it is.
    every = filled(Options(**{**vars(asked), **dict.fromkeys(("hosts", *CUT))}), reading, ("global_batch",))
    options = Options(
        **{**vars(every), **{name: getattr(asked, name) for name in ("recompute", "schedule", "balance")}}
    )
    yours = None if reading is None else _yours(asked, reading)
    if options.global_batch is None:
        raise ValueError("the launch does not say --global-batch-size: give --gbs")
    space = _space(asked, options, _contexts(asked, every, reading), reading)
    # A search makes millions of small values, hardly any in a cycle: collecting cycles took a fifth of its time.
    gc.set_threshold(200_000, 20, 100)
    if options.front:
        plot = picture_file(options.plot, SUFFIXES)
        with progress_of("front") as progress:
            front = find_front(space, progress)
        print_front(front, space, options, plot)
        return NO_ROWS if front.winner is None else 0
    drawn = next((flag.name for flag in (outputs.PLOT, outputs.HTML) if getattr(options, flag.field) is not None), None)
    if drawn is not None:
        raise ValueError(f"{drawn} draws a front: give --front, too, or leave it out")
    # With a budget, or with own memory as host, balanced rows evict only what must leave.
    evicts_least = options.memory is not None or bool(set(space.hosts) & set(IN_NODES))
    with progress_of("plan") as progress:
        num_rows = max(options.rows, options.emit_args or 0)
        outcome = search(space, num_rows, progress, *([_evicting_least(space)] if evicts_least else ()))
        differs_from = reading if reading is None or _is_as_launched(asked, reading) else None
        notes = None if options.emit_args is not None else plan_notes(outcome, differs_from)
    if notes is not None:
        print_plan(outcome, notes, options.format, reading, yours)
    elif options.emit_args > len(outcome.rows):
        rows = f"there are {len(outcome.rows)} rows. {verdict(outcome).text}"
        raise ValueError(f"--emit-args {options.emit_args}: {rows}")
    else:
        print(shlex.join(megatron_flags(outcome.rows[options.emit_args - 1].setup)))
    return 0 if outcome.rows else NO_ROWS


def _is_as_launched(asked: Options, reading: Reading) -> bool:
    """Whether the launch says all that the search does not choose: a row's flags are then a change of the launch."""
    chosen = {
        *(*CUT, "recompute", "schedule", "balance", "hosts", "context", "slices", "slice_lengths", "cp_comm_type"),
        *("expert", "vocabulary_parallel", "memory"),
    }
    others = {name: getattr(asked, name, None) for name in reading.options if name not in chosen}
    return asked.model is None and all(value in (None, False, reading.options[name]) for name, value in others.items())


def _space(asked: Options, options: Options, contexts: tuple[int, ...], reading: Reading | None) -> Space:
    model, cluster = model_of(options), _budgeted(cluster_of(options, reading), options.memory)
    if cluster.budget_bytes is None:
        cluster = replace(cluster, budget_bytes=roomy_bytes(cluster, options.kernels))
    profile, traced = measured_of(options)
    fp8, schedules = fp8_of(options), tuple(asked.schedule)
    if fp8 is not None and schedules == tuple(SEARCHED):
        # With FP8, split backwards are refused: schedules that split are tried only on request.
        schedules = tuple(name for name in SEARCHED if not FAMILIES[name].splits)
    space = Space(
        model=model,
        cluster=cluster,
        global_batch=options.global_batch,
        sequence=model.sequence,
        attention=options.attention,
        recompute=tuple(options.recompute),
        schedules=schedules,
        balances=tuple(options.balance),
        max_micro_batch=options.max_micro_batch,
        max_chunks=options.max_chunks,
        uneven=not options.even_layers,
        precision=options.precision,
        kernels=options.kernels,
        cp_comm_type=options.cp_comm_type,
        traced=traced,
        **training_of(options),
        profile=profile,
        formula=options.flops_formula,
        hosts=tuple(asked.hosts or (options.hosts,)),
        expert=options.expert,
        contexts=contexts,
        vocabulary_parallel=None if asked.vocabulary_parallel is None else tuple(asked.vocabulary_parallel),
        tensors=_one_of(asked.tensor, divisors(cluster.devices_per_domain), "--tp", f"the devices of {cluster.domain}"),
        pipelines=_one_of(asked.pipeline, divisors(cluster.num_devices), "--pp", "the devices of the cluster"),
        micro_batches=None if asked.micro_batch is None else tuple(asked.micro_batch),
        chunk_counts=None if asked.chunks is None else tuple(asked.chunks),
        others=() if reading is None else reading.others,
        slices=_slices(asked, reading, model.sequence),
    )
    return with_free_switches(space)


def _slices(asked: Options, reading: Reading | None, sequence: int) -> tuple[int, ...]:
    """Return the numbers of slices to try: those asked for, or else the usual ones and that of the launch."""
    if asked.slices is not None:
        return tuple(sorted(set(asked.slices)))
    own = 1 if reading is None else reading.options.get("slices", 1)
    return tuple(sorted({*usual_slices(sequence), own}))


def _one_of(asked: Sequence[int] | None, possible: Sequence[int], flag: str, whole: str) -> tuple[int, ...] | None:
    """Return the sizes asked for. Raises ValueError for one that does not divide the whole."""
    for number in asked or ():
        if number not in possible:
            raise ValueError(f"{flag} {number} does not divide {whole}: choose from {', '.join(map(str, possible))}")
    return None if asked is None else tuple(asked)


def _contexts(asked: Options, every: Options, reading: Reading | None) -> tuple[int, ...]:
    """Return the context-parallel sizes to try: those asked for, or else the usual ones and that of the launch."""
    if asked.context is not None:
        return tuple(sorted(set(asked.context)))
    model, cluster = model_of(every), cluster_of(every, reading)
    is_possible = (
        every.attention == "flash"
        and every.kernels == "gpu"
        and model.no_context(model.sequence, every.cp_comm_type) is None
    )
    return tuple(sorted({*(usual_contexts(model.sequence, cluster.num_devices) if is_possible else ()), every.context}))


def _budgeted(cluster: Cluster, asked: MemoryBudget | None) -> Cluster:
    if asked is None or asked.budget_bytes is None:
        return cluster
    if len(asked.budget_bytes) > 1:
        raise ValueError("--memory: the search has pipelines of different lengths, so give one number for all ranks")
    return replace(cluster, budget_bytes=asked.budget_bytes[0])


def _evicting_least(space: Space) -> Callable[[Setup], Setup]:
    """Return how a balanced setup is planned again, to evict no more than its budget demands."""

    def planned(setup: Setup) -> Setup:
        # One that only just fits may have no such plan, and stays.
        with suppress(ValueError):
            return within_budget(setup, (space.cluster.limit_bytes,), profile=space.profile)[0]
        return setup

    return planned


def _yours(asked: Options, reading: Reading) -> Candidate | str:
    """Return the prediction of the launch as it is, or why it cannot run on this cluster."""
    if reading.refused is not None:
        return f"{REFUSES}: {reading.refused}"
    # Of the launch's configuration only the budget and its hosts are replaced by the search's.
    launched = {name: None for name in (flag.field for flag in CONFIGURATION.flags) if name not in ("memory", "hosts")}
    options = Options(**{**vars(asked), **launched, "no_sequence_parallel": False})
    try:
        every = filled(options, reading, ())
        if every.balance == BALANCES[0]:
            every.memory = None
        profile, traced = measured_of(every)
        own = setup_of(every, _budgeted(cluster_of(every, reading), asked.memory))
        setup, _ = budgeted(every, replace(own, traced=traced), profile)
        prediction = predict(setup, profile, formula=every.flops_formula)
        return Candidate(prediction, LAUNCH, refused=refused_launch(setup, reading))
    except ValueError as error:
        return str(error)
