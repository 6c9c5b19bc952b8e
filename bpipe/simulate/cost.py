"""Say what things cost: seconds a computation takes, bytes a message has, how fast links are.

In: numbers. Out: frozen costs, checked.

Any real number will do. With integers and fractions every time of the simulation is exact; a float makes what it
touches a float. Knows no schedule, no model and no device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction

from bpipe.schedule.memory import KeptMemory, Memory, memory_of
from bpipe.schedule.program import Exchange

Number = int | float | Fraction


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage, one micro-batch: seconds of each kind, bytes it sends, moves and saves.

    `forward_s` and `backward_s` are its layers alone; the output layer with its loss and the embedding come on top
    where the stage has them. Only schedules with split backwards need `weight_s`, the half that computes weight
    gradients, and `input_s`, the other one (None: the rest of `backward_s`), to which all of the output layer's and the
    embedding's backward belongs. `sent_bytes` is what the stage hands to the next one (and the size of the gradient
    that comes back), `moved_bytes` what a balancing transfer moves, `saved_bytes` what a forward saves,
    `after_input_bytes` what of a split backward is held between its halves (None: all that was saved). `transfer_s`,
    where given, is how long such a transfer takes, whatever the link. Per iteration, on every rank with the stage:
    `reduction_s` reduces its gradients over all replicas, `optimizer_s` updates its weights. Of `buckets` each is
    reduced as soon as the last backward has come to its weights.
    """

    forward_s: Number
    backward_s: Number
    weight_s: Number | None = None
    input_s: Number | None = None
    output_forward_s: Number = 0
    output_backward_s: Number = 0
    embedding_forward_s: Number = 0
    embedding_backward_s: Number = 0
    transfer_s: Number | None = None
    reduction_s: Number = 0
    optimizer_s: Number = 0
    buckets: int = 1
    sent_bytes: int = 0
    moved_bytes: int = 0
    saved_bytes: int = 0
    after_input_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{field.name} is {value}, but a cost must be finite and at least 0")
        if self.weight_s is not None and self.input_s is None and self.weight_s > self.backward_s:
            raise ValueError(
                f"weight_s {self.weight_s} is a part of backward_s {self.backward_s}, so it cannot be more"
            )
        if self.moved_bytes > self.saved_bytes:
            raise ValueError(f"moved_bytes {self.moved_bytes} must lie between 0 and saved_bytes {self.saved_bytes}")

    @property
    def whole_forward_s(self) -> Number:
        return self.forward_s + self.output_forward_s + self.embedding_forward_s

    @property
    def whole_backward_s(self) -> Number:
        return self.backward_s + self.output_backward_s + self.embedding_backward_s

    @property
    def whole_input_s(self) -> Number:
        """The first half of a split backward."""
        mine = self.backward_s - (self.weight_s or 0) if self.input_s is None else self.input_s
        return mine + self.output_backward_s + self.embedding_backward_s


@dataclass(frozen=True, slots=True)
class ShardCost:
    """One rank's shard of the vocabulary, one micro-batch: seconds of S and T, and of an input shard's two passes.

    `held_bytes`: what it holds from S to T, the logits of its rows above all.
    """

    forward_s: Number = 0
    backward_s: Number = 0
    input_forward_s: Number = 0
    input_backward_s: Number = 0
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Seconds of what passes between all shards for a micro-batch, beside the latency of their links.

    `broadcast_s`: the last stage's output to all. `gather_s`: the statistics of the loss of each to all. `reduce_s`:
    the parts of the last stage's gradient to it; with algorithm 2 behind the statistics, in one. `input_reduce_s`: the
    parts of the embeddings to the first. `input_broadcast_s`: its gradient to all. Those of a sort come one after the
    other, beside everything else.
    """

    broadcast_s: Number = 0
    gather_s: Number = 0
    reduce_s: Number = 0
    input_reduce_s: Number = 0
    input_broadcast_s: Number = 0


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two devices. `bytes_per_s` None: bytes take no time, only the latency does.

    `gap_s` is what a message between stages takes on top: a transfer is one operation of many messages' bytes, and
    begins early.
    """

    bytes_per_s: Number | None = None
    latency_s: Number = 0
    gap_s: Number = 0

    def __post_init__(self) -> None:
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}, but must be above 0; None is a link without limit")
        for name in ("latency_s", "gap_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 0")

    def scaled(self, factor: Number) -> Link:
        """Return a link that takes `factor` times as long."""
        speed = None if self.bytes_per_s is None else self.bytes_per_s / factor
        return Link(speed, self.latency_s * factor, self.gap_s * factor)

    def message_s(self, num_bytes: int) -> Number:
        """Return seconds of a message between stages."""
        return self.gap_s + self.seconds(num_bytes)

    def seconds(self, num_bytes: int) -> Number:
        """Return seconds of a transfer, exact where bandwidth and latency are."""
        if self.bytes_per_s is None:
            return self.latency_s
        if isinstance(self.bytes_per_s, float):
            return self.latency_s + num_bytes / self.bytes_per_s
        return self.latency_s + Fraction(num_bytes) / self.bytes_per_s


FREE = Link()


def ports(rank: int, between: bool) -> tuple[int, int]:
    """Return the numbers of a rank's port out and port in, inside its node or between nodes."""
    first = 4 * rank + 2 * between
    return first, first + 1


def host_port(rank: int, num_ranks: int, out: bool) -> int:
    """Return the number of a rank's port out to its node's memory, or in from there; these follow all others."""
    return 4 * num_ranks + 2 * rank + (not out)


@dataclass(frozen=True, slots=True)
class Links:
    """Links of ranks: `inside` a node or `between` nodes. `nodes[rank]` is the rank's node; empty: all are on one.

    Each rank has, for either medium, one port out and one port in, shared by what leaves or enters there. With tensor
    parallelism a rank stands for one of its devices: all do the same at once, each over its own ports. `host` joins
    every rank to its node's memory, both ways at once and beside all else.
    """

    inside: Link = FREE
    between: Link = FREE
    nodes: tuple[int, ...] = ()
    host: Link = FREE

    def crosses(self, rank: int, other: int) -> bool:
        return bool(self.nodes) and self.nodes[rank] != self.nodes[other]

    def link(self, rank: int, other: int) -> Link:
        """Return the link of two ranks; a rank with itself is linked to its own node's memory."""
        if rank == other:
            return self.host
        return self.between if self.crosses(rank, other) else self.inside


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of all stages (with chunks p*v of them) and of the links between their ranks.

    Where costs are by slice, of `slices` a micro-batch, `stages` has those of a stage's slices one behind the other,
    each with the seconds of the stage's reduction and update; `kept` is what each stage keeps for them.
    `exchange`: when ranks send, receive and wait for what passes between stages. `shards`: what each rank's shard of
    the vocabulary takes, or one for all alike; `collectives`: what passes between them. `one_sided`: ranks that move
    their activations by themselves, whatever their partner is doing; others meet it for every transfer. `synchronous`:
    an evictor waits for every transfer where it starts it, as with `--bpipe-sync-transfers`. `eager`: gradients of a
    stage are reduced as soon as they are complete, as with `--overlap-grad-reduce`, and not behind everything;
    `replicas_apart`: some of their replicas are on other nodes.
    """

    stages: tuple[StageCost, ...]
    links: Links = Links()
    exchange: Exchange = Exchange.POSTED
    one_sided: frozenset[int] = frozenset()
    synchronous: bool = False
    shards: tuple[ShardCost, ...] = ()
    collectives: CollectiveCost = CollectiveCost()
    eager: bool = False
    replicas_apart: bool = False
    slices: int = 1
    kept: tuple[KeptMemory, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.stages) // self.slices

    def of(self, stage: int, microbatch: int = 0) -> StageCost:
        """Return the cost of a stage for a micro-batch, or slice; without one, for the first."""
        return self.stages[stage * self.slices + microbatch % self.slices]

    def of_stage(self, stage: int) -> tuple[StageCost, ...]:
        """Return the costs of a stage: of a whole micro-batch, or of its slices."""
        return self.stages[stage * self.slices : (stage + 1) * self.slices]

    def scaled(self, factor: Number) -> Costs:
        """Return costs with all durations multiplied by `factor`; a link carries as much less."""
        return replace(
            self,
            stages=tuple(scaled(cost, factor) for cost in self.stages),
            links=replace(
                self.links, inside=self.links.inside.scaled(factor), between=self.links.between.scaled(factor)
            ),
            shards=tuple(scaled(shard, factor) for shard in self.shards),
            collectives=scaled(self.collectives, factor),
        )

    def holding(self, memory: Memory) -> Costs:
        """Return the costs with these bytes of every stage's micro-batch, or slice."""
        sizes = zip(self.stages, memory.stages, strict=True)
        stages = (
            replace(
                cost,
                saved_bytes=size.saved_bytes,
                moved_bytes=size.moved_bytes,
                after_input_bytes=size.after_input_bytes,
            )
            for cost, size in sizes
        )
        return replace(self, stages=tuple(stages), kept=memory.kept)

    @property
    def memory(self) -> Memory:
        """Memory of every stage."""
        after = [cost.saved_bytes if cost.after_input_bytes is None else cost.after_input_bytes for cost in self.stages]
        held = max((shard.held_bytes for shard in self.shards), default=0)
        alike = memory_of(
            [cost.saved_bytes for cost in self.stages], [cost.moved_bytes for cost in self.stages], after, held
        )
        return replace(alike, slices=self.slices, kept=self.kept)


def scaled[Cost: (StageCost, ShardCost, CollectiveCost)](cost: Cost, factor: Number) -> Cost:
    """Return a cost with all seconds multiplied by `factor`."""
    if factor == 1:
        return cost
    seconds = {one.name: getattr(cost, one.name) for one in fields(cost) if one.name.endswith("_s")}
    return replace(cost, **{name: value * factor for name, value in seconds.items() if value is not None})


def uniform(num_stages: int, cost: StageCost, links: Links | None = None) -> Costs:
    """Return equal costs for all stages."""
    return Costs((cost,) * num_stages, links or Links())


def check_fits(costs: Costs, num_stages: int, num_ranks: int, split_backward: Sequence[int], slices: int = 1) -> None:
    """Raise ValueError unless costs cover the schedule. `split_backward`: stages with a split backward."""
    if costs.slices not in (1, slices):
        raise ValueError(
            f"costs of {costs.slices} slices for a schedule of {slices}: give one for each, or one for all"
        )
    if costs.slices > 1 and costs.shards:
        raise ValueError(
            f"costs of {costs.slices} slices together with shards of the vocabulary: the cost of a shard is known for "
            "whole micro-batches only, so leave the slices out, or the vocabulary whole"
        )
    if len(costs.stages) != num_stages * costs.slices:
        raise ValueError(f"costs of {costs.num_stages} stages for a schedule of {num_stages}: give one for each stage")
    if costs.links.nodes and len(costs.links.nodes) != num_ranks:
        raise ValueError(
            f"links name the nodes of {len(costs.links.nodes)} ranks, but the schedule has {num_ranks}: give one for "
            "each "
            f"rank"
        )
    if len(costs.shards) not in (0, 1, num_ranks):
        raise ValueError(
            f"costs of {len(costs.shards)} shards, but the schedule has {num_ranks} ranks: give one for each, or one "
            "for "
            f"all alike"
        )
    for stage in split_backward:
        if any(cost.weight_s is None for cost in costs.of_stage(stage)):
            raise ValueError(
                f"stage {stage} computes its backward in halves: give weight_s, the seconds of the weights' half"
            )
