"""Hooks around Megatron's own pipelined loops and the steps that they call.

Each call of a step gets a name (which stage's pass of which micro-batch) and the driver's calls around it. Megatron's loop
itself runs untouched, with its communication, gradient overlap, timers and rerun machine; evaluation passes through.

Combined 1F1B runs a forward and a backward at once. Megatron cuts a chunk into parts (`ScheduleNode`s: attention and
router, dispatch, experts, combine) and runs parts of two micro-batches in turn, with exchanges of experts on a stream of
their own. It detaches what passes from part to part, so a chunk's graph is in pieces. The chunk's output has Megatron's
plan of them. The plan holds the tensors at every cut, and reads them only in this micro-batch's own forward and backward.

An iteration may be a CUDA graph: Megatron's wrapper runs iterations, captures the next one, and replays it from then on,
whatever it is called with.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from bpipe.balance.config import BalanceConfig
from bpipe.config.features.table import Settings
from bpipe.runtime.graph import Pieces
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.family import Family
from bpipe.schedule.families.interleaved import COMBINED, INTERLEAVED
from bpipe.schedule.families.one_f_one_b import ONE_F_ONE_B
from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.log import say

# The family of each loop's schedule. With one stage nothing can be balanced, but the log says so and what is held can be
# measured: it is 1F1B of one stage.
LOOPS = {
    patches.ONE_F_ONE_B: ONE_F_ONE_B,
    patches.INTERLEAVED: INTERLEAVED,
    patches.NO_PIPELINING: ONE_F_ONE_B,
}


class Hooks:
    """Wrappers for pipelines of `num_ranks`; chunk c of rank r is stage c * num_ranks + r in every loop of Megatron's."""

    def __init__(self, driver: Driver, num_ranks: int) -> None:
        self._driver = driver
        self._num_ranks = num_ranks
        # By the id of a stage's output, which the loop passes to its backward: the forward that made it.
        self._forward_of: dict[int, Action] = {}
        self._has_communicators = False

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        return {
            **{loop: patches.replaced_by(functools.partial(self._run, family)) for loop, family in LOOPS.items()},
            patches.FORWARD_STEP: patches.by_name(self._forward),
            patches.BACKWARD_STEP: patches.replaced_by(self._backward),
            patches.COMBINED_STEP: patches.by_name(self._combined),
        }

    def _run(self, family: Family, loop: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("forward_only"):
            return loop(**kwargs)
        driver, config = self._driver, get_model_config(as_list(kwargs["model"])[0])
        if family is INTERLEAVED and Settings(config).overlap_moe_expert_parallel_comm:
            family = COMBINED
        program = driver.program(family, kwargs["num_microbatches"], group_of(config, family, self._num_ranks))
        try:
            with (
                driver.iteration(program, config),
                no_barrier(config) if driver.changed_over else contextlib.nullcontext(),
                call_before_finalizing(config, driver.communicated),
            ):
                if driver.links and not self._has_communicators:
                    # Before the first iteration in which ranks wait for their partners.
                    make_communicators(config, kwargs.get("p2p_communicator"), is_ring=family.min_chunks > 1)
                    self._has_communicators = True
                driver.begin()
                result = loop(**kwargs)
                driver.end()
        finally:
            self._forward_of.clear()
        return result

    def _forward(self, arguments: Mapping[str, Any], step: Callable[[], Any]) -> Any:
        driver = self._driver
        if not driver.running:
            return step()
        stage = (arguments.get("vp_stage") or 0) * self._num_ranks + driver.rank
        op = Action(stage, Kind.FORWARD, arguments["current_microbatch"])
        driver.before(op)
        outputs, num_tokens = step()
        tensors = as_list(outputs)
        self._forward_of[id(tensors[0])] = op
        driver.after(op, tensors, as_list(arguments["input_tensor"]))
        driver.sent(op)
        return outputs, num_tokens

    def _backward(
        self, step: Callable[..., Any], input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any
    ) -> Any:
        driver = self._driver
        if not driver.running:
            return step(input_tensor, output_tensor, *args, **kwargs)
        # Megatron does not say which micro-batch this is, but the loop passes the very output that its forward returned.
        forward = self._forward_of.pop(id(as_list(output_tensor)[0]))
        op = Action(forward.stage, Kind.BACKWARD, forward.microbatch)
        driver.before(op)
        gradient = step(input_tensor, output_tensor, *args, **kwargs)
        driver.after(op)
        driver.sent(op)
        return gradient

    def _combined(self, arguments: Mapping[str, Any], step: Callable[[], Any]) -> Any:
        driver = self._driver
        if not driver.running:
            return step()
        forward = backward = None
        if arguments["f_model"] is not None:
            stage = (arguments.get("f_model_chunk_id") or 0) * self._num_ranks + driver.rank
            forward = Action(stage, Kind.FORWARD, arguments["current_microbatch"])
        if arguments["b_model"] is not None:
            earlier = self._forward_of.pop(id(as_list(arguments["b_output_tensor"])[0]))
            backward = Action(earlier.stage, Kind.BACKWARD, earlier.microbatch)
        first = forward or backward
        assert first is not None, "a step of combined 1F1B computes nothing"
        driver.before(first, backward if forward is not None else None)
        result = step()
        if forward is None:
            driver.after(first)
        else:
            outputs = as_list(result[0])
            self._forward_of[id(outputs[0])] = forward
            driver.after(forward, outputs, as_list(arguments["input_tensor"]), _pieces_of(outputs[0]))
        driver.sent(first)
        return result


def make_communicators(config: Any, communicator: Any, is_ring: bool) -> None:
    """Exchange one number with both neighbours by Megatron's own messages, to make the communicators of its loop.

    NCCL makes a communicator at its first use. If messages pass in batches (`batch_isend_irecv`), all ranks of the
    pipeline do that together, and a rank that first waits for its partner's sizes never comes: a deadlock from 8 stages
    on. Collective over the pipeline.

    Args:
        config: The model's configuration.
        communicator: What Megatron's loop was called with, or None.
        is_ring: Whether the last rank sends to the first, too.

    Raises:
        ValueError: Messages go between several modules.
    """
    if communicator is None:
        communicator = P2PCommunicator(pp_group=parallel_state.get_pipeline_model_parallel_group(), config=config)
    elif not isinstance(communicator, P2PCommunicator):
        raise ValueError(
            f"--bpipe balances the stages of one module, but messages go through a {type(communicator).__name__}: "
            "train without --bpipe"
        )
    number = torch.zeros((1, 1, 1), dtype=config.pipeline_dtype, device=torch.cuda.current_device())
    has_before, has_after = is_ring or not communicator.is_pp_first_stage, is_ring or not communicator.is_pp_last_stage
    communicator.send_forward_backward_recv_forward_backward(
        number if has_after else None, number if has_before else None, has_before, has_after, tuple(number.shape)
    )


def no_barrier(config: Any) -> AbstractContextManager[Any]:
    """Leave out the barrier with which Megatron's loop begins at --timing-log-level 1.

    In a program's first iteration an acceptor waits before the barrier until its partner says how large its activations
    are, and the partner would compute them only after the barrier. All ranks change programs at once, so all leave the
    barrier out.
    """
    return patch.object(config, "barrier_with_L1_time", False)


def call_before_finalizing(config: Any, communicated: Callable[[], None]) -> AbstractContextManager[Any]:
    """Call `communicated` when the loop has sent its last message to a neighbour and is about to finalise gradients.

    Later is too late: finalising sums the embedding gradients of the first and the last stage, so one of a pair would
    wait there for the other, which waits for its activations. A loop that does not finalise has no such sum, and
    `Engine.end` is early enough.
    """
    finalize = config.finalize_model_grads_func
    if finalize is None:
        return contextlib.nullcontext()

    @functools.wraps(finalize)
    def run(*args: Any, **kwargs: Any) -> Any:
        communicated()
        return finalize(*args, **kwargs)

    return patch.object(config, "finalize_model_grads_func", run)


def _pieces_of(output: Any) -> Pieces:
    """Return the pieces of the graph of a chunk, and the tensors that its plan holds."""
    tensors = [tensor for keeper in _keepers(output) for tensor in _tensors(vars(keeper).values())]
    nodes = [tensor.grad_fn for tensor in (output, *tensors) if tensor.grad_fn is not None]
    return Pieces(tuple(dict.fromkeys(nodes)), tuple(tensors))


def _keepers(output: Any) -> Iterator[Any]:
    """Yield the objects of a chunk's plan that hold tensors: its parts, and what these share by layer and by chunk."""
    plan = output.schedule_plan
    yield plan.state
    yield from (part for part in (plan.pre_process, plan.post_process, output.loss_func) if part is not None)
    for number in range(plan.num_layers()):
        layer = plan.get_layer(number)
        yield layer.layer_state
        yield from (part for part in vars(layer).values() if hasattr(part, "get_output"))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def group_of(config: Any, family: Family, num_ranks: int) -> int | None:
    """Return the group size, or None if Megatron's loop has no groups: its configuration has one even then."""
    group_size: int = config.microbatch_group_size_per_vp_stage
    return group_size if family.takes_groups and group_size != num_ranks else None


def as_list(value: Any) -> list[Any]:
    """Return a list of what Megatron passes alone or as a list."""
    return value if isinstance(value, list) else [value]


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
