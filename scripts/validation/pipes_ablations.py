"""Take from BitPipe, one at a time, what it is made of.

In: nothing. Out: the table of docs/bidirectional.md, on standard output.

A GPT of 96 layers with 3072 hidden units on 4 nodes of 8 A800s, sizes such as the paper's (Wu et al. 2024), in 4
pipelines of 8 ranks. Simulated, on predicted seconds:

    BitPipe               two Vs of two chunks per rank, reductions beside computations, all replicas of a rank on one node
    without the V         the second chunk begins on the first rank again, so that the first's output travels back through all nodes
    without eager         gradients are reduced behind everything
    without the mapping   a pipeline lies on one node and replicas on four, in place of the other way around
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bpipe.build import build
from bpipe.check.rules import check
from bpipe.generate.bidirectional import PipesRule, Weights, schedule_by_rule, units
from bpipe.generate.family import ALIKE
from bpipe.generate.place import place
from bpipe.generate.timing import stage_ticks
from bpipe.ir.layout import Layout
from bpipe.ir.schedule import Schedule
from bpipe.models.cluster import parse_cluster
from bpipe.models.layout import Setup
from bpipe.models.model import gpt
from bpipe.models.replicas import update_seconds
from bpipe.models.switches import Switches
from bpipe.plan.predict import costs_of
from bpipe.simulate.cost import Costs
from bpipe.simulate.engine import simulate

RANKS, CHUNKS, PIPELINES = 8, 2, 4
MICROBATCHES = (8, 16, 32)


def setup_of(num_microbatches: int, eager: bool = True) -> Setup:
    return Setup(
        model=gpt("gpt-96", 96, 3072, 32, sequence=1024),
        cluster=parse_cluster(f"a800-80g:{PIPELINES}x{RANKS}"),
        tensor=1,
        pipeline=RANKS,
        micro_batch=4,
        global_batch=4 * PIPELINES * num_microbatches,
        sequence=1024,
        layers=(6,) * RANKS * CHUNKS,
        schedule="bitpipe",
        num_chunks=CHUNKS,
        switches=Switches(overlap_grad_reduce=eager),
    )


def without_the_v(num_microbatches: int) -> Schedule:
    """The same two pipes with every chunk up the ranks, by BitPipe's first rule where units one behind the other are
    longer."""
    up = tuple(range(RANKS)) * CHUNKS
    layout = Layout((up, tuple(RANKS - 1 - rank for rank in up)))
    rule = PipesRule(Weights(4 * RANKS, RANKS, -16), Weights(1, 0, 0))
    chosen = schedule_by_rule(layout, num_microbatches, stage_ticks(ALIKE, CHUNKS), [CHUNKS * RANKS] * RANKS, rule)
    orders = (
        chosen.orders if chosen is not None and num_microbatches > RANKS else units(layout, RANKS, num_microbatches)
    )
    schedule = place("bitpipe-without-v", num_microbatches, layout, orders)
    check(schedule)
    return schedule


def without_mapping(setup: Setup) -> Costs:
    """Return the setup with messages inside a node, and reductions across nodes."""
    costs, device = costs_of(setup), setup.cluster.device
    slow = replace(setup.cluster, device=replace(device, inside_bytes_per_s=device.between_bytes_per_s))
    updates = update_seconds(replace(setup, cluster=slow))
    stages = tuple(
        replace(cost, reduction_s=reduction, optimizer_s=update)
        for cost, (reduction, update) in zip(costs.stages, updates, strict=True)
    )
    return replace(costs, stages=stages, links=replace(costs.links, nodes=()), replicas_apart=True)


def table() -> Iterator[str]:
    """Milliseconds of an iteration, with what is added to BitPipe's in percent."""
    yield (
        "| micro-batches of a pipeline | BitPipe | without the V | without eager reductions | without replicas on "
        "one node |"
    )
    yield "|---|---|---|---|---|"
    for m in MICROBATCHES:
        setup = setup_of(m)
        schedule, costs = build(setup.program()), costs_of(setup)
        whole = float(simulate(schedule, costs).makespan_s)
        others = (
            simulate(without_the_v(m), costs),
            simulate(schedule, costs_of(setup_of(m, eager=False))),
            simulate(schedule, without_mapping(setup)),
        )
        times = [float(other.makespan_s) for other in others]
        cells = [f"{1e3 * seconds:.0f} (+{100 * (seconds / whole - 1):.1f} %)" for seconds in times]
        yield f"| {m} | {1e3 * whole:.0f} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table()))
