"""Measure what the ranges for profilers cost where no profiler runs: iterations of our own loop with and without them,
taking turns in one run.

In: sizes. Out: a table: of every rank the processor time of the training thread in an iteration with each, and the ratio
within a turn, medians and quartiles; of all ranks together the median with what it would be in 95 of 100 such runs. With
sizes so small that there is nothing to compute (--hidden 16 --sequence 8) the difference is what ranges cost themselves.

What it cannot show: anything of a GPU, where the training thread issues what a device computes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.loop import VOCABULARY, forward, in_95_of_100, model_of

# isort: split
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import schedules

from bench.turns import add_sizes, on_ranks, processor_seconds, quotients, spread
from bpipe.build import ScheduleConfig
from bpipe.ir.action import Action
from bpipe.ir.program import Exchange
from bpipe.runtime import engine
from bpipe.runtime.ranges import Ranges
from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.executor import Loop
from megatron.scheduling.options.arguments import SchedulingConfig


class NoRanges:
    """Names nothing."""

    def __init__(self, slices: int) -> None: ...

    def of(self, action: Action) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin(self, action: Action, beside: Action | None = None) -> None: ...

    def end(self) -> None: ...


def measure(_: int, sizes: argparse.Namespace) -> dict[str, list[float]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=sizes.stages)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    model = model_of(sizes)
    own = ScheduleConfig("1f1b", sizes.stages, sizes.microbatches, exchange=Exchange.POSTED)
    config = SchedulingConfig(balance=False, num_ranks=sizes.stages, num_chunks=1, own=own)
    stock = schedules.forward_backward_pipelining_without_interleaving
    batch = torch.randint(
        VOCABULARY, (sizes.microbatches, 2, sizes.sequence), generator=torch.Generator().manual_seed(11)
    )
    loops = {name: Loop(Driver(config), config).wraps()[patches.ONE_F_ONE_B](stock) for name in ("without", "with")}

    def iteration(name: str) -> None:
        # An engine is made in the first iteration, and keeps its ranges.
        kind = NoRanges if name == "without" else Ranges
        with patch.object(engine, "Ranges", kind):
            loops[name](
                forward_step_func=forward,
                data_iterator=iter(batch),
                model=model,
                num_microbatches=sizes.microbatches,
                seq_length=sizes.sequence,
                micro_batch_size=2,
            )

    ways = {name: functools.partial(iteration, name) for name in loops}
    return processor_seconds(ways, lambda _: model.zero_grad(), sizes.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_sizes(parser, microbatches=16)
    sizes = parser.parse_args()
    measured = on_ranks(measure, sizes.stages, sizes)
    together: list[float] = []
    print(f"{'rank':<5} {'without ranges, ms':>28} {'with, ms':>28} {'with to without in a turn':>32}")
    for rank, spent in enumerate(measured):
        ratios = quotients(spent["with"], spent["without"])
        plain, named = ([1e3 * value for value in spent[name]] for name in ("without", "with"))
        print(f"{rank:<5} {spread(plain, '.1f'):>28} {spread(named, '.1f'):>28} {spread(ratios, '.4f'):>32}")
        together += ratios
    low, high = in_95_of_100(together)
    print(f"{'all':<5} {'':>28} {'':>28} {f'{statistics.median(together):.4f} (95 %: {low:.4f} to {high:.4f})':>32}")
    if sizes.json:
        Path(sizes.json).write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
