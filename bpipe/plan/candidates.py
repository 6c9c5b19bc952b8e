"""Configurations with their predictions, and the columns of their tables."""

import re
from collections.abc import Callable, Iterable, Sequence

from bpipe.plan.predict import Candidate
from bpipe.predict.cluster import gib_text
from bpipe.predict.error_bars import range_words
from bpipe.predict.layout import Setup
from bpipe.schedule.hosts import ALL, HOST, PAIR, POOL
from bpipe.schedule.layout import EVEN

# Half of the published runs of one model are further from their prediction than this, in either direction
# (docs/validation.md).
CLEARLY = 1.05

# What follows "balanced" in a row or a heading.
HOSTS = {PAIR: "", POOL: " in a pool", HOST: " with node memory", ALL: " in a pool with node memory"}


# The letters of `describe`.
_LETTERS = {
    "t": "tensor",
    "c": "context",
    "p": "pipeline",
    "d": "data parallelism",
    "ep": "expert parallelism",
    "etp": "its tensor parallelism",
    "b": "micro-batch size",
    "v": "chunks per rank",
    "g": "micro-batches per group",
    "k": "slices per sequence",
}
EXPOSED = "exposed: time in which computation waits for evictions and loads"


# The cell of a row by column title; the second argument is the row to compare with.
COLUMNS: dict[str, Callable[[Candidate, Candidate], str]] = {
    "": lambda row, base: row.name,
    "what": lambda row, base: row.name,
    "iteration s": lambda row, base: f"{row.iteration_s:.3f}",
    "range s": lambda row, base: range_words(row.setup.error_bars, row.iteration_s),
    "speed-up": lambda row, base: "" if row is base else f"{base.iteration_s / row.iteration_s:.2f}x",
    "ratio": lambda row, base: f"{row.iteration_s / base.iteration_s:.2f}",
    "MFU %": lambda row, base: f"{100 * row.mfu:.2f}",
    "bubble %": lambda row, base: f"{100 * row.timing.bubble_of_makespan:.1f}",
    "bubble, % of pipeline": lambda row, base: f"{100 * row.timing.bubble_of_pipeline:.1f}",
    "bubble, % of spans": lambda row, base: f"{100 * row.timing.bubble_of_span:.1f}",
    "exposed s": lambda row, base: f"{max(row.timing.exposed_s):.3f}",
    "peak GiB": lambda row, base: gib_text(row.peak_bytes),
    "saved GiB": lambda row, base: gib_text(base.peak_bytes - row.peak_bytes),
    "of GiB": lambda row, base: gib_text(row.limit_bytes),
    "least full GiB": lambda row, base: gib_text(min(rank.peak_bytes for rank in row.memory)),
    "moved GB": lambda row, base: _of_bandwidth(row, "transfer_bytes", 2),
    "needs GB/s": lambda row, base: _of_bandwidth(row, "required_bytes_per_s", 0),
    "evictions": lambda row, base: str(sum(row.transfers)),
    "state": lambda row, base: row.state,
    "configuration": lambda row, base: describe(row.setup),
}


def cells(titles: Iterable[str], rows: Sequence[Candidate], base: Candidate | None = None) -> list[list[str]]:
    """Return the cells of each row, compared with `base`, or else with the first row."""
    return [[COLUMNS[title](row, base or rows[0]) for title in titles] for row in rows]


def _of_bandwidth(row: Candidate, name: str, decimals: int) -> str:
    bandwidth = row.bandwidth
    return "" if bandwidth is None else f"{getattr(bandwidth, name) / 1e9:.{decimals}f}"


def is_level(seconds: float, other: float) -> bool:
    """Whether predictions cannot tell `seconds` to be longer than `other`."""
    return seconds < CLEARLY * other


def grid_of(setup: Setup) -> str:
    """Return the parallel sizes of a setup as text."""
    context = (
        f" c={setup.context}{'' if setup.cp_comm_type == 'p2p' else f' by {setup.cp_comm_type}'}"
        if setup.context > 1
        else ""
    )
    return f"t={setup.tensor}{context} p={setup.pipeline} d={setup.data}"


def describe(setup: Setup) -> str:
    """Describe one configuration in a few words."""
    chunks = f" v={setup.num_chunks}" if setup.num_chunks > 1 else ""
    group = f" g={setup.group_size}" if setup.group_size else ""
    lengths = "" if setup.slice_lengths == EVEN else " uneven"
    slices = f" k={setup.slices}{lengths}" if setup.slices > 1 else ""
    halves = " W at once" if setup.splits and not setup.keeps_halves else ""
    balance = f" balanced{HOSTS[setup.hosts]}" if setup.balance is not None else ""
    layers = f" layers {min(setup.layers)}-{max(setup.layers)}" if len(set(setup.layers)) > 1 else ""
    shards = f" vocabulary {setup.vocabulary.value}{' and input' * setup.input_shards}" if setup.is_sharded else ""
    divided = f" etp={setup.expert_tensor}" if setup.expert_tensor > 1 else ""
    experts = f" ep={setup.routing.expert}{divided}" if setup.model.experts else ""
    grid = f"{grid_of(setup)}{experts} b={setup.micro_batch}"
    return (
        f"{grid} recompute {setup.recompute} {setup.schedule}{chunks}{group}{slices}{layers}{shards}{halves}{balance}"
    )


def legend(setups: Iterable[Setup]) -> str:
    """Return the meaning of the letters in the descriptions of these configurations."""
    letters = re.findall(r"\b([a-z]+)=", " ".join(map(describe, setups)))
    return ", ".join(f"{letter}: {_LETTERS[letter]}" for letter in _LETTERS if letter in letters)
