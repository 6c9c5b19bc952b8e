"""Recorders for `worker.py` beyond losses and a hash: weights by name, tensors, or the process's memory.

If stages are placed differently, weights are identified by their names in the whole model. They are also drawn by
name, unless loaded, because Megatron draws them in the order of the ranks.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gloo import worker

# isort: split
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model

from megatron.scheduling.placement.positions import Positions
from megatron.scheduling.vocabulary.input_shards import EmbeddingShard
from megatron.scheduling.vocabulary.output_shards import OutputLayerShard

OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
TIED = {OUTPUT: EMBEDDING}


class Observer(worker.Recorder):
    """Calls `before` and `after` around each training step."""

    def _observe(self, train_step: Any) -> Any:
        observed = super()._observe(train_step)

        @functools.wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            self.before()
            result = observed(*args, **kwargs)
            self.after()
            return result

        return step

    def before(self) -> None:
        """Nothing by default."""

    def after(self) -> None:
        """Nothing by default."""


class Named(Observer):
    """Records weights by name, and on request the gradients of the first iteration in `<case>.rank<r>.gradients`."""

    def __init__(self, case: Path, gradients: bool, seeded: bool) -> None:
        super().__init__()
        self._case, self._gradients, self._step = case, gradients, schedules.forward_step
        if seeded:
            schedules.forward_step = seeding(self._step, self)

    def remove(self) -> None:
        super().remove()
        schedules.forward_step = self._step

    def _keep_model(self, setup: Any) -> Any:
        keep = super()._keep_model(setup)

        @functools.wraps(setup)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = keep(*args, **kwargs)
            if "--load" not in sys.argv:
                with torch.no_grad():
                    for name, weight in named(self.model):
                        weight.copy_(draw(name, weight))
                result[1].reload_model_params()
            return result

        return wrapped

    def after(self) -> None:
        if self._gradients and len(self.iterations) == 1:
            gradients = {name: weight.main_grad.clone() for name, weight in named(self.model)}
            torch.save(gradients, f"{self._case}.rank{torch.distributed.get_rank()}.gradients")

    def weights(self) -> dict[str, str]:
        digests: dict[str, str] = {}
        for name, weight in named(self.model):
            digest = hashlib.sha256(weight.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            assert digests.setdefault(name, digest) == digest, f"two copies of {name} differ"
        return digests


class Tensors(Observer):
    """`<case>.rank<r>.pt`: this rank's weights before the first iteration, its gradients, and the weights at the end."""

    def __init__(self, case: Path) -> None:
        super().__init__()
        self._case = case
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    def before(self) -> None:
        if not self.iterations:
            self._kept["start"] = self._tensors(lambda weight: weight)

    def after(self) -> None:
        if len(self.iterations) == 1:
            self._kept["gradients"] = self._tensors(lambda weight: weight.main_grad)

    def _tensors(self, of: Any) -> dict[str, torch.Tensor]:
        parameters = (parameter for chunk in self.model for parameter in chunk.named_parameters())
        return {name.replace("module.", ""): of(weight).detach().clone() for name, weight in parameters}

    def weights(self) -> Any:
        self._kept["end"] = self._tensors(lambda weight: weight)
        torch.save(self._kept, f"{self._case}.rank{torch.distributed.get_rank()}.pt")
        return super().weights()


class Peak(Observer):
    """Records, instead of a hash, this process's bytes at the start of its second iteration and their peak in it."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: list[dict[str, int]] = []

    def before(self) -> None:
        gc.collect()
        # Reset the peak.
        Path("/proc/self/clear_refs").write_text("5")
        self._memory.append({"held": kernel_says("VmRSS")})

    def after(self) -> None:
        self._memory[-1]["peak"] = kernel_says("VmHWM")

    def weights(self) -> Any:
        return self._memory[1]


def kernel_says(name: str) -> int:
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)


def kind(options: argparse.Namespace, case: Path) -> Callable[[], worker.Recorder]:
    """Return the factory of the recorder that a case's options select."""
    if options.named:
        return functools.partial(Named, case, options.gradients, options.seeded)
    if options.tensors:
        return functools.partial(Tensors, case)
    return Peak if options.peak else worker.Recorder


def patches(options: argparse.Namespace) -> Iterator[AbstractContextManager[Any]]:
    if options.one_pipes_samples:
        yield mock.patch.object(Positions, "replica_of", lambda self, replica, chunk: replica // 2 * 2)
    if options.exact_sums:
        yield mock.patch.object(torch.distributed, "all_reduce", exactly(torch.distributed.all_reduce))


def named(model: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield every weight of this rank with its name in the whole model and its shard."""
    for chunk in model:
        inner = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        numbers = [layer.layer_number - 1 for layer in inner.decoder.layers]
        for name, weight in inner.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, number, rest = name.split(".", 3)
                name = f"decoder.layers.{numbers[int(number)]}.{rest}"
            # A stage that predicts further tokens also has an embedding; the output layer's own weight is then unused.
            layer = inner.get_submodule(name.rpartition(".")[0]) if name in (OUTPUT, EMBEDDING) else None
            if inner.share_embeddings_and_output_weights and not inner.mtp_process:
                name = TIED.get(name, name)
            if isinstance(layer, OutputLayerShard | EmbeddingShard):
                # Relative to the rows that its tensor-parallel rank has without shards.
                name += f" from {layer.first_row % (layer.rows.each * layer.rows.pipeline)}"
            if "experts" in name:
                name += f" of {parallel_state.get_expert_model_parallel_rank()}"
            yield f"{name} {parallel_state.get_tensor_model_parallel_rank()}", weight


def seed(words: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(words.encode()).digest()[:6]))


def draw(name: str, weight: torch.nn.Parameter) -> torch.Tensor:
    """Draw weights by name, so that every rank has the same numbers.

    Norms are around one, and weights that tensor parallelism does not shard are equal on all ranks.
    """
    if " from " in name:
        # Take the shard's rows of the whole weight.
        whole, _, shard = name.partition(" from ")
        first, _, rank = shard.partition(" ")
        rows: Any = torch.empty(int(first) + len(weight), weight.shape[1])
        rows.tensor_model_parallel = True
        return draw(f"{whole} {rank}", rows)[int(first) :]
    key = name if getattr(weight, "tensor_model_parallel", False) else name.rpartition(" ")[0]
    drawn = torch.randn(weight.shape, generator=seed(key)) * (0.02 if weight.dim() > 1 else 0.1)
    return drawn + 1 if "norm" in name and name.split()[0].endswith("weight") else drawn


def seeding(forward_step: Callable[..., Any], recorder: worker.Recorder) -> Callable[..., Any]:
    """Run Megatron's forward step with random states that follow from the stage and micro-batch."""

    @functools.wraps(forward_step)
    def seeded(forward_step_func: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        first = get_attr_wrapped_model(model, "pre_process", return_model_obj=True).decoder.layers[0].layer_number
        state = seed(f"{len(recorder.iterations)} {kwargs['current_microbatch']} {first}").get_state()
        torch.set_rng_state(state)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.set_states(dict.fromkeys(tracker.get_states(), state))
        return forward_step(forward_step_func, data, model, *args, **kwargs)

    return seeded


def exactly(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Add sums in double precision and round once, so that their order does not matter."""

    @functools.wraps(all_reduce)
    def reduced(
        tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op != torch.distributed.ReduceOp.SUM or tensor.dtype != torch.float32:
            return all_reduce(tensor, op, group, async_op)
        parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, tensor, group=group)
        tensor.copy_(torch.stack(parts).double().sum(0))
        return types.SimpleNamespace(wait=lambda: None) if async_op else None

    return reduced
