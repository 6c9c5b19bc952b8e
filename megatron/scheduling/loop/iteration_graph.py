"""The CUDA graph into which Megatron captures a training iteration, and when it has to capture anew.

Megatron's wrapper runs iterations, captures the next one, and replays it from then on, whatever it is called with.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from bpipe.balance.config import BalanceConfig
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.log import say


def graph_pool_bytes() -> int | None:
    """Return the bytes of the memory that only the CUDA graph of a training iteration uses; None without one."""
    graph = FullCudaGraphWrapper.cuda_graph["training"]
    if graph is None:
        return None
    return sum(int(segment["total_size"]) for segment in torch.cuda.memory_snapshot(graph.pool()))


class Recapture:
    """Drops the graph when the batch or the plan changes, so that iterations warm up and are captured anew.

    Without it Megatron would replay as many micro-batches as it captured.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        # What decides the program of an iteration: the number of micro-batches and the balance of the last one.
        self._last: tuple[int, BalanceConfig | None] | None = None

    def call(self, run: Callable[..., Any], wrapper: FullCudaGraphWrapper, **arguments: Any) -> Any:
        """Run Megatron's wrapper of an iteration with these arguments."""
        if not arguments["forward_only"]:
            now = arguments["num_microbatches"], self._driver.balance
            # Also before the first one: Megatron keeps the graph of an earlier training of this process.
            if self._last != now:
                if FullCudaGraphWrapper.cuda_graph["training"] is not None:
                    say(
                        "the CUDA graph of an iteration is dropped, and captured anew after the next iterations: they have "
                        f"{now[0]} micro-batches"
                    )
                    # A replay may still run.
                    torch.cuda.synchronize()
                wrapper.reset_cuda_graph("training")
            self._last = now
        return run(wrapper, **arguments)
