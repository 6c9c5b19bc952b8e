"""A training loop run by Megatron's 1F1B on half of the ranks with twice the replicas, then by two pipes on all ranks.

Takes the launcher's environment with four processes; exits with 0 if both trained the same bits, weight by weight.
Megatron's function that knows placements builds the models; the loop itself sums gradients.
"""

# ruff: noqa: E402

from __future__ import annotations

import hashlib
from typing import Any

from bpipe.build import ScheduleConfig
from bpipe.transport.config import TransferConfig
from megatron.scheduling import install, place, samples_of
from megatron.scheduling.start import startup

startup.prepare()

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models import dist_utils

from megatron.scheduling.options.arguments import SchedulingConfig
from tests.gloo.own_loop import LAUNCH_RANK, LENGTH, VOCABULARY, forward

# Micro-batches of each pipe and of each replica, by iteration.
NUM_MICROBATCHES = (4, 2, 4)
CONFIG = SchedulingConfig(
    num_ranks=4, num_chunks=1, own=ScheduleConfig("mixpipe", 4, 8), transfers=TransferConfig(timeout_s=60.0)
)
SETTINGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "pipeline_model_parallel_size": 2,
    "pipeline_dtype": torch.float32,
    "use_cpu_initialization": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def chunk(pg_collection: Any, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> GPTModel:
    model = GPTModel(
        TransformerConfig(**SETTINGS, virtual_pipeline_model_parallel_size=None if vp_stage is None else 2),
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
    # Drawn by names in the whole model, because the two runs build a layer on different ranks.
    with torch.no_grad():
        for name, weight in named(model):
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
            drawn = 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
            weight.copy_(drawn if weight.dim() > 1 else weight + drawn)
    return model


def named(model: GPTModel) -> list[tuple[str, torch.nn.Parameter]]:
    weights = []
    for name, weight in model.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            name = f"layer {model.decoder.layers[int(number)].layer_number} {rest}"
        weights.append((name, weight))
    return weights


def train(feeds: list[int]) -> tuple[dict[str, str], dict[str, str]]:
    """Train; return all ranks' losses by replica and micro-batch, and hashes of weights by name.

    `feeds[chunk]` is the replica whose samples the chunk takes.
    """
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = dist_utils.build_virtual_pipeline_stages(
        chunk, groups, len(feeds) if len(feeds) > 1 else None, ModelType.encoder_or_decoder
    )
    parameters = [parameter for part in model for parameter in part.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    tokens = torch.Generator().manual_seed(11)
    losses_here: dict[str, str] = {}
    for iteration, num_microbatches in enumerate(NUM_MICROBATCHES):
        optimizer.zero_grad()
        batches = [
            [torch.randint(VOCABULARY, (2, LENGTH), generator=tokens) for _ in range(num_microbatches)]
            for _ in range(2)
        ]
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches[replica]) for replica in feeds] if len(feeds) > 1 else iter(batches[feeds[0]]),
            model=model,
            num_microbatches=num_microbatches,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        for parameter in parameters:
            dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
        optimizer.step()
        losses_here |= {f"{iteration} {feeds[-1]} {number}": loss.hex() for number, loss in enumerate(losses)}
    hashes = {
        name: hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()
        for part in model
        for name, weight in named(part)
    }
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, (losses_here, hashes))
    weights: dict[str, str] = {}
    for _, of_rank in results:
        for name, digest in of_rank.items():
            assert weights.setdefault(name, digest) == digest, f"two replicas of {name} differ"
    return {key: loss for of_rank, _ in results for key, loss in of_rank.items()}, weights


def main() -> None:
    torch.set_num_threads(1)
    place(pipeline=4, config=CONFIG)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    plain = train([parallel_state.get_data_parallel_rank()])
    parallel_state.destroy_model_parallel()
    installed = install(CONFIG, samples_by_chunk=True)
    # After `install`, because with two pipes other ranks have embeddings.
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    both = train([samples_of(CONFIG, part) for part in range(2)])
    installed.remove()
    assert len(set(plain[0].values())) == len(plain[0]) == 2 * sum(NUM_MICROBATCHES), (
        "losses that do not change would make any two runs equal"
    )
    for kind, stock, ours in zip(("losses", "weights"), plain, both, strict=True):
        apart = sorted(name for name in stock.keys() | ours.keys() if stock.get(name) != ours.get(name))
        assert not apart, f"other bits than stock's of {len(apart)} of {len(stock)} {kind}: {', '.join(apart[:8])}"
    print(f"rank {LAUNCH_RANK}: stock and two pipes are equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
