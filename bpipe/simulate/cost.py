"""Costs: seconds that computations take, bytes of messages, and speeds of links.

Any real number will do. With integers and fractions every time of the simulation is exact; a float makes what it
touches a float.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction

from bpipe.schedule.action import Kind
from bpipe.schedule.memory import KeptMemory, Memory, StageMemory
from bpipe.schedule.program import Exchange

Number = int | float | Fraction


@dataclass(frozen=True, slots=True)
class StageCost:
    """Costs of one stage for one micro-batch; a stage with the output layer or the embedding adds theirs.

    Attributes:
        forward_s: Seconds of the layers' forward.
        backward_s: Seconds of the layers' backward.
        weight_s: Seconds of its half that computes weight gradients; needed only if backwards are split.
        input_s: Seconds of its other half; None for the rest of `backward_s`. It includes the whole backward of the
            output layer and the embedding.
        output_forward_s: Seconds of the output layer and the loss, forward.
        output_backward_s: The same, backward.
        embedding_forward_s: Seconds of the embedding, forward.
        embedding_backward_s: The same, backward.
        transfer_s: Seconds of a balancing transfer, whatever the link; None to follow the link.
        reduction_s: Seconds per iteration to reduce the stage's gradients over all replicas, on every rank with the
            stage.
        optimizer_s: Seconds per iteration to update its weights.
        buckets: Parts of the gradients, each reduced as soon as the last backward has come to its weights.
        sent_bytes: Bytes that the stage passes to the next one, and of the gradient that comes back.
        moved_bytes: Bytes that a balancing transfer moves.
        saved_bytes: Bytes that a forward saves.
        after_input_bytes: Bytes held between the halves of a split backward; None for all that was saved.
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
        """Seconds of the first half of a split backward."""
        layers = self.backward_s - (self.weight_s or 0) if self.input_s is None else self.input_s
        return layers + self.output_backward_s + self.embedding_backward_s


@dataclass(frozen=True, slots=True)
class ShardCost:
    """Costs of one rank's shard of the vocabulary for one micro-batch.

    Attributes:
        forward_s: Seconds of S.
        backward_s: Seconds of T.
        input_forward_s: Seconds of an input shard's forward.
        input_backward_s: Seconds of its backward.
        held_bytes: Bytes held from S to T, above all the logits of its rows.
    """

    forward_s: Number = 0
    backward_s: Number = 0
    input_forward_s: Number = 0
    input_backward_s: Number = 0
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Seconds of collectives of all shards for a micro-batch, besides the latency of their links.

    Collectives of one sort follow each other, in parallel to everything else.

    Attributes:
        broadcast_s: The last stage's output to all.
        gather_s: Each shard's statistics of the loss to all.
        reduce_s: Parts of the last stage's gradient to it; with algorithm 2 this is one operation with the statistics.
        input_reduce_s: Parts of the embeddings to the first stage.
        input_broadcast_s: The first stage's gradient to all.
    """

    broadcast_s: Number = 0
    gather_s: Number = 0
    reduce_s: Number = 0
    input_reduce_s: Number = 0
    input_broadcast_s: Number = 0


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two devices.

    Attributes:
        bytes_per_s: Bandwidth; None if only the latency takes time.
        latency_s: Seconds of any transfer.
        gap_s: Seconds that a message between stages adds: a transfer is one operation of many messages' bytes, and
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
        """Return the seconds of a message between stages."""
        return self.gap_s + self.seconds(num_bytes)

    def seconds(self, num_bytes: int) -> Number:
        """Return the seconds of a transfer, exact if bandwidth and latency are."""
        if self.bytes_per_s is None:
            return self.latency_s
        if isinstance(self.bytes_per_s, float):
            return self.latency_s + num_bytes / self.bytes_per_s
        return self.latency_s + Fraction(num_bytes) / self.bytes_per_s


FREE = Link()


def ports(rank: int, between: bool) -> tuple[int, int]:
    """Return the numbers of a rank's outgoing and incoming port, inside its node or between nodes."""
    first = 4 * rank + 2 * between
    return first, first + 1


def host_port(rank: int, num_ranks: int, out: bool) -> int:
    """Return the number of a rank's port out to its node's memory, or in from it; these follow all others."""
    return 4 * num_ranks + 2 * rank + (not out)


@dataclass(frozen=True, slots=True)
class Links:
    """Links of ranks.

    Each rank has, inside and between nodes, one outgoing and one incoming port that all its traffic shares. With tensor
    parallelism a rank represents one of its devices: all do the same at once, each over its own ports.

    Attributes:
        inside: Link inside a node.
        between: Link between nodes.
        nodes: By rank, its node; empty if all are on one.
        host: Link of every rank to its node's memory, in both directions and in parallel to all others.
    """

    inside: Link = FREE
    between: Link = FREE
    nodes: tuple[int, ...] = ()
    host: Link = FREE

    def crosses(self, rank: int, other: int) -> bool:
        return bool(self.nodes) and self.nodes[rank] != self.nodes[other]

    def link(self, rank: int, other: int) -> Link:
        """Return the link of two ranks; that of a rank with itself leads to its own node's memory."""
        if rank == other:
            return self.host
        return self.between if self.crosses(rank, other) else self.inside


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of all stages (with chunks p*v of them) and of the links between their ranks.

    Attributes:
        stages: Costs by stage or, if by slice, of a stage's slices in order, each with the stage's reduction and
            update.
        links: Links between ranks.
        exchange: When ranks send, receive and wait for what passes between stages.
        one_sided: Ranks that move their activations alone, whatever their partner does; others meet it for every
            transfer.
        synchronous: Whether an evictor waits for every transfer when it starts it, as with `--bpipe-sync-transfers`.
        shards: Costs of each rank's shard of the vocabulary, or one for all.
        collectives: Costs of what passes between shards.
        eager: Whether gradients of a stage are reduced as soon as they are complete, as with `--overlap-grad-reduce`,
            and not after everything else.
        replicas_apart: Whether some replicas of stages are on other nodes.
        slices: Slices of a micro-batch by which costs are given.
        kept: What each stage keeps for its slices.
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
        """Return the cost of a stage for a micro-batch, or slice."""
        return self.stages[stage * self.slices + microbatch % self.slices]

    def of_stage(self, stage: int) -> tuple[StageCost, ...]:
        """Return the costs of a stage for a whole micro-batch, or for each of its slices."""
        return self.stages[stage * self.slices : (stage + 1) * self.slices]

    def scaled(self, factor: Number) -> Costs:
        """Return costs with all durations multiplied by `factor`."""
        inside, between = self.links.inside.scaled(factor), self.links.between.scaled(factor)
        return replace(
            self,
            stages=tuple(scaled(cost, factor) for cost in self.stages),
            links=replace(self.links, inside=inside, between=between),
            shards=tuple(scaled(shard, factor) for shard in self.shards),
            collectives=scaled(self.collectives, factor),
        )

    def holding(self, memory: Memory) -> Costs:
        """Return the costs with these bytes of every stage's micro-batch, or slice."""
        sizes = zip(self.stages, map(asdict, memory.stages), strict=True)
        return replace(self, stages=tuple(replace(cost, **size) for cost, size in sizes), kept=memory.kept)

    @property
    def memory(self) -> Memory:
        """Memory of every stage."""
        after = [cost.saved_bytes if cost.after_input_bytes is None else cost.after_input_bytes for cost in self.stages]
        both = zip(self.stages, after, strict=True)
        stages = tuple(StageMemory(cost.saved_bytes, cost.moved_bytes, size) for cost, size in both)
        held = max((shard.held_bytes for shard in self.shards), default=0)
        return Memory(stages, shard_bytes=held, slices=self.slices, kept=self.kept)


def scaled[Cost: (StageCost, ShardCost, CollectiveCost)](cost: Cost, factor: Number) -> Cost:
    """Return a cost with all seconds multiplied by `factor`."""
    if factor == 1:
        return cost
    seconds = {field.name: getattr(cost, field.name) for field in fields(cost) if field.name.endswith("_s")}
    return replace(cost, **{name: value * factor for name, value in seconds.items() if value is not None})


def durations(costs: Costs, num_ranks: int) -> dict[Kind, list[Number]]:
    """Return the seconds of every kind of computation by stage, or slice of one, and of shards by rank."""
    stages = costs.stages
    shards = costs.shards if len(costs.shards) > 1 else (costs.shards or (ShardCost(),)) * num_ranks
    return {
        Kind.FORWARD: [cost.whole_forward_s for cost in stages],
        Kind.BACKWARD: [cost.whole_backward_s for cost in stages],
        Kind.BACKWARD_INPUT: [cost.whole_input_s for cost in stages],
        Kind.BACKWARD_WEIGHT: [cost.weight_s or 0 for cost in stages],
        Kind.SHARD_FORWARD: [shard.forward_s for shard in shards],
        Kind.SHARD_BACKWARD: [shard.backward_s for shard in shards],
        Kind.INPUT_FORWARD: [shard.input_forward_s for shard in shards],
        Kind.INPUT_BACKWARD: [shard.input_backward_s for shard in shards],
    }


def uniform(num_stages: int, cost: StageCost, links: Links | None = None) -> Costs:
    """Return equal costs for all stages."""
    return Costs((cost,) * num_stages, links or Links())


def check_fits(costs: Costs, num_stages: int, num_ranks: int, split_backward: Sequence[int], slices: int = 1) -> None:
    """Raise ValueError unless costs cover the schedule, with `split_backward` the stages whose backward is split."""
    if costs.slices not in (1, slices):
        raise ValueError(
            f"costs of {costs.slices} slices for a schedule of {slices}: give one for each, or one for all"
        )
    if costs.slices > 1 and costs.shards:
        raise ValueError(
            f"costs of {costs.slices} slices together with shards of the vocabulary: the cost of a shard is known "
            "for whole micro-batches only, so leave the slices out, or the vocabulary whole"
        )
    if len(costs.stages) != num_stages * costs.slices:
        raise ValueError(f"the schedule has {num_stages} stages, the costs {costs.num_stages}: give one for each stage")
    if costs.links.nodes and len(costs.links.nodes) != num_ranks:
        raise ValueError(
            f"links name the nodes of {len(costs.links.nodes)} ranks, but the schedule has {num_ranks}: "
            "give one for each rank"
        )
    if len(costs.shards) not in (0, 1, num_ranks):
        raise ValueError(
            f"costs of {len(costs.shards)} shards, but the schedule has {num_ranks} ranks: "
            "give one for each, or one for all alike"
        )
    for stage in split_backward:
        if any(cost.weight_s is None for cost in costs.of_stage(stage)):
            raise ValueError(
                f"stage {stage} computes its backward in halves: give weight_s, the seconds of the weights' half"
            )


def required_bytes_per_s(moved_bytes: int, forward_s: float) -> float:
    """Return the bandwidth at which every transfer ends within one forward, as in the warm-up (Kim et al. 2023)."""
    return moved_bytes / forward_s


def steady_bytes_per_s(moved_bytes: int, forward_s: float) -> float:
    """Return the bandwidth at which an eviction and a load end within a forward and a backward, twice as long."""
    return required_bytes_per_s(moved_bytes, forward_s) * 2 / 3
