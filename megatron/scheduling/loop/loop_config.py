"""Change the configuration that Megatron's loop reads while the loop runs, and time what the engine does meanwhile."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.utils import get_comm_stream
from megatron.core.timers import DummyTimer

from bpipe.config.features.feature import Settings
from bpipe.runtime.engine import TIMERS
from megatron.scheduling.options.arguments import TIMERS_LEVEL


@contextlib.contextmanager
def no_barrier(config: Any) -> Iterator[None]:
    """Leave out the barrier with which Megatron's loop begins at --timing-log-level 1.

    In a program's first iteration an acceptor waits before the barrier until its partner says how large its activations
    are, and the partner would compute them only after the barrier. All ranks change programs at once, so all leave the
    barrier out.
    """
    kept, config.barrier_with_L1_time = config.barrier_with_L1_time, False
    try:
        yield
    finally:
        config.barrier_with_L1_time = kept


@contextlib.contextmanager
def call_before_finalizing(config: Any, communicated: Callable[[], None]) -> Iterator[None]:
    """Call `communicated` when the loop has sent its last message to a neighbour and is about to finalise gradients.

    Later is too late: finalising sums the embedding gradients of the first and the last stage, so one of a pair would
    wait there for the other, which waits for its activations. A loop that does not finalise has no such sum, and
    `Engine.end` is early enough.
    """
    finalize = config.finalize_model_grads_func
    if finalize is None:
        yield
        return

    @functools.wraps(finalize)
    def run(*args: Any, **kwargs: Any) -> Any:
        communicated()
        return finalize(*args, **kwargs)

    config.finalize_model_grads_func = run
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize


def streams_of_layers(config: Any) -> Sequence[Any]:
    """Return the streams, other than the computation's, on which layers of this configuration save and read
    activations; a stream that has not been made yet is missing."""
    settings, streams = Settings(config), []
    if settings.moe_shared_expert_overlap:
        experts = sys.modules.get("megatron.core.transformer.moe.shared_experts")
        streams.append(None if experts is None else experts.SharedExpertMLP.stream)
    if settings.overlap_moe_expert_parallel_comm:
        streams.append(get_comm_stream())
    return [stream for stream in streams if stream is not None]


class OwnTime:
    """Seconds of this rank's main thread, by name.

    Megatron's own timers cannot run around a transfer: starting and stopping one waits for the whole device, and thus
    for the transfer.
    """

    def __init__(self) -> None:
        self._spent_s: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the time spent inside under this name."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s[name] += time.perf_counter() - begin_s

    def tell(self, timers: Any) -> None:
        """Add the seconds since the last call to Megatron's timers of these names.

        Below their level Megatron returns timers that keep nothing.
        """
        for name in TIMERS:
            if name in self._spent_s:
                spent_s = self._spent_s.pop(name)
                timer = timers(name, log_level=TIMERS_LEVEL)
                if not isinstance(timer, DummyTimer):
                    timer.set_elapsed(timer.elapsed(reset=False) + spent_s)
