"""`bpipe plan`: the fastest configurations of a model on a cluster, and the gain of balancing."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from bpipe.balance.config import BALANCES
from bpipe.commands.launch import REFUSES, TRAINED, cluster_of, launch_document, lines, measured_of, reading_of
from bpipe.commands.simulate import budgeted
from bpipe.commands.terminal import Flags, print_json, progress_of, table, tell
from bpipe.config.flags import outputs
from bpipe.config.flags.configurations import CONFIGURATION, LAUNCHED, MEASURED, SEARCHED_FLAGS
from bpipe.config.flags.flag import Options, Task, command, group
from bpipe.config.flags.values import MemoryBudget, positive
from bpipe.config.launch.megatron_command import Reading
from bpipe.config.launch.megatron_flags import common_flags, difference, megatron_flags
from bpipe.plan.candidates import CLEARLY, EXPOSED, cells, document, is_level, legend
from bpipe.plan.explain import (
    LAUNCH,
    Answer,
    accuracy,
    advice,
    answer_document,
    answer_of,
    calibration_lines,
    family_rows,
    family_values,
    flags_of,
    remarks,
    trainer_needs,
    verdict,
)
from bpipe.plan.options import filled, fp8_of, model_of, setup_of, training_of
from bpipe.plan.predict import Candidate, predict
from bpipe.plan.refusals import refused_launch
from bpipe.plan.search import INDISTINCT, Outcome, search
from bpipe.plan.space import CUTS, Space, divisors, num_grids, usual_contexts, usual_slices, with_free_switches
from bpipe.predict.cluster import Cluster, gib_text
from bpipe.predict.memory import RankMemory, roomy_bytes
from bpipe.predict.recompute import BLOCK
from bpipe.schedule.families.families import FAMILIES, SEARCHED
from bpipe.schedule.hosts import IN_NODES

if TYPE_CHECKING:
    from rich.table import Table

# Exit status if nothing was found; 2 is an error of the user's.
NO_ROWS = 3
# How a model is cut: the search chooses, but among what is asked for.
CUT = ("tensor", "pipeline", "micro_batch", "chunks")
# Fields of a space that options name alike.
_SAME = "global_batch attention max_micro_batch max_chunks precision kernels cp_comm_type expert".split()
# Ranks whose peaks fit into one line.
_ALL_SHOWN = 16
_OF_ANSWER = ("", "iteration s", "range s", "speed-up", "peak GiB", "of GiB", "state", "configuration")
_OF_ROWS = ("", "iteration s", "MFU %", "bubble %", "exposed s", "state", "configuration")

COMMAND = command(
    *TRAINED[:-1],
    MEASURED,
    LAUNCHED,
    SEARCHED_FLAGS,
    group("output", outputs.rows(10, positive), outputs.FORMAT, outputs.EMIT_ARGS),
    Task(
        "find the fastest configurations of a model on a cluster",
        "bpipe plan --model gpt3-96b --cluster a100-80g:4x8 --gbs 128",
        "model cluster global_batch schedule recompute balance rows",
    ),
    Task(
        "find what to change in a launch",
        "bpipe plan --cluster h100-80g --launch launch.json",
        "launch megatron emit_args",
    ),
    Task(
        "keep within a memory budget",
        "bpipe plan --model llama3-70b --cluster h100-80g:8x8 --gbs 256 --memory 70",
        "memory hosts",
    ),
)


def run(asked: Options) -> int:
    reading = reading_of(asked, SEARCHED_FLAGS.flags)
    # The search chooses these whatever the launch says; `yours` below is the launch as it is.
    filled_options = filled(Options(**{**vars(asked), **dict.fromkeys(("hosts", *CUT))}), reading, ("global_batch",))
    options = Options(
        **{**vars(filled_options), **{name: getattr(asked, name) for name in ("recompute", "schedule", "balance")}}
    )
    yours = None if reading is None else _yours(asked, reading)
    if options.global_batch is None:
        raise ValueError("the launch does not say --global-batch-size: give --gbs")
    space = _space(asked, options, _contexts(asked, filled_options, reading), reading)
    # A search makes millions of small values, hardly any in a cycle: collecting cycles took a fifth of its time.
    gc.set_threshold(200_000, 20, 100)
    # With a budget, or with own memory as host, balanced rows evict only what must leave.
    evicts_least = options.memory is not None or bool(set(space.hosts) & set(IN_NODES))
    with progress_of("plan") as progress:
        num_rows = max(options.rows, options.emit_args or 0)
        outcome = search(space, num_rows, progress, evicts_least, options.time_limit)
    if options.emit_args is not None:
        if options.emit_args > len(outcome.rows):
            raise ValueError(
                f"--emit-args {options.emit_args}: there are {len(outcome.rows)} rows. {verdict(outcome).text}"
            )
        print(shlex.join(megatron_flags(outcome.rows[options.emit_args - 1].setup)))
    else:
        launch = reading if reading is None or _is_as_launched(asked, reading) else None
        _print(outcome, launch, options.format, reading, yours)
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
        sequence=model.sequence,
        **{name: getattr(options, name) for name in _SAME},
        recompute=tuple(options.recompute),
        schedules=schedules,
        balances=tuple(options.balance),
        traced=traced,
        **training_of(options),
        profile=profile,
        hosts=tuple(asked.hosts or (options.hosts,)),
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


def _yours(asked: Options, reading: Reading) -> Candidate | str:
    """Return the prediction of the launch as it is, or why it cannot run on this cluster."""
    if reading.refused is not None:
        return f"{REFUSES}: {reading.refused}"
    # Of the launch's configuration only the budget and its hosts are replaced by the search's.
    launched = {name: None for name in (flag.field for flag in CONFIGURATION.flags) if name not in ("memory", "hosts")}
    options = Options(**{**vars(asked), **launched, "no_sequence_parallel": False})
    try:
        launched_options = filled(options, reading, ())
        if launched_options.balance == BALANCES[0]:
            launched_options.memory = None
        profile, traced = measured_of(launched_options)
        own = setup_of(launched_options, _budgeted(cluster_of(launched_options, reading), asked.memory))
        setup, _ = budgeted(launched_options, replace(own, traced=traced), profile)
        row = predict(setup, profile)
        return replace(row, name=LAUNCH, refused=refused_launch(setup, reading))
    except ValueError as error:
        return str(error)


def _print(
    outcome: Outcome,
    launch: Reading | None,
    form: str,
    reading: Reading | None,
    yours: Candidate | str | None,
) -> None:
    """Print what to run, and then the rows.

    Args:
        outcome: The rows.
        launch: The launch that rows' flags change; None lists all flags.
        form: Table or JSON.
        reading: The launch that is given.
        yours: The prediction of that launch as it is, or why it cannot run on this cluster.
    """
    launched = yours if isinstance(yours, Candidate) else None
    answer = answer_of(outcome.stock, outcome.rows, outcome.space, launch, launched)
    if form != "json":
        _tell(answer, [*lines(reading), *_plan_parts(outcome, launch, yours)])
        return
    values = {}
    if reading is not None and yours is not None:
        stands = (
            {"impossible": yours} if isinstance(yours, str) else {**document(yours), "refused": list(yours.refused)}
        )
        values = {"launch": {**launch_document(reading), "as_it_stands": stands}}
    print_json({"answer": answer_document(answer), **_document(outcome, launch), **values})


def _tell(answer: Answer, parts: Sequence[str | Table]) -> None:
    """Print the answer with the flags that launch it, then `parts`, and the advice once more at the end."""
    choices = answer.choices
    if choices:
        tell(table(_OF_ANSWER, cells(_OF_ANSWER, choices)))
    tell(advice(answer), *([accuracy(choices[-1])] if choices else ()))
    for row in choices:
        tell(*(f"{row.name}: the trainer refuses this: {reason}" for reason in row.refused[:2]))
        tell(*([Flags(f"{row.name}: {row.flags}")] if row.flags else ()))
    tell("", *parts)
    if answer.taken is not None:
        tell("", advice(answer))


def _document(outcome: Outcome, launch: Reading | None) -> dict[str, Any]:
    """Return the document of `--format json` (docs/planning.md)."""
    space, stock = outcome.space, outcome.stock
    # Reasons that do not apply to this space.
    sizes = (space.tensors, space.pipelines, space.micro_batches, space.chunk_counts)
    hidden = {"context": space.contexts == (1,), "layers": BLOCK not in space.recompute, "asked": not any(sizes)}
    hidden["mamba"] = space.model.hybrid is None
    return {
        "verdict": verdict(outcome)._asdict(),
        "searched": {
            "grids": num_grids(space),
            "configurations": outcome.num_configurations,
            "fitting": outcome.num_fitting,
            "only_balanced": outcome.num_only_balanced,
            "simulated": outcome.num_simulated,
            "others_at_least_s": outcome.unseen_s,
            "cut": {name: outcome.cuts.get(name, 0) for name in CUTS if not hidden.get(name)},
        },
        "rows": [
            {
                **document(row),
                "only_balanced": row.unbalanced_bytes is not None,
                "unbalanced_peak_bytes": row.unbalanced_bytes,
                "megatron_flags": megatron_flags(row.setup),
                "launch_difference": launch and difference(row.setup, launch)._asdict(),
            }
            for row in outcome.rows
        ],
        "stock": {"row": stock and {**document(stock), "megatron_flags": megatron_flags(stock.setup)}},
        "families": family_values(outcome),
        "needs": trainer_needs(outcome),
    }


def _plan_parts(outcome: Outcome, launch: Reading | None, yours: Candidate | str | None) -> list[str | Table]:
    """Return the rows, what each holds on every rank, and the gain of balancing."""
    cluster = outcome.space.cluster
    share = f"{100 * cluster.limit_bytes / cluster.device.memory_bytes:.0f} % of a device"
    limit = f"{gib_text(cluster.limit_bytes)} GiB ({share})"
    head = f"no configuration fits into {limit}"
    if outcome.rows:
        head = (
            f"{outcome.num_fitting} of {outcome.num_configurations} configurations that may be among the fastest fit into "
            f"{limit}, {outcome.num_simulated} were simulated; the {len(outcome.rows)} fastest, "
            f"to within {100 * (INDISTINCT - 1):.2g} %:"
        )
    rows = [replace(row, name=str(number)) for number, row in enumerate(outcome.rows, 1)]
    parts: list[str | Table] = [f"the launch as it is: {yours}"] if isinstance(yours, str) else []
    shown = [*([yours] if isinstance(yours, Candidate) else ()), *rows]
    parts += [head, *calibration_lines(cluster), *([] if outcome.unseen_s is None else [_unseen(outcome)])]
    if shown:
        parts += [table(_OF_ROWS, cells(_OF_ROWS, shown)), f"{legend(row.setup for row in shown)}; {EXPOSED}"]
    num_level = sum(is_level(row.iteration_s, rows[0].iteration_s) for row in rows)
    if num_level < len(rows):
        percent = f"{100 * (CLEARLY - 1):.0f} %"
        parts.append(
            f"Rows from {num_level + 1} on take at least {percent} more time than row 1; rows above are level with it."
        )
    for row in shown:
        parts += ["", *_details(row, outcome, launch)]
    if rows and launch is None:
        parts += ["", Flags(f"all rows: {shlex.join(common_flags(rows[0].setup))}")]
    families = family_rows(outcome)
    if families:
        parts += ["", table(("schedule", "its fastest configuration"), families), *trainer_needs(outcome)]
    return [*parts, "", verdict(outcome).text]


def _unseen(outcome: Outcome) -> str:
    """Say what a search that ended early cannot rule out."""
    unseen_s, first_s = outcome.unseen_s or 0.0, outcome.rows[0].iteration_s
    ahead = f", {100 * (1 - unseen_s / first_s):.0f} % less than row 1" if unseen_s * INDISTINCT < first_s else ""
    return (
        f"The search ended at its --time-limit: nothing that it has not looked at takes less than {unseen_s:.3f} s{ahead}. "
        "A larger limit finds out."
    )


def _details(row: Candidate, outcome: Outcome, launch: Reading | None) -> list[str]:
    """Return the memory of every rank of a row, remarks, and the flags that launch it."""
    lines = [f"{row.name}: GiB per rank, of {gib_text(row.limit_bytes)}: {peaks_text(row.memory)}"]
    if row.name in map(str, range(1, len(outcome.rows) + 1)):
        return [*lines, *(f"   {text}" for text in remarks(row)), Flags(f"   {flags_of(row.setup, launch)}")]
    misses = [f"rank {rank.rank} needs {gib_text(rank.peak_bytes)}" for rank in row.memory if not rank.fits]
    fits = "fits" if not misses else f"does not fit: {', '.join(misses[:4])}{', ...' if len(misses) > 4 else ''}"
    return [*lines, *(f"   {text}" for text in (*remarks(replace(row, refused=())), fits))]


def peaks_text(memory: Sequence[RankMemory]) -> str:
    """Write the GiB of every rank; many ranks as counts of equal neighbours."""
    peaks = [gib_text(rank.peak_bytes) for rank in memory]
    if len(peaks) <= _ALL_SHOWN:
        return " ".join(peaks)
    runs = ((value, len(tuple(run))) for value, run in groupby(peaks))
    return " ".join(value if number == 1 else f"{number} x {value}" for value, number in runs)
