"""Features of stages under `BalancedSchedule`, compared with torch's own class, case by case in the same processes.
There are two pipelines of two ranks with another dimension across them, or one pipeline of four ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bpipe.balance.config import BalanceConfig
from bpipe.runtime.meter import Meter
from bpipe.torch import BalancedSchedule
from bpipe.torch.upstream import receive_buffers
from tests.gloo.pipelined import MICROBATCHES, OPTIONS, PLACES, TRANSFERS, facts, lacks_before
from tests.gloo.pipelined_stages import (
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Block,
    Part,
    loss_of,
    same,
    stages_of,
    steps_of,
)

RANKS = 4
ONE, LOOP = schedules.Schedule1F1B, schedules.ScheduleInterleaved1F1B
Make = Callable[[int, int], nn.Module]


@dataclass(frozen=True)
class Feature:
    """A feature of stages.

    Attributes:
        wrap: `wrap(module, mesh)` makes a stage of a module.
        alone: Whether there is one pipeline of four ranks, instead of two of two ranks with a mesh across them.
        enough: The least share of activations that must move.
        emptied: Whether torch's receive buffers hold nothing between steps.
        shapes: `shapes(stage, num_stages)` gives torch a stage's shapes in place of its handshake.
        slow: Whether it runs only with --slow.
        passes_dtensors: Whether stages pass DTensors.
    """

    wrap: Callable[[nn.Module, DeviceMesh], nn.Module] = lambda module, mesh: module
    make: Make = Part
    alone: bool = False
    schedule: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    enough: float = 0.97
    num_steps: int = 2
    emptied: bool = True
    shapes: Callable[[int, int], dict[str, Any]] = lambda stage, num_stages: {}
    slow: bool = False
    passes_dtensors: bool = False

    @property
    def lacks(self) -> str:
        """Return why this feature is skipped with the installed torch; empty if it is not."""
        return lacks_before(2, 12) if self.passes_dtensors else ""


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group())


def sharded(module: nn.Module, mesh: DeviceMesh, resharding: bool = False, half: bool = False) -> nn.Module:
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": resharding}
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    fully_shard(module, **options)
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.set_gradient_divide_factor(1.0)
            submodule.set_force_sum_reduction_for_comms(True)
    return module


def compiled(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in module.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    return module


def by_inductor(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in module.blocks:  # type: ignore[union-attr]
        block.compile()
    return module


class Reentrant(nn.Module):
    """A block recomputed by torch's older checkpoint, which runs a backward inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=True)


def shapes_of(stage: int, num_stages: int) -> dict[str, Any]:
    """Return shapes in place of torch's handshake, which asks for input gradients that this checkpoint cannot give."""
    first, last = stage == 0, stage == num_stages - 1
    received = torch.zeros(ROWS, LENGTH, *([] if first else [WIDTH]), dtype=torch.int64 if first else None)
    output = torch.zeros(ROWS, LENGTH, VOCABULARY if last else WIDTH, requires_grad=True)
    arguments: dict[str, Any] = {"input_args": (received.requires_grad_(not first),), "output_args": (output,)}
    arguments |= {} if first else {"input_grads": (torch.zeros_like(received),)}
    arguments |= {} if last else {"output_grads": (torch.zeros_like(output),)}
    # Torch 2.11's handshake takes no gradients.
    return {name: value for name, value in arguments.items() if name in signature(PipelineStage).parameters}


def checkpointed(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    blocks: Any = module.blocks
    for number in range(len(blocks)):
        blocks[number] = checkpoint_wrapper(blocks[number], early_stop=False)
    return module


def selectively(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Keep every other product, and attention, as torchtitan does."""

    def contexts() -> Any:
        count = [0]

        def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if function == torch.ops.aten.addmm.default:
                count[0] += 1
                return CheckpointPolicy.MUST_SAVE if count[0] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
            is_attention = "attention" in str(function)
            return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    blocks: Any = module.blocks
    for number in range(len(blocks)):
        blocks[number] = checkpoint_wrapper(blocks[number], context_fn=contexts, early_stop=False)
    return module


class CastPart(Part):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class TwoProducts(nn.Module):
    """A block whose residual stream may be a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in module.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module


def sequence_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module.mesh = mesh  # type: ignore[assignment]
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for block in module.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, plan)
    return module


class SequencePart(Part):
    """A block whose residual stream is sharded over the sequence inside a stage, and optionally between stages."""

    mesh: DeviceMesh
    passes_spread = False

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages, TwoProducts)

    def forward(self, x: Any) -> Any:
        x = x if self.embedding is None else self.embedding(x)
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])
        for block in self.blocks:
            x = block(x)
        if self.head is None and self.passes_spread:
            return x
        x = x.redistribute(placements=[Replicate()]).to_local()
        return x if self.head is None else self.head(x)


class SpreadPart(SequencePart):
    passes_spread = True


class Routed(nn.Module):
    """Experts without a capacity, so the rows of each differ between micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        chosen = self.gate(rows).argmax(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            own_rows = (chosen == number).nonzero().flatten()
            out = out.index_add(0, own_rows, torch.tanh(expert(rows[own_rows])))
        return x + out.view_as(x)


def blocks_of(kind: Callable[[], nn.Module]) -> Make:
    return lambda stage, num_stages: Part(stage, num_stages, kind)


FEATURES = {
    "DDP": Feature(replicated),
    "FSDP2": Feature(sharded),
    "FSDP2, sharded again behind a forward": Feature(lambda module, mesh: sharded(module, mesh, resharding=True)),
    "FSDP2 in 16 bits": Feature(lambda module, mesh: sharded(module, mesh, half=True)),
    "FSDP2, grouped": Feature(
        sharded, schedule="grouped-interleaved", options={"balance": BalanceConfig((2,), hosts="host")}
    ),
    "tensor parallel": Feature(tensor_parallel, blocks_of(TwoProducts)),
    "sequence parallel": Feature(sequence_parallel, SequencePart),
    "DTensors between stages": Feature(sequence_parallel, SpreadPart, enough=0.9, emptied=False, passes_dtensors=True),
    "compiled": Feature(compiled, alone=True),
    "compiled by inductor": Feature(by_inductor, alone=True, slow=True),
    "checkpointed, reentrant": Feature(make=blocks_of(Reentrant), alone=True, shapes=shapes_of),
    "checkpointed": Feature(checkpointed, alone=True),
    "selectively checkpointed": Feature(selectively, alone=True),
    "selectively checkpointed, FSDP2": Feature(lambda module, mesh: sharded(selectively(module, mesh), mesh)),
    "selectively checkpointed, tensor parallel": Feature(
        lambda module, mesh: tensor_parallel(selectively(module, mesh), mesh), blocks_of(TwoProducts)
    ),
    "autocast": Feature(make=CastPart, alone=True),
    "experts of differing sizes": Feature(
        make=blocks_of(Routed), alone=True, options={"transfers": replace(TRANSFERS, differing=True)}, enough=0.9
    ),
}


def of_feature(feature: Feature, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    across, pipeline = mesh["data"], mesh["pipeline"]
    if feature.alone:
        group, place, places = None, rank, "chain"
    else:
        group, place, places = pipeline.get_group(), pipeline.get_local_rank(), "loop"
    indices, num_stages = PLACES[places](place, RANKS if feature.alone else 2)

    def mesh_of(names: Any, layout: Any = None) -> DeviceMesh | None:
        return across if tuple(names) == ("data",) else None

    def stages() -> Any:
        settings = {"group": group} | ({"get_mesh": mesh_of} if feature.passes_dtensors else {})
        return [
            stages_of(
                [index],
                num_stages,
                feature.make,
                lambda module: feature.wrap(module, across),
                **settings,
                **feature.shapes(index, num_stages),
            )[0]
            for index in indices
        ]

    theirs = stages()
    reference = ONE(theirs[0], MICROBATCHES, loss_of) if feature.alone else LOOP(theirs, MICROBATCHES, loss_of)
    expected = steps_of(reference, theirs, MICROBATCHES, feature.num_steps)
    ours, meter = stages(), Meter()
    away: dict[str, Any] = {} if feature.alone else {"balance": BalanceConfig((3,), hosts="host")}
    balanced = BalancedSchedule(
        ours,
        MICROBATCHES,
        loss_of,
        schedule=feature.schedule or ("1f1b" if feature.alone else "interleaved-1f1b"),
        meter=meter,
        **{**OPTIONS, **away, **feature.options},
    )
    actual = steps_of(balanced, ours, MICROBATCHES, feature.num_steps)
    assert balanced.buffers is not None
    return {**facts(balanced, meter, same(expected, actual), place), "received_bytes": balanced.buffers.nbytes}


def lean_and_not(rank: int, world: int) -> dict[str, Any]:
    """Compare the bytes in torch's receive buffers, at the peak and between steps, with and without lean buffers."""
    result: dict[str, Any] = {"same": True}
    bits = []
    for lean in (False, True):
        indices, num_stages = PLACES["loop"](rank, world)
        stages, meter = stages_of(indices, num_stages), Meter()
        balanced = BalancedSchedule(
            stages, MICROBATCHES, loss_of, schedule="interleaved-1f1b", meter=meter, lean_buffers=lean, **OPTIONS
        )
        bits.append(steps_of(balanced, stages, MICROBATCHES, 3))
        sizes = [
            buffer.untyped_storage().nbytes()
            for stage in stages
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for buffer in receive_buffers(infos)
        ]
        result |= {f"between, {lean}": sum(sizes), f"peak, {lean}": meter.peak_bytes}
        balanced.engine.release()
    return {**result, "same": same(*bits)}


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))


def runs(folder: Path) -> dict[str, Any]:
    cases = {
        name: lambda rank, world, feature=feature: of_feature(feature, rank, mesh())
        for name, feature in FEATURES.items()
        if not feature.lacks
    }
    return {**cases, "lean buffers": lean_and_not}
