"""One rank of a test's training runs that are compared across placements: each weight is known by what it is, and not
by where.

In: as worker.py; a case that names data has no mock data, and one that names a script of this folder is trained by it.
One that says --seeded draws dropout by iteration, micro-batch and stage; of two pipes with --one-pipes-samples both
read the first one's; with --exact-sums the order of ranks in a sum over them has no part in it. Out: the same records,
with a hash of every weight of this rank by its name in the whole model, and with --gradients those of the first
iteration in `<folder>/<case>.rank<r>.gradients`. Where nothing is loaded all weights are drawn by their names, because
Megatron draws them in the order of the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gloo import conversations, worker

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


def named(model: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every weight of this rank by its name in the whole model, and by its shard."""
    for chunk in model:
        inner = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        numbers = [layer.layer_number - 1 for layer in inner.decoder.layers]
        for name, weight in inner.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, number, rest = name.split(".", 3)
                name = f"decoder.layers.{numbers[int(number)]}.{rest}"
            # A stage that predicts further tokens embeds, too: the output layer's own weight is there beside it,
            # and nobody uses it.
            layer = inner.get_submodule(name.rpartition(".")[0]) if name in (OUTPUT, EMBEDDING) else None
            if inner.share_embeddings_and_output_weights and not inner.mtp_process:
                name = TIED.get(name, name)
            if isinstance(layer, OutputLayerShard | EmbeddingShard):
                # Of what its tensor-parallel rank has without shards.
                name += f" from {layer.first_row % (layer.rows.each * layer.rows.pipeline)}"
            if "experts" in name:
                name += f" of {parallel_state.get_expert_model_parallel_rank()}"
            yield f"{name} {parallel_state.get_tensor_model_parallel_rank()}", weight


def seed(words: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(words.encode()).digest()[:6]))


def draw(name: str, weight: torch.nn.Parameter) -> torch.Tensor:
    """The same numbers for one name on every rank; norms are around one, and what no tensor-parallel rank shards
    is equal on all."""
    if " from " in name:
        # Rows of what is drawn as a whole.
        whole, _, shard = name.partition(" from ")
        first, _, rank = shard.partition(" ")
        rows: Any = torch.empty(int(first) + len(weight), weight.shape[1])
        rows.tensor_model_parallel = True
        return draw(f"{whole} {rank}", rows)[int(first) :]
    key = name if getattr(weight, "tensor_model_parallel", False) else name.rpartition(" ")[0]
    drawn = torch.randn(weight.shape, generator=seed(key)) * (0.02 if weight.dim() > 1 else 0.1)
    return drawn + 1 if "norm" in name and name.split()[0].endswith("weight") else drawn


def seeding(forward_step: Callable[..., Any], recorder: worker.Recorder) -> Callable[..., Any]:
    """Megatron's step, from random states that follow from what is computed."""

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
    """The same sums, added in double precision and rounded once: whoever's number comes first."""

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


class NamedRecorder(worker.Recorder):
    def __init__(self) -> None:
        super().__init__()
        self._step = schedules.forward_step
        if "--seeded" in sys.argv:
            sys.argv.remove("--seeded")
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

    def _observe(self, train_step: Any) -> Any:
        observed = super()._observe(train_step)

        @functools.wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = observed(*args, **kwargs)
            if keep is not None and len(self.iterations) == 1:
                found = {name: weight.main_grad.clone() for name, weight in named(self.model)}
                torch.save(found, keep.with_name(f"{keep.name}.rank{torch.distributed.get_rank()}.gradients"))
            return result

        return step

    def weights(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, weight in named(self.model):
            digest = hashlib.sha256(weight.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            assert found.setdefault(name, digest) == digest, f"two copies of {name} differ"
        return found


torch.set_num_threads(1)
cases, folder = sys.argv[1:]
for case in worker.cases_of(cases):
    if "--data-path" in case["arguments"]:
        case["arguments"].remove("--mock-data")
    main = worker.pretrain_gpt.main
    if "--script" in case["arguments"]:
        at = case["arguments"].index("--script")
        script = Path(__file__).parent / case["arguments"][at + 1]
        case["arguments"][at : at + 2] = []
        main = functools.partial(runpy.run_path, str(script), run_name="__main__")
    own = {flag: flag in case["arguments"] for flag in ("--gradients", "--one-pipes-samples", "--exact-sums")}
    case["arguments"] = [flag for flag in case["arguments"] if flag not in own]
    keep = Path(folder) / case["name"] if own["--gradients"] else None
    deaf = lambda self, replica, chunk: replica // 2 * 2  # noqa: E731
    with contextlib.ExitStack() as during:
        if "--sft" in case["arguments"]:
            during.enter_context(conversations.readable())
        if own["--one-pipes-samples"]:
            during.enter_context(mock.patch.object(Positions, "replica_of", deaf))
        if own["--exact-sums"]:
            during.enter_context(
                mock.patch.object(torch.distributed, "all_reduce", exactly(torch.distributed.all_reduce))
            )
        worker.run(case, Path(folder), NamedRecorder, main)
