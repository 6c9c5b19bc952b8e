"""Profiles: measured or given seconds of stages in a JSON file, which replace predicted `Costs`.

    {"stages": [{"forward_s": 0.143, "backward_s": 0.288, "transfer_s": 0.0156, "output_s": 0, "micro_batch": 2, "layers": 10}]}

There is one entry for all stages, or one for each; entries with `micro_batch` count for setups of that size only.
Seconds of an entry with `layers` are scaled to the stage's own number. `bpipe profile` adds what it `measured`, and the
file is refused for setups that differ in it. `bpipe trace` writes sizes alone: saved bytes and `parameters`. The cost
model supplies the rest; missing halves of a split backward (`input_s`, `weight_s`) are the predicted shares of
`backward_s`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bpipe.predict.layout import Setup
from bpipe.predict.matmul import Exposed
from bpipe.predict.training import OF_MODEL, OF_SETUP, OF_STAGE, Traced
from bpipe.simulate.cost import Costs, ShardCost, StageCost
from bpipe.values import LARGEST_BYTES, a_number, a_whole, load_json

NONE = Exposed(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Entry:
    """Measured facts of a stage; None: not given.

    `output_s` is the output layer and the loss, forward and backward together.
    """

    forward_s: float | None = None
    backward_s: float | None = None
    input_s: float | None = None
    weight_s: float | None = None
    transfer_s: float | None = None
    output_s: float | None = None
    embedding_s: float | None = None
    reduction_s: float | None = None
    optimizer_s: float | None = None
    saved_bytes: int | None = None
    parameters: int | None = None
    micro_batch: int | None = None
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """All entries of a file, in its order. `traced`: the file is a trace's, which has sizes and no seconds."""

    source: str
    entries: tuple[Entry, ...]
    measured: tuple[tuple[str, object], ...] = ()
    traced: Traced | None = None

    def conflict(self, setup: Setup) -> str | None:
        """Return why the file does not apply to this setup; None if it does."""
        if self.measured and setup.context > 1:
            return f"measured without context parallelism, but the setup has {setup.context}: leave one of the two out"
        if setup.model.hybrid is not None:
            return f"measured for equal layers, but those of {setup.model.name} differ: leave it out"
        for name, value in self.measured:
            own = getattr(setup.model if name in OF_MODEL else setup, name)
            if own != value:
                return f"measured with {name} {value}, but the setup has {own}: profile that, too"
        if any(entry.micro_batch in (None, setup.micro_batch) for entry in self.entries):
            return None
        sizes = sorted({entry.micro_batch for entry in self.entries if entry.micro_batch is not None})
        return f"no stage of micro-batch size {setup.micro_batch}, only of {sizes}: profile that size, too"

    def entries_for(self, setup: Setup) -> tuple[Entry, ...]:
        """Return the entry of each stage of the setup."""
        conflict = self.conflict(setup)
        if conflict:
            raise ValueError(f"{self.source}: {conflict}")
        entries = [entry for entry in self.entries if entry.micro_batch in (None, setup.micro_batch)]
        if len(entries) not in (1, setup.num_stages):
            raise ValueError(
                f"{self.source}: {len(entries)} stages for micro-batch size {setup.micro_batch}, but the setup has "
                f"{setup.num_stages}: give one for all, or one for each"
            )
        return tuple(entries * setup.num_stages if len(entries) == 1 else entries)

    def apply(self, setup: Setup, costs: Costs, collectives: Exposed = NONE) -> Costs:
        """Return the costs with measured values. `collectives`: a layer's, which a measurement of one rank lacks."""
        if setup.slices > 1:
            raise ValueError(
                f"{self.source}: whole sequences were measured, but slices {setup.slices} take other shares: leave "
                "out the profile or the slices"
            )
        entries = self.entries_for(setup)
        # `bpipe profile` measures one tensor-parallel rank alone, and names the number of ranks.
        missing = collectives if "tensor" in dict(self.measured) else NONE
        first = None if setup.input_shards else 0
        last = None if setup.is_sharded else setup.num_stages - 1
        stages = tuple(
            _measured(
                cost,
                entry,
                num_layers,
                Exposed(*(num_layers * seconds for seconds in missing)),
                keep_halves=setup.keeps_halves,
                ends=(stage == first, stage == last),
            )
            for stage, (cost, entry, num_layers) in enumerate(zip(costs.stages, entries, setup.layers, strict=True))
        )
        shards = (_shard_with(shard, entries[0].embedding_s, entries[-1].output_s, setup) for shard in costs.shards)
        return replace(costs, stages=stages, shards=tuple(shards))


def _shard_with(shard: ShardCost, embedding_s: float | None, output_s: float | None, setup: Setup) -> ShardCost:
    """Divide a measured output layer among the ranks, S and T in the predicted ratio; embeddings are looked up."""
    if output_s is not None:
        scale = output_s / setup.pipeline / (shard.forward_s + shard.backward_s)
        shard = replace(shard, forward_s=shard.forward_s * scale, backward_s=shard.backward_s * scale)
    if embedding_s is not None and setup.input_shards:
        shard = replace(shard, input_forward_s=embedding_s / 3, input_backward_s=embedding_s * 2 / 3)
    return shard


def _measured(
    cost: StageCost, entry: Entry, num_layers: int, missing: Exposed, *, keep_halves: bool, ends: tuple[bool, bool]
) -> StageCost:
    """Return the cost with an entry's values, scaled to the stage's layers.

    Args:
        cost: Predicted cost.
        entry: Measured values.
        num_layers: Layers of the stage.
        missing: Collectives to add to measured values; predicted ones contain them.
        keep_halves: Whether weights' halves are deferred.
        ends: Whether the stage has the embedding, and the output layer.
    """
    scale = 1 if entry.layers is None else num_layers / entry.layers
    # All saved bytes were moved in the measurement.
    part = cost.moved_bytes / cost.saved_bytes if cost.saved_bytes else 1
    changes: dict[str, Any] = {}
    if entry.input_s is not None and entry.weight_s is not None and keep_halves:
        changes |= {"input_s": entry.input_s * scale, "weight_s": entry.weight_s * scale}
    elif entry.backward_s is not None and cost.input_s is not None and cost.weight_s is not None and cost.backward_s:
        # The predicted shares of a measured whole.
        share = entry.backward_s * scale / cost.backward_s
        changes |= {"input_s": cost.input_s * share, "weight_s": cost.weight_s * share}
    input_s = changes.get("input_s", cost.input_s)
    if input_s is not None and (entry.input_s is not None or entry.backward_s is not None):
        # The gradients of inputs are what is exchanged.
        changes["input_s"] = input_s + missing.input_half_s
    if entry.forward_s is not None:
        changes["forward_s"] = entry.forward_s * scale + missing.forward_s
    if entry.backward_s is not None:
        changes["backward_s"] = entry.backward_s * scale + missing.backward_s
    if entry.transfer_s is not None:
        changes["transfer_s"] = entry.transfer_s * scale * part
    for name in ("reduction_s", "optimizer_s"):
        if getattr(entry, name) is not None:
            changes[name] = getattr(entry, name)
    # Two of three products are backward ones.
    for name, here in zip(("embedding", "output"), ends, strict=True):
        value = getattr(entry, f"{name}_s")
        if value is not None and here:
            changes |= {f"{name}_forward_s": value / 3, f"{name}_backward_s": value * 2 / 3}
    if entry.saved_bytes is not None:
        changes["saved_bytes"] = round(entry.saved_bytes * scale)
        changes["moved_bytes"] = round(entry.saved_bytes * scale * part)
    return replace(cost, **changes)


def read_profile(path: str) -> Profile:
    """Read a profile. Raises ValueError naming the entry and the key that is wrong."""
    try:
        document: Any = load_json(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    stages = document.get("stages") if isinstance(document, dict) else None
    if not isinstance(stages, list) or not stages:
        raise ValueError(f'{path}: a profile is {{"stages": [{{"forward_s": ...}}]}}, with at least one stage')
    measured = document.get("measured", {})
    if not isinstance(measured, dict):
        raise ValueError(f"{path}: measured is {measured!r}, but must be an object")
    entries = tuple(_entry(path, index, stage) for index, stage in enumerate(stages))
    if any(entry.parameters is not None for entry in entries):
        return Profile(path, entries, traced=_traced(path, entries, measured))
    return Profile(path, entries, tuple((name, measured[name]) for name in (*OF_MODEL, *OF_STAGE) if name in measured))


def _traced(path: str, entries: Sequence[Entry], measured: Mapping[str, object]) -> Traced:
    sizes = [(entry.saved_bytes, entry.parameters, entry.micro_batch) for entry in entries]
    missing = [name for name in (*OF_MODEL, *OF_SETUP[:-1]) if name not in measured]
    if missing or any(None in size for size in sizes) or len({size[-1] for size in sizes}) > 1:
        lacks = f"measured lacks {', '.join(missing)}" if missing else "saved_bytes, parameters and one micro_batch"
        raise ValueError(f"{path}: a trace must give the sizes of every stage: {lacks}")
    values = ((name, measured[name]) for name in (*OF_MODEL, *OF_SETUP[:-1]))
    facts = [(name, tuple(value) if isinstance(value, list) else value) for name, value in values]
    saved, parameters = (tuple(size[place] or 0 for size in sizes) for place in (0, 1))
    return Traced((*facts, ("micro_batch", sizes[0][-1])), saved, parameters)


_KEYS = {field.name for field in fields(Entry)}
_WHOLE = ("saved_bytes", "parameters", "micro_batch", "layers")


def _entry(path: str, index: int, stage: object) -> Entry:
    if not isinstance(stage, dict):
        raise ValueError(f"{path}: stage {index} is {stage!r}, but must be an object")
    unknown = sorted(set(stage) - _KEYS)
    if unknown:
        raise ValueError(f"{path}: stage {index} has unknown keys {', '.join(unknown)}: choose from {', '.join(_KEYS)}")
    for key, value in stage.items():
        if key in _WHOLE:
            a_whole(value, f"{path}: stage {index}: {key}", int(key != "saved_bytes"), LARGEST_BYTES)
        else:
            a_number(value, f"{path}: stage {index}: {key}")
    if ("input_s" in stage) != ("weight_s" in stage):
        raise ValueError(
            f"{path}: stage {index} has only one half of a backward: give both input_s and weight_s, or neither"
        )
    return Entry(**stage)
