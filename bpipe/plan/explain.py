"""What to run, what balancing gains, why nothing fits, and how every family of schedules did.

In: the Outcome of a search. Predicts nothing itself.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from bpipe.config.launch.megatron_command import Reading
from bpipe.config.launch.megatron_flags import chosen_flags, difference, megatron_flags
from bpipe.plan.candidates import CLEARLY, describe, grid_of, is_level
from bpipe.plan.predict import Candidate
from bpipe.plan.refusals import Others, guarded, runs_ours
from bpipe.plan.search import COMPARED, INDISTINCT, Closest, FamilyResult, Outcome
from bpipe.plan.space import CUTS, Space, divisors, num_grids
from bpipe.predict.cluster import GIB, Cluster, gib_text, is_never_calibrated
from bpipe.predict.costs import hosts_of, links
from bpipe.predict.exchanges import replicas_share_nodes
from bpipe.predict.layout import Setup
from bpipe.predict.memory import TIGHT
from bpipe.predict.states import cpu_optimizer_bytes
from bpipe.schedule.families.families import default_family
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import EVEN


class Verdict(NamedTuple):
    """Verdict on a search. `kind` is for programs: docs/planning.md lists them."""

    kind: str
    text: str


def remarks(row: Candidate) -> list[str]:
    """Return remarks on a row, one sentence each."""
    return [*_remarks(row), *(f"the trainer refuses this: {reason}" for reason in row.refused)]


def _remarks(row: Candidate) -> Iterator[str]:
    setup = row.setup
    if row.unbalanced_bytes is not None:
        needs = f"{gib_text(row.unbalanced_bytes)} of {gib_text(row.limit_bytes)} GiB"
        yield f"fits only with balancing: without it, the fullest rank needs {needs}"
    plain = replace(setup, balance=None, budget_bytes=None)
    if replicas_share_nodes(plain) and not replicas_share_nodes(setup):
        yield "balanced pairs share nodes, so the replicas of a rank do not: they reduce gradients between nodes"
    yield from _pairs_apart(row)
    is_counted = setup.balance is not None and setup.activation_budget is None
    if setup.slices > 1 and setup.slice_lengths != EVEN and is_counted:
        yield (
            "slices of differing lengths are balanced by their number, and host buffers are as large as the largest: "
            "--memory balances their bytes"
        )
    if setup.state_types.on_cpu:
        sizes = cpu_optimizer_bytes(setup)
        rank = sizes.index(max(sizes))
        yield (
            f"the optimizer takes {gib_text(sizes[rank])} GiB of CPU memory for a device of rank {rank}, the most of "
            "all; how long the CPU takes for the update is not known: only transfers to it and back are timed"
        )
    if row.fits and any(memory.is_tight for memory in row.memory):
        worst = max(row.memory, key=lambda memory: memory.peak_bytes)
        share = f"{100 * worst.peak_bytes / worst.device_bytes:.0f} %"
        yield (
            f"rank {worst.rank} needs {share} of its device's memory: above {100 * TIGHT:.0f} % the allocator may have "
            "to free cached blocks and allocate them again, which takes time that is not predicted"
        )


def calibration_lines(cluster: Cluster) -> list[str]:
    """Return lines that say that times are calibrated, or that no run has confirmed their constants."""
    lines = [] if cluster.factor == 1 else [f"calibrated: all times are {cluster.factor:g} times those of the formulas"]
    if is_never_calibrated(cluster):
        lines.append(
            f"never calibrated: no constant of these times comes from a run on {cluster.device.name}; a cluster file "
            f"can have the time_factor of yours"
        )
    return lines


def _pairs_apart(row: Candidate) -> Iterator[str]:
    """Yield why pairs that transfer span two nodes, and alternatives."""
    setup = row.setup
    if setup.balance is None or setup.hosts != PAIR or not any(row.transfers):
        return
    pair_links, hosts = links(setup), hosts_of(setup)
    senders = (rank for rank, count in enumerate(row.transfers) if count)
    if not any(pair_links.crosses(rank, host.rank) for rank in senders for host in hosts[rank]):
        return
    cluster, per_rank = setup.cluster, setup.tensor * setup.context
    reason = (
        f"a rank has {per_rank} of {cluster.domain}'s {cluster.devices_per_domain} devices"
        if 2 * per_rank > cluster.devices_per_domain
        else "ranks do not fill nodes in pairs"
    )
    slow, fast, host = (
        float(link.bytes_per_s or 0) / 1e9 for link in (pair_links.between, pair_links.inside, pair_links.host)
    )
    yield (
        f"pairs span two nodes, because {reason}: transfers go through each device's port of {slow:.0f} GB/s; links inside "
        f"a node have {fast:.0f}, and CPU memory (--hosts host) {host:.0f}. If transfers are exposed, use a --tp with "
        "which pairs share a node, more --recompute, or --schedule v-half or grouped-interleaved, which move nothing"
    )


def verdict(outcome: Outcome) -> Verdict:
    """Return the gain, or why there is none. A search of one kind has no comparison, and one without rows says what cut
    them."""
    if not outcome.num_configurations and outcome.closest is None:
        return Verdict("no-configuration", f"There is no configuration. {_what_cut(outcome)}")
    if not outcome.num_fitting:
        return _nothing(outcome)
    if len(set(outcome.space.balances)) == 1:
        scope = "without" if outcome.space.balances[0] == "none" else "with"
        text = f"Only configurations {scope} balancing were searched: this does not show what balancing would gain."
        return Verdict("not-compared", text)
    unseen_s = inf if outcome.unseen_s is None else outcome.unseen_s
    is_cut = outcome.cuts.keys() & {"slower", "skipped"} or unseen_s < inf
    compared_s = min(COMPARED / INDISTINCT * outcome.rows[-1].iteration_s, unseen_s) if is_cut else None
    if outcome.balanced is None:
        condition = (
            "fits only because of it"
            if compared_s is None
            else f"that fits only because of it takes less than {compared_s:.3g} s"
        )
        return Verdict("no-gain", f"Balancing does not help: no configuration {condition}.")
    count = f"{outcome.num_only_balanced} of the {outcome.num_fitting} configurations that fit need it"
    balanced = outcome.balanced
    if outcome.plain is None:
        nothing = (
            "Nothing fits without balancing"
            if compared_s is None
            else f"Without balancing nothing takes less than {compared_s:.3g} s"
        )
        return Verdict("only-balanced", f"{nothing}: {count}, and the best is {describe(balanced.setup)}.")
    plain = outcome.plain
    gain = plain.iteration_s / balanced.iteration_s
    ours = f"{balanced.iteration_s:.2f} s ({describe(balanced.setup)})"
    comparison = (
        f"{ours} against {plain.iteration_s:.2f} s ({describe(plain.setup)}): {describe_change(plain, balanced)}."
    )
    if gain >= CLEARLY:
        return Verdict("gain", f"Balancing gains {gain:.2f}x: {count}, and the best of them takes {comparison}")
    if gain > 1:
        doubt = f"Balancing does not clearly help, as {gain:.3f}x is within the error of predictions"
        return Verdict("no-clear-gain", f"{doubt}: {count}, and the best of them takes {comparison}")
    return Verdict("no-gain", f"Balancing does not help here: {count}, but the best of them takes {comparison}")


def _nothing(outcome: Outcome) -> Verdict:
    if outcome.closest is None:
        # Possible only if nothing but balanced configurations was searched.
        text = "Nothing fits only because of balancing: what was searched fits without it. Give --balance none bpipe."
        return Verdict("not-needed", f"{text} {_what_cut(outcome)}")
    scope = "with balancing or without"
    if len(set(outcome.space.balances)) == 1:
        scope = "without balancing" if outcome.space.balances[0] == "none" else "with balancing"
        scope += " (the other was not searched)"
    return Verdict(
        "nothing-fits", f"Nothing fits, {scope}: {_closest(outcome.closest, outcome.space)}. {_what_cut(outcome)}"
    )


def _what_cut(outcome: Outcome) -> str:
    cluster = outcome.space.cluster
    parts = [f"{outcome.cuts[name]} {text}" for name, text in CUTS.items() if name in outcome.cuts]
    sizes = "t*p*d" if outcome.space.contexts == (1,) else "t*c*p*d"
    start = f"Cut from {num_grids(outcome.space)} grids {sizes} = {cluster.num_devices} and what is in them"
    return f"{start}: {', '.join(parts) or 'nothing'}."


def _closest(closest: Closest, space: Space) -> str:
    setup, limit = closest.setup, closest.setup.cluster.limit_bytes
    needs = f"{gib_text(closest.needs_bytes)} of {gib_text(limit)} GiB"
    device = setup.cluster.device.memory_bytes
    if closest.is_state:
        cut = f"{needs} of a device ({grid_of(setup)})"
        more = "a larger --memory, " if closest.needs_bytes <= device else ""
        more += f"more devices (p is at most {setup.model.num_layers}), or devices with more memory"
        fewer = "bpipe fit tries state in 16 bits and the optimizer on the CPU"
        return f"weights, gradients and optimizer state alone need at least {cut}: use {more}; {fewer}"
    if closest.needs_bytes <= device:
        memory = gib_text(min(closest.needs_bytes + GIB // 20, device))
        barely = ", barely" if closest.needs_bytes > TIGHT * device else ""
        return f"the least is {describe(setup)}, which needs {needs}; with --memory {memory} it fits{barely}"
    return f"the least is {describe(setup)}, which needs {needs}: {_fewer_activations(setup, space)}"


def _fewer_activations(setup: Setup, space: Space) -> str:
    ways = []
    if "full" not in space.recompute:
        ways.append("allow --recompute full too")
    if "bpipe" not in space.balances and len(divisors(setup.cluster.num_devices)) > 2:
        ways.append("allow --balance bpipe too")
    if default_family(1) not in space.schedules:
        ways.append(f"allow --schedule {default_family(1)} too")
    return " or ".join(ways) or "use more devices, or a shorter sequence"


def describe_change(before: Candidate, after: Candidate) -> str:
    """Describe what the second setup changes: speed of a stage, bubble, and waiting."""
    bubbles = [100 * row.timing.bubble_of_makespan for row in (before, after)]
    parts = [
        f"useful work per second of computing {_while_busy(after) / _while_busy(before):.2f}x",
        f"bubble {bubbles[1]:.1f} instead of {bubbles[0]:.1f} % of the iteration",
    ]
    exposed = max(after.timing.exposed_s)
    if exposed > 0.01 * after.iteration_s:
        parts.append(f"exposed transfers {exposed:.2f} s")
    return ", ".join(parts)


def _while_busy(row: Candidate) -> float:
    """Model FLOPs per second of computing: the MFU without the bubble."""
    return row.mfu / (1 - row.timing.bubble_of_makespan)


# What a row's schedule needs that the trainer cannot do or has never done (docs/supported.md).
HALVES = (
    "split backward passes (dgrad and wgrad apart) have never run with Transformer Engine's layers, which runs on GPUs "
    "usually have: check with scripts/gpu_check.py --only halves"
)
AS_A_V = "stages placed as a V need checkpoints in the torch_dist format"

FP8 = (
    "FP8 with transfers has never run on a GPU: in its first iterations the trainer checks that everything that moves "
    "comes back unchanged (--bpipe-verify)"
)
SLICES = (
    "slices with Transformer Engine's attention have run on one GPU only: the trainer first checks its kernel on a mask "
    "whose result is known"
)
HYBRID = (
    "hybrid models need a training script of their own, such as Megatron's pretrain_hybrid.py, started with -m "
    "megatron.scheduling.launch; this has never run with Mamba's own kernels"
)
TWO_PIPES = "bidirectional pipelines have run on CPUs only"

# A bound above this share of the fastest time tells nothing.
_CLEARLY = 0.99


def family_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Return each family with its result in words; empty without rows or with one family."""
    if not outcome.rows or len(outcome.families) < 2:
        return []
    return [(family.schedule, _words(family, outcome)) for family in _ordered(outcome)]


def trainer_needs(outcome: Outcome) -> list[str]:
    """Return what the rows' schedules need of the trainer beyond the usual."""
    needs = {need for row in outcome.rows for need in needs_of_setup(row.setup)}
    order = (HALVES, AS_A_V, TWO_PIPES, FP8, SLICES, HYBRID)
    return [need for need in order if need in needs]


def needs_of_setup(setup: Setup) -> list[str]:
    """Return what one setup needs of the trainer beyond the usual."""
    model, placement = setup.model, setup.placements[0]
    needs = {
        HALVES: setup.splits and setup.kernels == "gpu",
        AS_A_V: setup.pipeline > 1 and placement[0] == placement[-1],
        TWO_PIPES: setup.num_pipes > 1,
        FP8: setup.fp8 is not None and setup.balance is not None,
        SLICES: setup.slices > 1 and setup.kernels == "gpu",
        HYBRID: model.hybrid is not None,
    }
    return [need for need, applies in needs.items() if applies]


def family_values(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the families' results as JSON values."""
    return [
        {
            "schedule": family.schedule,
            "iteration_time_s": None if family.fastest is None else family.fastest.iteration_s,
            "others_at_least_s": family.bound_s,
            "fitting": family.num_fitting,
            "too_large": family.num_large,
            "why": _words(family, outcome) if outcome.rows else None,
        }
        for family in _ordered(outcome)
    ]


def _ordered(outcome: Outcome) -> list[FamilyResult]:
    """Sort by the fastest's time, then by the bounds of families that were not simulated, then the rest."""

    def key(family: FamilyResult) -> tuple[int, float]:
        if family.fastest is not None:
            return 0, family.fastest.iteration_s
        return (1, family.bound_s) if family.bound_s is not None else (2, 0.0)

    return sorted(outcome.families, key=key)


def _words(family: FamilyResult, outcome: Outcome) -> str:
    best = outcome.rows[0]
    if family.fastest is not None:
        seconds, bound = family.fastest.iteration_s, family.bound_s
        # Only the rows are certain to be the fastest.
        others = (
            ""
            if bound is None or bound > _CLEARLY * seconds
            else f"; the others were not simulated and take at least {bound:.3f} s"
        )
        return _beside(family.fastest, best) + others
    parts = []
    if family.num_large:
        condition = " that could be among the rows" if family.bound_s is not None else ""
        parts.append(f"{family.num_large} configurations{condition} do not fit")
    if family.bound_s is not None:
        parts.append(f"{'the others take' if parts else 'takes'} at least {family.bound_s:.3f} s, by a lower bound")
    return "; ".join(parts) or "no configuration"


def _beside(row: Candidate, best: Candidate) -> str:
    seconds = row.iteration_s
    if row is best:
        return f"{seconds:.3f} s, the fastest: {describe(row.setup)}"
    slower = 100 * (seconds / best.iteration_s - 1)
    return f"{seconds:.3f} s, {slower:.1f} % more: {describe_change(best, row)}"


# Among rows whose times are within this ratio, the one with the fewest of our flags is the better advice.
_AS_FAST = 1.01
# Names of the choices, in order of preference if they are level: the launch as it is, then stock Megatron, then ours.
LAUNCH, STOCK, OURS = "launch", "stock", "bpipe"
_TAKE = {LAUNCH: "Keep the launch", STOCK: "Stay with stock Megatron", OURS: "Use bpipe"}
_WHOSE = {LAUNCH: "the launch's", STOCK: "stock's", OURS: "bpipe's"}


def plainest_of_ours(rows: Sequence[Candidate], others: Others) -> int | None:
    """Return the index of our row to recommend, or None: the plainest of equally fast, unguarded rows.

    Args:
        rows: Rows by rising time.
        others: Flags of the launch that the trainer may refuse.
    """
    ours = [(index, row) for index, row in enumerate(rows) if runs_ours(row.setup)]
    if not ours:
        return None
    level_rows = [(index, row) for index, row in ours if is_level(row.iteration_s, ours[0][1].iteration_s)]
    candidates = [(index, row) for index, row in level_rows if not guarded(row.setup, others)] or level_rows
    fastest_s = candidates[0][1].iteration_s
    fastest = {index: row for index, row in candidates if row.iteration_s <= _AS_FAST * fastest_s}
    return min(
        fastest, key=lambda index: sum(flag.startswith("--bpipe") for flag in megatron_flags(fastest[index].setup))
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """The choices of what to run, and the one to take."""

    choices: tuple[Candidate, ...]
    """In order of preference if they are level."""
    taken: Candidate | None
    """The first choice that no other clearly beats; None if nothing can run."""
    row: int | None = None
    """Number of our row in the table, from 1."""


def answer(choices: Iterable[Candidate], row: int | None = None) -> Answer:
    """Return the answer for these choices, each named `launch`, `stock` or `bpipe`."""
    ordered = tuple(sorted(choices, key=lambda row: list(_TAKE).index(row.name)))
    candidates = [row for row in ordered if row.can_run]
    fastest_s = min((row.iteration_s for row in candidates), default=0.0)
    return Answer(ordered, next((row for row in candidates if is_level(row.iteration_s, fastest_s)), None), row)


def answer_of(
    stock: Candidate | None,
    rows: Sequence[Candidate],
    space: Space,
    differs_from: Reading | None = None,
    launch: Candidate | None = None,
) -> Answer:
    """Return what to run: the launch as it is, the best of stock Megatron, or a row of ours.

    Args:
        stock: The fastest configuration of stock Megatron, if one fits.
        rows: Rows of the search, fastest first.
        space: The space that was searched.
        differs_from: Launch whose changed flags are listed; None lists all flags.
        launch: The launch as it is, if one was given and can be predicted.
    """
    index = plainest_of_ours(rows, space.others)
    choices = [
        replace(row, name=name, flags=flags_of(row.setup, differs_from))
        for name, row in ((STOCK, stock), (OURS, None if index is None else rows[index]))
        if row is not None
    ]
    return answer(choices if launch is None else [launch, *choices], None if index is None else index + 1)


def flags_of(setup: Setup, launch: Reading | None) -> str:
    """Return the flags to change in the launch, or all chosen flags without a launch."""
    return shlex.join(chosen_flags(setup)) if launch is None else difference(setup, launch).text


def advice(result: Answer) -> str:
    """Return a sentence that says what to take, and why."""
    choice = result.taken
    if choice is None:
        return "None of these can run."
    others = [row for row in result.choices if row is not choice and row.can_run]
    comparisons = ", ".join(f"{_apart(choice, row)} than {_WHOSE[row.name]}" for row in others)
    reason = f": its iteration takes {comparisons}" if comparisons else ""
    faster = [row for row in others if row.iteration_s < choice.iteration_s]
    doubt = f"; predictions cannot tell apart what differs by less than {100 * (CLEARLY - 1):.0f} %" if faster else ""
    tight = "; it is tight, and what that costs is not predicted" if choice.is_tight else ""
    # Our schedule, shards or slices alone, which a verdict on balancing does not cover.
    suffix = " without balancing" if choice.name == OURS and choice.setup.balance is None else ""
    return f"{_TAKE[choice.name]}{suffix}{reason}{doubt}{tight}."


def _apart(row: Candidate, other: Candidate) -> str:
    percent = 100 * (row.iteration_s / other.iteration_s - 1)
    return f"{abs(percent):.1f} % {'more' if percent > 0 else 'less'} time"


def accuracy(row: Candidate) -> str:
    """Return a sentence that says how far off predictions may be."""
    cluster, bars = row.setup.cluster, row.setup.error_bars
    if bars is None:
        return f"Never calibrated: no measured run on {cluster.device.name} is known, so times may be far off."
    difference = f"differed from their prediction by {bars.low:+d} to {bars.high:+d} % (plus is slower)"
    return f"Ranges: {bars.num_runs} measured runs of {bars.kind} {difference}: docs/validation.md."


def answer_document(result: Answer) -> dict[str, Any]:
    """Return the answer as JSON values."""
    names = ("iteration_s", "range_s", "peak_bytes", "can_run", "flags")
    return {
        "take": result.taken and result.taken.name,
        "row": result.row,
        "choices": {row.name: {name: getattr(row, name) for name in names} for row in result.choices},
    }
