"""Connect the pairs of every pipeline of the world, and say over what each will talk and whether that is enough.

In: a schedule and the wanted transport. Out: this rank's connection, and lines for the log. Asks Megatron only which ranks form a pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bpipe.ir.schedule import Schedule
from bpipe.runtime.streams import copying_on
from bpipe.simulate.memory import num_transfers
from bpipe.transport.connect import Connection, Link, connect

Pair = tuple[int, int]


def connect_pairs(schedule: Schedule, wanted: str, timeout_s: float, device: torch.device) -> tuple[Connection | None, list[Link], str]:
    """This rank's connection, or None where it is in no pair; every pair's link; and the table of them. Collective over the world."""
    stages = stages_of_pairs(schedule)
    connection, links = connect(sorted(stages), wanted, timeout_s, copying_on(device))
    return connection, links, describe(links, stages)


def stages_of_pairs(schedule: Schedule) -> dict[Pair, Pair]:
    """The global ranks of every pair that moves anything, in every pipeline of the world, and their places in it. Equal on every rank.

    Which ranks form a pipeline is asked of Megatron's groups, not computed again. Collective over the world.
    """
    mine = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    pipelines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, list(mine))
    partners = schedule.partners or tuple(range(schedule.num_ranks))
    stages: dict[Pair, Pair] = {}
    for pipeline in pipelines:
        for stage, partner in enumerate(partners):
            if num_transfers(schedule, stage).evictions:
                ranks = pipeline[stage], pipeline[partner]
                low, high = sorted(ranks)
                stages[low, high] = (stage, partner) if ranks == (low, high) else (partner, stage)
    return stages


def describe(links: Iterable[Link], stages: Mapping[Pair, Pair]) -> str:
    """One line for each pair of stages: the transport, what its links measured, and what else was tried."""
    of_stages: dict[Pair, list[Link]] = defaultdict(list)
    for link in links:
        low, high = sorted(stages[link.ranks])
        of_stages[low, high].append(link)
    lines = ["links, measured there and back:"]
    for pair, same in sorted(of_stages.items()):
        for name in sorted({link.transport for link in same}):
            chosen = [link for link in same if link.transport == name]
            others = [other for other in chosen[0].bytes_per_s if other != name]
            tried = [f"{other} {_range(link.bytes_per_s[other] for link in chosen if other in link.bytes_per_s)}" for other in others]
            tried += [f"{other} not: {why}" for other, why in chosen[0].refused.items()]
            count = "" if len(chosen) == 1 else f", {len(chosen)} pairs of ranks"
            also = f" ({'; '.join(tried)})" if tried else ""
            lines.append(f"  stages {pair[0]} and {pair[1]}{count}: {name} {_range(link.bytes_per_s[name] for link in chosen)}{also}")
    return "\nbpipe: ".join(lines)


def _range(bytes_per_s: Iterable[float]) -> str:
    speeds = sorted(speed / 1e9 for speed in bytes_per_s)
    low, high = f"{speeds[0]:.3g}", f"{speeds[-1]:.3g}"
    return f"{low} GB/s" if low == high else f"{low} to {high} GB/s"


def sufficiency(stage: int, partner: int, moved_bytes: int, window_s: float, bytes_per_s: float) -> tuple[bool, str]:
    """Whether a link keeps up, and the sentence that says so.

    `window_s`: one micro-batch's forward and backward, all chunks. In the steady phase one eviction and one load, `moved_bytes` each,
    have that long (Kim et al. 2023: a transfer within a forward, which is a third of it, and two thirds of that where both overlap).
    """
    needed = 2 * moved_bytes / window_s
    enough = needed <= bytes_per_s
    verdict = "enough" if enough else "NOT enough: transfers will hold the computation up. Put the pair on one node, or move less"
    return enough, (
        f"stage {stage} moves {moved_bytes / 1e6:.4g} MB to stage {partner} and back while a micro-batch computes, about "
        f"{1e3 * window_s:.3g} ms: {needed / 1e9:.3g} GB/s of the link's {bytes_per_s / 1e9:.3g} GB/s, {verdict}"
    )
