"""Measure the cost of our own loop: iterations of the same 1F1B by it and by Megatron's, taking turns in one run.

Prints a table: of every rank the processor time of the training thread per iteration by each loop, and the ratio within
a turn, with medians and quartiles; of all ranks together the median, with its range in 95 of 100 such runs, by drawing
turns again. Processor time, because on fewer cores than ranks the clock would show how the ranks shared them. Weights
stay as they are, so every iteration computes the same. With sizes so small that there is nothing to compute (--hidden
16 --sequence 8) the difference is what the loops do themselves.

It cannot show anything of a GPU, where the training thread issues what a device computes.
"""

# ruff: noqa: E402

import argparse
import contextlib
import json
import logging
import os
import platform
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.scheduling.start import startup

# Megatron warns of what a CPU lacks in each process and for every micro-batch, and would hide the table. Errors stay.
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
with contextlib.redirect_stdout(None):
    startup.prepare()

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.multiprocessing.spawn import start_processes

from bpipe.build import ScheduleConfig
from bpipe.schedule.program import Exchange
from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.executor import Loop
from megatron.scheduling.options.arguments import SchedulingConfig

VOCABULARY = 128
NUM_DRAWS = 2000
# Rounds that are not measured.
WARM_UP = 2


def forward(data: Iterator[torch.Tensor], model: GPTModel) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    losses = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None, labels=tokens.roll(-1, dims=1))
    return losses, lambda losses: (losses.mean(), losses.mean().item())


def model_of(sizes: argparse.Namespace) -> GPTModel:
    config = TransformerConfig(
        num_layers=sizes.layers * sizes.stages,
        hidden_size=sizes.hidden,
        num_attention_heads=4,
        pipeline_model_parallel_size=sizes.stages,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        deallocate_pipeline_outputs=True,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        sizes.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


STOCK: Callable[..., Any] = schedules.forward_backward_pipelining_without_interleaving


def own_loop(sizes: argparse.Namespace) -> Callable[..., Any]:
    """Return our own loop for 1F1B, in place of Megatron's."""
    own = ScheduleConfig("1f1b", sizes.stages, sizes.microbatches, exchange=Exchange.POSTED)
    config = SchedulingConfig(num_ranks=sizes.stages, num_chunks=1, own=own)
    loop: Callable[..., Any] = Loop(Driver(config), config).wraps()[patches.ONE_F_ONE_B](STOCK)
    return loop


def prepared(sizes: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[Callable[..., Any]], None]]:
    """Return this rank's model, and what runs one iteration of it by a loop. Collective over the world."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=sizes.stages)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    model = model_of(sizes)
    generator = torch.Generator().manual_seed(11)
    batch = torch.randint(VOCABULARY, (sizes.microbatches, 2, sizes.sequence), generator=generator)

    def iteration(loop: Callable[..., Any]) -> None:
        loop(
            forward_step_func=forward,
            data_iterator=iter(batch),
            model=model,
            num_microbatches=sizes.microbatches,
            seq_length=sizes.sequence,
            micro_batch_size=2,
        )

    return model, iteration


def measured(sizes: argparse.Namespace) -> list[list[list[float]]]:
    """Return the seconds of every iteration by rank, by Megatron's loop and by ours.

    Ranks are forked, because importing torch in each takes longer than the measurement. So no thread may have been
    started before.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_measure, (sizes, folder), nprocs=sizes.stages, start_method="fork")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(sizes.stages)]


def _measure(rank: int, sizes: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=sizes.stages)
    model, iteration = prepared(sizes)
    loops = (STOCK, own_loop(sizes))
    seconds: tuple[list[float], list[float]] = [], []
    for turn in range(WARM_UP + sizes.rounds):
        # Each is first in every other round, because of caches.
        for loop in (turn % 2, 1 - turn % 2):
            dist.barrier()
            begin_s = time.thread_time()
            iteration(loops[loop])
            if turn >= WARM_UP:
                seconds[loop].append(time.thread_time() - begin_s)
            model.zero_grad()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def spread(values: list[float], form: str) -> str:
    """Return the median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def in_95_of_100(values: list[float]) -> tuple[float, float]:
    """Return the range of the median of such samples, by drawing them again with replacement."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(NUM_DRAWS))
    return medians[NUM_DRAWS * 25 // 1000], medians[-NUM_DRAWS * 25 // 1000]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, default=4, help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=1, help="of a stage")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    sizes = parser.parse_args()
    ranks = measured(sizes)
    together = []
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores; 1F1B of "
        f"{sizes.stages} stages, {sizes.microbatches} micro-batches; {sizes.rounds} rounds, medians (quartiles)"
    )
    print(f"{'rank':<5} {'Megatron loop, ms':>28} {'ours, ms':>28} {'ours to Megatron in a turn':>32}")
    for rank, (theirs, ours) in enumerate(ranks):
        ratios = [own / stock for own, stock in zip(ours, theirs, strict=True)]
        theirs_ms, ours_ms = ([1e3 * value for value in values] for values in (theirs, ours))
        print(f"{rank:<5} {spread(theirs_ms, '.1f'):>28} {spread(ours_ms, '.1f'):>28} {spread(ratios, '.4f'):>32}")
        together += ratios
    low, high = in_95_of_100(together)
    print(f"{'all':<5} {'':>28} {'':>28} {f'{statistics.median(together):.4f} (95 %: {low:.4f} to {high:.4f})':>32}")


if __name__ == "__main__":
    main()
