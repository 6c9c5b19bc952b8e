"""Name the operations of Megatron's combined 1F1B, which runs a forward and a backward at once, and find what it saved.

In: Megatron's calls of one step: a forward, a backward, or both. Out: the same calls with the driver's around them.

Megatron cuts a chunk into parts (`ScheduleNode`s: attention and router, dispatch, experts, combine) and runs parts of two
micro-batches in turn, exchanges of experts on a stream of their own. It detaches what passes from part to part, so a
chunk's graph is in pieces. Its plan of them stands at the chunk's output. The plan holds the tensors at every cut; it reads
them in this micro-batch's own forward and backward and at no other time. Knows no engine.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bpipe.runtime.graph import Pieces
from bpipe.schedule.action import Action, Kind
from megatron.scheduling.loop.driver import Driver


def wrap_combined(
    driver: Driver, num_ranks: int, forward_of: dict[int, Action], step: Callable[..., Any]
) -> Callable[..., Any]:
    """Return Megatron's combined step with the driver's calls around it.

    `forward_of`: by the id of a stage's output, the forward that made it, for its backward to look up.
    """
    signature = inspect.signature(step)

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not driver.running:
            return step(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        forward = backward = None
        if given["f_model"] is not None:
            stage = (given.get("f_model_chunk_id") or 0) * num_ranks + driver.rank
            forward = Action(stage, Kind.FORWARD, given["current_microbatch"])
        if given["b_model"] is not None:
            made = forward_of.pop(id(_first(given["b_output_tensor"])))
            backward = Action(made.stage, Kind.BACKWARD, made.microbatch)
        inputs = given["input_tensor"] if isinstance(given["input_tensor"], list) else [given["input_tensor"]]
        del given
        first = forward or backward
        assert first is not None, "a step of combined 1F1B computes nothing"
        driver.before(first, backward if forward is not None else None)
        result = step(*args, **kwargs)
        if forward is None:
            driver.after(first)
        else:
            outputs = result[0] if isinstance(result[0], list) else [result[0]]
            forward_of[id(outputs[0])] = forward
            driver.after(forward, outputs, inputs, pieces_of(outputs[0]))
        driver.sent(first)
        return result

    return run


def pieces_of(output: Any) -> Pieces:
    """Return the pieces of the graph of a chunk, by the plan that stands at its output, and what that plan holds."""
    nodes, held = [], []
    for keeper in _keepers(output):
        for tensor in _tensors(vars(keeper).values()):
            held.append(tensor)
            if tensor.grad_fn is not None:
                nodes.append(tensor.grad_fn)
    roots = [output.grad_fn, *nodes] if output.grad_fn is not None else nodes
    return Pieces(tuple(dict.fromkeys(roots)), tuple(held))


def _keepers(output: Any) -> Iterator[Any]:
    """Yield whatever of a plan holds tensors: its parts, and what these share, by layer and by chunk."""
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


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list) else tensors
