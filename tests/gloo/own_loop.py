"""A user's training loop around Megatron's pipelined loop, trained plain, with `install`, and plain again.

Takes the launcher's environment, the chunks per rank (more than one: interleaved), and a schedule's name if our own
loop is to run it. Exits with 0 if all three trained the same bits, the second moved activations, and `remove`
restored Megatron's functions. Uses only megatron.core, not Megatron's trainer.
"""

# ruff: noqa: E402

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig
from bpipe.transport.config import TransferConfig
from megatron.scheduling import install, place
from megatron.scheduling.start import startup

startup.prepare()

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.scheduling.options.arguments import SchedulingConfig

# Megatron's trainer never returns to an earlier number of micro-batches; this loop does.
NUM_MICROBATCHES = (8, 4, 8, 4)
LENGTH, VOCABULARY = 64, 128
NUM_CHUNKS = int(sys.argv[1]) if len(sys.argv) > 1 else 1
OWN = (
    ScheduleConfig(sys.argv[2], 4, NUM_MICROBATCHES[0], num_chunks=NUM_CHUNKS, balance=BalanceConfig())
    if len(sys.argv) > 2
    else None
)
CONFIG = SchedulingConfig(
    num_ranks=4,
    num_chunks=NUM_CHUNKS,
    balance=BalanceConfig(),
    own=OWN,
    transfers=TransferConfig(minimum_bytes=1024, poison=True, timeout_s=60.0),
)
LAUNCH_RANK = os.environ["RANK"]
VIRTUAL_STAGES = NUM_CHUNKS if NUM_CHUNKS > 1 else None
SETTINGS: dict[str, Any] = {
    "num_layers": 4 * NUM_CHUNKS,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": VIRTUAL_STAGES,
    "pipeline_dtype": torch.float32,
    "use_cpu_initialization": True,
    # Another order of forwards draws other dropout.
    **({"attention_dropout": 0.0, "hidden_dropout": 0.0} if OWN else {}),
}


def forward(data: Iterator[torch.Tensor], model: GPTModel) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    places = torch.arange(LENGTH).expand_as(tokens)
    losses = model(tokens, places, None, labels=tokens.roll(-1, dims=1))

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, float]:
        return losses.mean(), losses.mean().item()

    return losses, mean


def chunk(vp_stage: int | None, **settings: Any) -> GPTModel:
    """Return one part of this rank's model."""
    position: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        TransformerConfig(**SETTINGS, **settings),
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(**position),
        post_process=parallel_state.is_pipeline_last_stage(**position),
        share_embeddings_and_output_weights=False,
        vp_stage=vp_stage,
    )


def train(**settings: Any) -> tuple[list[str], str]:
    """Train from the same start; return the losses of all micro-batches, and a hash of the final weights."""
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    model = [chunk(index if VIRTUAL_STAGES else None, **settings) for index in range(NUM_CHUNKS)]
    optimizer = torch.optim.Adam([parameter for part in model for parameter in part.parameters()], lr=1e-3)
    tokens = torch.Generator().manual_seed(11)
    losses = []
    for num_microbatches in NUM_MICROBATCHES:
        optimizer.zero_grad()
        batch = [torch.randint(VOCABULARY, (2, LENGTH), generator=tokens) for _ in range(num_microbatches)]
        losses += get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batch) for _ in model] if VIRTUAL_STAGES else iter(batch),
            model=model,
            num_microbatches=num_microbatches,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
    weights = hashlib.sha256()
    for part in model:
        for parameter in part.parameters():
            weights.update(parameter.detach().numpy().tobytes())
    return [loss.hex() for loss in losses], weights.hexdigest()


LOOPS = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")


def functions() -> list[object]:
    return [vars(schedules)[name] for name in ("forward_step", "backward_step", *LOOPS)]


def main() -> None:
    torch.set_num_threads(1)
    place(pipeline=4, config=CONFIG)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=VIRTUAL_STAGES
    )
    own = functions()
    plain = train()
    installed = install(CONFIG)
    assert functions() != own
    balanced = train()
    try:
        train(recompute_granularity="selective", recompute_modules=["mlp"])
    except ValueError as error:
        print(f"refused: {error}", flush=True)
    installed.remove()
    assert functions() == own, "remove left a function of ours in place"
    again = train()
    assert len(set(plain[0])) == len(plain[0]), "losses that do not change would make any two runs equal"
    assert plain == again == balanced, "the bits differ"
    print(f"rank {LAUNCH_RANK}: plain, balanced and plain again are equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
