"""One stage of Megatron's own model, with its compiled fusions and the transfers of the fullest stage.

Needs megatron-core, and is skipped without it. Reports, for a GPT-3 and a LLaMA model: the part of what a forward
leaves allocated that moves, by the allocator's counters; whether gradients have the bits of a run without an engine,
dropout on; and whether torch keeps asking the driver for memory over many rounds. The stage is Megatron's, the loop
around it ours.
"""

import importlib.util
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import Executor
from bpipe.transport.streams import synchronize
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result, drawn, moved_bytes, repeats, say, tidy
from tests.gpu.one_stage import balanced, engine_of, loop_of, to_host

MINIMUM_BYTES = 1 << 16
# With less, the schedule's bound means little: `--bpipe` counts micro-batches, and the rest of each stays.
ENOUGH = 0.9
SEED = 1234

# Torch replaces Transformer Engine and Apex here; Megatron's own compilation stays on.
COMMON = shlex.split("""
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-rope-fusion --vocab-size 512 --micro-batch-size 1 --bf16 --pipeline-model-parallel-size 3
""")
MODELS = {
    "GPT-3 kind, dropout": "",
    "LLaMA kind": """
        --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    """,
}


@dataclass(frozen=True)
class StageShape:
    """Sizes of one stage, the second of three. `layers` is the number of its layers."""

    layers: int
    hidden: int
    heads: int
    sequence: int

    @property
    def flags(self) -> list[str]:
        """Return Megatron's flags for a model of three such stages."""
        sizes = {
            "num-layers": 3 * self.layers,
            "hidden-size": self.hidden,
            "num-attention-heads": self.heads,
            "seq-length": self.sequence,
            "max-position-embeddings": self.sequence,
        }
        return [word for name, value in sizes.items() for word in (f"--{name}", str(value))]


@dataclass(frozen=True)
class Sizes:
    shape: StageShape
    rounds: int
    minimum_bytes: int = MINIMUM_BYTES
    stages: int = 8
    microbatches: int = 16


SIZES = {
    FULL: Sizes(StageShape(2, 4096, 32, 2048), 50),
    MODERATE: Sizes(StageShape(1, 2048, 16, 1024), 6),
    SMALL: Sizes(StageShape(1, 128, 4, 64), 3, 1, stages=4, microbatches=8),
}


class MegatronStage:
    """An inner stage, as the loop expects it.

    Its output ends in a weighted sum, so that only the graph holds what was computed.
    """

    def __init__(self, args: Any, model: Any, device: torch.device) -> None:
        from megatron.core.utils import get_attr_wrapped_model

        self._model = model
        self._device = device
        self._set_input = get_attr_wrapped_model(model, "set_input_tensor")
        self._shape = (args.seq_length, args.micro_batch_size, args.hidden_size)
        self._dtype = args.params_dtype
        self._factor = self._random(0)

    def _random(self, seed: int) -> torch.Tensor:
        return drawn(self._shape, seed, self._device).to(self._dtype)

    def __call__(self, received: torch.Tensor) -> torch.Tensor:
        self._set_input([received])
        output = self._model(None, None, None)
        self._set_input([None])
        end: torch.Tensor = (output * self._factor).sum()
        return end

    def received(self, microbatch: int) -> torch.Tensor:
        return self._random(1000 + microbatch).requires_grad_()

    def start_over(self) -> None:
        """Reset dropout and gradients, so that the next iteration repeats the last one."""
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(SEED)
        self._model.zero_grad_buffer()

    def gradients_of(self, loop: Executor, engine: Engine | None) -> list[torch.Tensor]:
        self.start_over()
        loop.run(engine)
        synchronize(self._device)
        return self.gradients()

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.main_grad.clone() for parameter in self._model.parameters()]


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    device = on.device
    if importlib.util.find_spec("megatron.core") is None:
        return Result(skipped="megatron-core is not installed here")
    on.prepare_megatron()
    result = Result()
    for number, (name, flags) in enumerate(MODELS.items()):
        say(f"{name}:")
        with _stage([*COMMON, *sizes.shape.flags, *flags.split()], device) as stage:
            _look(device, stage, sizes, until if number else _half(until), name, result)
        tidy(device)
    result.row("functions compiled", _compiled())
    return result


def _half(until: float) -> float:
    """Return the first model's share of the remaining time."""
    now = time.monotonic()
    return now + (until - now) / 2


@contextmanager
def _stage(flags: list[str], device: torch.device) -> Iterator[MegatronStage]:
    from megatron.scheduling.options import flags as ours
    from megatron.scheduling.record import one_stage

    args = one_stage.parse(flags, ours.add_arguments)
    # The second of three: no embedding, no loss. Gradients are summed but not reduced, because there are no replicas.
    with one_stage.chunks(args, 1) as (model,):
        # Megatron's wrapper for data parallelism has no types.
        wrapped: Any = model
        with wrapped.no_sync():
            yield MegatronStage(args, model, device)


def _look(device: torch.device, stage: MegatronStage, sizes: Sizes, until: float, name: str, result: Result) -> None:
    plan = balanced(sizes.stages, sizes.microbatches)
    loop = loop_of(plan, 0, stage, stage.received)
    # With the first calls, functions are compiled, and recompiled for unexpected inputs.
    for microbatch in range(3):
        stage(stage.received(microbatch)).backward()
    _fraction(device, stage, sizes, name, result)
    expected, again = (stage.gradients_of(loop, None) for _ in range(2))
    unlike = differing(expected, again)
    result.check(f"{name}: two runs without an engine", not unlike, f"{unlike} of {len(expected)} gradients differ")
    engine = engine_of(plan, 0, device, to_host(device), sizes.minimum_bytes, poison=True)
    wrong, reserved = 0, []
    for _ in repeats(sizes.rounds, until, least=3):
        wrong += bool(differing(stage.gradients_of(loop, engine), expected))
        reserved.append(int(torch.accelerator.memory_reserved(device)))
    text = (
        f"{wrong} of {len(reserved)} iterations differ, {engine.moved_bytes.get(0, 0) / 2**20:.4g} MiB moved per "
        "micro-batch"
    )
    result.check(f"{name}: gradients after evicting and loading", wrong == 0 and engine.moved_bytes.get(0, 0) > 0, text)
    flat = len(set(reserved[1:])) == 1
    text = f"{'flat' if flat else f'NOT flat: {sorted(set(reserved[1:]))} B'} from round 2 to {len(reserved)}"
    result.check(f"{name}: memory reserved", flat, f"{text}, {reserved[-1] / 2**20:.4g} MiB")
    result.facts[name] |= {"wrong": wrong, "reserved": reserved}
    engine.release()


def _fraction(device: torch.device, stage: MegatronStage, sizes: Sizes, name: str, result: Result) -> None:
    """Check which part of what a forward leaves allocated would be evicted."""
    begin = torch.accelerator.memory_allocated(device)
    received = stage.received(0)
    end = stage(received)
    left = torch.accelerator.memory_allocated(device) - begin
    moved = moved_bytes(device, end, received, sizes.minimum_bytes)
    end.backward()
    text = f"{moved / left:.3f}, {moved / 2**20:.4g} of {left / 2**20:.4g} MiB"
    result.check(f"{name}: moved part of what a forward leaves", moved >= ENOUGH * left, text)
    result.facts[name] = {"moved_bytes": moved, "left_bytes": left}


def differing(first_list: list[torch.Tensor], second_list: list[torch.Tensor]) -> int:
    return sum(not torch.equal(first, second) for first, second in zip(first_list, second_list, strict=True))


def _compiled() -> str:
    """Return how many functions were compiled: a machine without a compiler may run the fusions uncompiled."""
    from torch._dynamo.utils import counters

    frames = counters["frames"]
    return f"{frames['ok']} of {frames['total']}"
