"""Name the operations of Megatron's own pipelined loops: wrap the loops and the two steps they call.

In: Megatron's calls. Out: the same calls, each with the driver's around it, and which stage's pass of which micro-batch
it is. Megatron's loop runs untouched, so whatever it does (communication, gradient overlap, timers, the rerun machine)
it goes on doing; evaluation passes through. Knows no engine, and nothing of what the driver does with a call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.utils import get_model_config

from bpipe.build import ScheduleConfig
from bpipe.config.features.feature import Settings
from bpipe.runtime.checkpoints import leave_aside
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families import combined, interleaved, one_f_one_b
from bpipe.schedule.families.family import Family
from megatron.scheduling.hooks import patches, upstream
from megatron.scheduling.hooks.combined import wrap_combined
from megatron.scheduling.hooks.loop_config import call_before_finalizing, no_barrier
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.links import make_communicators

# Its hooks of autograd hold what they are given, or keep it on the host.
OFFLOADING = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
# Which family each loop's schedule is of. With one stage there is nothing to balance, but this is to be said, and what
# is held can be measured: it is 1F1B of one stage.
LOOPS = {
    patches.ONE_F_ONE_B: one_f_one_b.FAMILY,
    patches.INTERLEAVED: interleaved.FAMILY,
    patches.NO_PIPELINING: one_f_one_b.FAMILY,
}


class Hooks:
    """The wrappers. `num_ranks` are those of a pipeline; chunk c of rank r is stage c * num_ranks + r, in every loop
    of Megatron's."""

    def __init__(self, driver: Driver, num_ranks: int) -> None:
        leave_aside(OFFLOADING)
        self._driver = driver
        self._num_ranks = num_ranks
        self._forward_of: dict[int, Action] = {}
        self._has_communicators = False

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """Return what to put in place of what."""
        return {
            **{loop: functools.partial(self._wrap_loop, family) for loop, family in LOOPS.items()},
            patches.FORWARD_STEP: self._wrap_forward,
            patches.BACKWARD_STEP: self._wrap_backward,
            patches.COMBINED_STEP: functools.partial(wrap_combined, self._driver, self._num_ranks, self._forward_of),
        }

    def close(self, failed: bool) -> None:
        """Do nothing: nothing of ours is left when the functions are put back."""

    def _wrap_loop(self, family: Family, loop: Callable[..., Any]) -> Callable[..., Any]:
        driver = self._driver

        @functools.wraps(loop)
        def run(**kwargs: Any) -> Any:
            if kwargs.get("forward_only"):
                return loop(**kwargs)
            config = get_model_config(as_list(kwargs["model"])[0])
            for module in ("loops", "loop_config", "links"):
                upstream.require(config, module)
            try:
                with (
                    driver.iteration(self._program(family, kwargs["num_microbatches"], config), config),
                    no_barrier(config) if driver.changed_over else contextlib.nullcontext(),
                    call_before_finalizing(config, driver.communicated),
                ):
                    self._make_communicators(family, config, kwargs.get("p2p_communicator"))
                    driver.begin()
                    result = loop(**kwargs)
                    driver.end()
            finally:
                self._forward_of.clear()
            return result

        return run

    def _make_communicators(self, family: Family, config: Any, communicator: Any) -> None:
        """Before the first iteration in which ranks wait for their partners."""
        if self._driver.links and not self._has_communicators:
            make_communicators(config, communicator, is_ring=family.min_chunks > 1)
            self._has_communicators = True

    def _program(self, family: Family, num_microbatches: int, config: Any) -> ScheduleConfig:
        if family is interleaved.FAMILY and Settings(config).overlap_moe_expert_parallel_comm:
            family = combined.FAMILY
        return self._driver.program(family, num_microbatches, group_of(config, family, self._num_ranks))

    def _wrap_forward(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward_step)
        driver = self._driver

        @functools.wraps(forward_step)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not driver.running:
                return forward_step(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            stage = (given.get("vp_stage") or 0) * self._num_ranks + driver.rank
            op = Action(stage, Kind.FORWARD, given["current_microbatch"])
            driver.before(op)
            outputs, num_tokens = forward_step(*args, **kwargs)
            tensors, inputs = as_list(outputs), as_list(given["input_tensor"])
            self._forward_of[id(tensors[0])] = op
            driver.after(op, tensors, inputs)
            driver.sent(op)
            return outputs, num_tokens

        return forward

    def _wrap_backward(self, backward_step: Callable[..., Any]) -> Callable[..., Any]:
        driver = self._driver

        @functools.wraps(backward_step)
        def backward(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not driver.running:
                return backward_step(input_tensor, output_tensor, *args, **kwargs)
            # Megatron does not say which micro-batch this is; the loop holds the very output its forward returned.
            forward = self._forward_of.pop(id(as_list(output_tensor)[0]))
            op = Action(forward.stage, Kind.BACKWARD, forward.microbatch)
            driver.before(op)
            gradient = backward_step(input_tensor, output_tensor, *args, **kwargs)
            driver.after(op)
            driver.sent(op)
            return gradient

        return backward


def group_of(config: Any, family: Family, num_ranks: int) -> int | None:
    """Return the group size, None where Megatron's loop knows no groups: its configuration has one even there."""
    group_size: int = config.microbatch_group_size_per_vp_stage
    return group_size if family.takes_groups and group_size != num_ranks else None


def as_list(given: Any) -> list[Any]:
    """Return as a list what Megatron gives as one or as a list."""
    return given if isinstance(given, list) else [given]
