"""Predict what every stage of a model would hold, and every rank at its peak, without its memory and without a group.

    python -m bpipe.torch.trace '{"module": "FILE:FUNCTION", ...}'      prints JSON, for `bpipe trace --module`

The function that makes the stages is called on torch's fake tensors, which have shapes and a device and no bytes, so
that each device's own kernels decide what is saved. References to fake tensors cannot be counted, so a micro-batch's
own storages are those that are no parameter, buffer or other tensor of a module, no input, and no output of a stage.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bpipe.balance.config import BalanceConfig
from bpipe.build import build
from bpipe.runtime.graph import Regions, nodes_of, saved_names, saved_tensors
from bpipe.schedule.families.families import default_family
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.schedule import Schedule
from bpipe.torch.memory_budget import Memory, RankBudgets, StageSizes, need_bytes
from bpipe.torch.orders import Source, config_of, refuse_unrunnable

# What two micro-batches both save is neither's own.
_MICROBATCHES = 2
# All stages' modules in order, a micro-batch's inputs of the first, and, if there is a loss, that and its target.
Made = Sequence[Any]


@dataclass(frozen=True)
class TracedStage:
    """What a micro-batch of a stage saves, and its number of parameters."""

    sizes: StageSizes
    parameters: int


@dataclass(frozen=True)
class PredictedPeaks:
    """A schedule that would run, and the most bytes of micro-batches and host buffers on each rank."""

    schedule: Schedule
    need_bytes: tuple[int, ...]


def trace_stages(
    make: Callable[[], Made], device: str | torch.device = "cpu", minimum_bytes: int = 65536
) -> list[TracedStage]:
    """Return what each stage would save on a device.

    Args:
        make: Called on fake tensors, returns the modules of all stages in order and a tuple with one micro-batch's
            inputs of the first; followed by the loss and its target, if there is a loss.
        device: The device whose kernels decide what is saved; it need not be present.
        minimum_bytes: Size of the smallest storage that moves.

    Raises:
        ValueError: `make` returns anything else, or tensors of other kinds (DTensors).
    """
    with FakeTensorMode() as mode, torch.device(device):
        stages, inputs, *of_loss = _checked(make())
        received = [tuple(_received(tensor, mode) for tensor in inputs) for _ in range(_MICROBATCHES)]
        traced = []
        for index, module in enumerate(stages):
            loss = of_loss if index == len(stages) - 1 else []
            # A stage keeps what it received; the first one's inputs are the user's.
            of_user = (*loss[1:], *(received[1] if not index else ()))
            ran = [_forward(module, microbatch, loss) for microbatch in received]
            # What one micro-batch saved and nobody else holds.
            outputs = [output for made, _ in ran for output in made]
            first, second = (_saved(roots) for _, roots in ran)
            aside = {*_of_module(module), *map(_address, (*of_user, *outputs)), *first.keys()}
            own = [nbytes for address, nbytes in second.items() if address not in aside]
            moved = [nbytes for nbytes in own if nbytes >= minimum_bytes]
            parameters = sum(parameter.numel() for parameter in module.parameters())
            traced.append(TracedStage(StageSizes(index, sum(own), tuple(moved)), parameters))
            received = [tuple(_received(output, mode) for output in outputs) for outputs, _ in ran]
    return traced


def _checked(made: Made) -> Made:
    """Return the function's result. Raises ValueError unless it is stages, inputs, and a loss with its target or none."""
    stages = made[0] if isinstance(made, tuple) and len(made) in (2, 4) else ()
    if not stages or not all(isinstance(stage, nn.Module) for stage in stages) or not isinstance(made[1], tuple):
        raise ValueError(
            "the function returns no stages: let it return (modules of all stages in order, inputs of the first in a "
            "tuple), followed by loss and target if there is a loss"
        )
    return made


def _received(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a tensor as a stage receives it, with memory of its own."""
    if type(tensor) not in (FakeTensor, nn.Parameter, torch.Tensor):
        raise ValueError(
            f"a {type(tensor).__name__} between stages cannot be traced: trace what stages are before that"
        )
    received = torch.empty_like(tensor)
    return received.requires_grad_() if received.is_floating_point() else received


def _forward(stage: nn.Module, inputs: Sequence[Any], loss: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """Return a stage's outputs, and the roots of its graph."""
    output = stage(*inputs)
    outputs = list(output) if isinstance(output, (tuple, list)) else [output]
    roots = [loss[0](output, loss[1])] if loss else outputs
    return outputs, [root.grad_fn for root in roots]


def _saved(roots: Sequence[Any]) -> dict[int, int]:
    """Return the bytes of every storage that the graph saved, by its address, in the order of the walk."""
    regions = Regions()
    tensors = [
        tensor
        for node in nodes_of(roots)
        for name in saved_names(type(node))
        if not regions.recomputes(node, name)
        for tensor in saved_tensors(node, name)
    ]
    tensors += [tensor for tensor, _ in regions.tensors()]
    return {_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _of_module(module: nn.Module) -> Iterator[int]:
    """Yield the storages of a module's parameters, buffers and other tensors."""
    for tensor in (*module.parameters(), *module.buffers()):
        yield _address(tensor)
    for part in module.modules():
        yield from (_address(value) for value in vars(part).values() if isinstance(value, torch.Tensor))


def predict_peaks(
    traced: Sequence[TracedStage],
    num_ranks: int,
    num_microbatches: int,
    schedule: Source | None = None,
    balance: BalanceConfig | None = BalanceConfig(),
    memory: Memory | None = None,
    group_size: int | None = None,
) -> PredictedPeaks:
    """Return what every rank would hold of these stages.

    Options are those of `BalancedSchedule`. By default the schedule is 1F1B, for several stages per rank interleaved.
    Raises ValueError as that does, and for split backwards: what torch keeps between the halves is not known.
    """
    sizes = {stage.sizes.stage: stage.sizes for stage in traced}
    stages: Any = [SimpleNamespace(group_size=num_ranks, num_stages=len(traced))]
    schedule = default_family(max(1, len(traced) // num_ranks)) if schedule is None else schedule
    if memory is not None:
        plain = build(config_of(schedule, stages, num_microbatches, None, group_size))
        plan = RankBudgets.of(memory, plain, balance, differing=False).plan(plain, sizes)
        return PredictedPeaks(plan.schedule, plan.need_bytes)
    balanced = build(config_of(schedule, stages, num_microbatches, balance, group_size))
    refuse_unrunnable(balanced)
    if balanced.split_stages:
        raise ValueError(
            f"{balanced.name} splits backwards, and what torch keeps from dgrad to wgrad is known only once they have "
            "run: use whole backwards (1f1b, interleaved-1f1b)"
        )
    return PredictedPeaks(balanced, need_bytes(balanced, sizes))


def _function(name: str) -> Callable[[], Made]:
    """Return the function that FILE:FUNCTION names."""
    file, colon, function = name.rpartition(":")
    path = Path(file)
    if not colon or not path.is_file():
        raise ValueError(f"--module {name}: there is no such file: give FILE:FUNCTION, such as model.py:stages")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    make: Callable[[], Made] | None = getattr(module, function, None)
    if make is None:
        raise ValueError(f"--module {name}: {file} has no {function}")
    return make


def answer(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes of every stage, and peaks of every rank without balancing and with it."""
    traced = trace_stages(_function(options["module"]), options["device"])
    stages = [
        {"parameters": stage.parameters, "saved_bytes": stage.sizes.saved_bytes, "moved_bytes": stage.sizes.moved_bytes}
        for stage in traced
    ]
    settings = {name: options[name] for name in ("schedule", "group_size")}
    sizes = (traced, options["ranks"], options["microbatches"])
    alone = predict_peaks(*sizes, balance=None, **settings)
    bounds = options["bounds"] and tuple(options["bounds"])
    balance = BalanceConfig(bounds=bounds, hosts=options["hosts"] or PAIR)
    balanced = predict_peaks(*sizes, balance=balance, **settings)
    return {"stages": stages, "alone_bytes": alone.need_bytes, "balanced_bytes": balanced.need_bytes}


if __name__ == "__main__":
    try:
        print(json.dumps(answer(json.loads(sys.argv[1]))))
    except (ValueError, OSError) as error:
        print(f"bpipe: error: {error}", file=sys.stderr)
        sys.exit(2)
