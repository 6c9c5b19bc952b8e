"""Let Megatron's own loops say which messages every rank of a pipeline issues and waits for, without another rank.

In: a model's configuration and the number of micro-batches. Out: loops for `bpipe.schedule.check.exchanges`. Nothing is
computed and nothing passes: a computation returns a tensor that knows its name, and what is issued is only noted.
"""

import contextlib
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from bpipe.schedule.check.exchanges import End, Kernel, Loop, Wait

_PIPELINE, _WORLD = "pipeline", "world"
# What acts beside computations and messages.
_OFF = {
    "sequence_parallel": False,
    "fine_grained_activation_offloading": False,
    "moe_paged_stash": False,
    "cuda_graph_impl": "none",
}


def loops_of(config: Any, num_microbatches: int | None) -> list[Loop]:
    """Return what each rank of the pipeline does.

    Args:
        config: The model's configuration.
        num_microbatches: Of an iteration, or None for a full pipeline; of many, two groups and the rest are run.
    """
    config = copy.copy(config)
    for name, value in _OFF.items():
        setattr(config, name, value)
    ranks = config.pipeline_model_parallel_size
    group = config.microbatch_group_size_per_vp_stage if config.virtual_pipeline_model_parallel_size else ranks
    few = 2 * group if num_microbatches is None else min(num_microbatches, 2 * group + num_microbatches % group)
    return [loop_of(config, rank, few) for rank in range(ranks)]


def loop_of(config: Any, rank: int, num_microbatches: int) -> Loop:
    """Return what one rank does in an iteration of so many micro-batches."""
    return _Recorder(config, rank, num_microbatches).items


def run_loop(
    config: Any, communicator: Any, num_microbatches: int, seq_length: int = 1, micro_batch_size: int = 1
) -> None:
    """Run Megatron's pipelined loop of a configuration with chunks that have no model."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    single = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    chunks: list[Any] = [torch.nn.Module() for _ in range(config.virtual_pipeline_model_parallel_size or 1)]
    for chunk in chunks:
        chunk.config, chunk.model_type = config, None
    interleaves = len(chunks) > 1
    getattr(schedules, f"forward_backward_pipelining_with{'' if interleaves else 'out'}_interleaving")(
        forward_step_func=None,
        data_iterator=[None] * len(chunks),
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        p2p_communicator=communicator,
        pg_collection=ProcessGroupCollection(tp=single, cp=single),
    )


class _Recorder:
    """Notes what one rank's loop does."""

    def __init__(self, config: Any, rank: int, num_microbatches: int) -> None:
        self.items: list[Kernel | Wait] = []
        self._config, self._rank, self._ranks = config, rank, config.pipeline_model_parallel_size
        # Shapes that are received and belong to the next messages that are.
        self._shapes: list[End] = []
        # Names of shapes to send.
        self._sent: list[str] = []
        self._run(num_microbatches)

    def _run(self, num_microbatches: int) -> None:
        from megatron.core.pipeline_parallel import p2p_communication, schedules

        stages = SimpleNamespace(size=lambda: self._ranks, rank=lambda: self._rank, name=_PIPELINE)
        plain = p2p_communication.P2PCommunicator._communicate_shapes
        distributed: Any = torch.distributed
        with contextlib.ExitStack() as stack:
            for owner, name, function in (
                (schedules, "forward_step", self._forward),
                (schedules, "backward_step", self._backward),
                (distributed, "is_initialized", lambda: True),
                (
                    distributed,
                    "isend",
                    lambda tensor, dst, group: self._issue(group, [self._end(True, tensor, dst)], dst),
                ),
                (
                    distributed,
                    "irecv",
                    lambda tensor, src, group: self._issue(group, [self._end(False, tensor, src)], src),
                ),
                (distributed, "P2POp", lambda operation, tensor, peer, group: (operation, tensor, peer, group)),
                (distributed, "batch_isend_irecv", self._batch),
                (distributed, "get_global_rank", lambda group, rank: rank),
                (distributed, "get_backend", lambda group: "nccl"),
                (distributed, "group", SimpleNamespace(WORLD=SimpleNamespace(name=_WORLD))),
                (torch.cuda, "current_device", lambda: torch.device("cpu")),
                (p2p_communication.P2PCommunicator, "_communicate_shapes", self._shaping(plain)),
            ):
                stack.enter_context(patch.object(owner, name, function))
            run_loop(self._config, p2p_communication.P2PCommunicator(stages, self._config), num_microbatches)

    def _stage(self, chunk: int | None) -> int:
        return (chunk or 0) * int(self._ranks) + self._rank

    def _made(self, stage: int, kind: str, microbatch: int) -> Any:
        tensor: Any = torch.empty((1, 1, self._config.hidden_size))
        tensor.place, tensor.known_as = (stage, microbatch), f"{stage}{kind}{microbatch}"
        return tensor

    def _forward(self, *args: Any, current_microbatch: int, vp_stage: int | None = None, **_: Any) -> Any:
        stage = self._stage(vp_stage)
        _take(args[4], f"{stage - 1}F{current_microbatch}")
        return self._made(stage, "F", current_microbatch), 0

    def _backward(self, inputs: Any, output: Any, gradient: Any, config: Any) -> Any:
        stage, microbatch = (output[0] if isinstance(output, list) else output).place
        _take(gradient, f"{stage + 1}B{microbatch}")
        made = self._made(stage, "B", microbatch)
        return [made] if isinstance(inputs, list) else made

    def _shaping(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def communicate(communicator: Any, following: Any, previous: Any, *receives: bool) -> Any:
            self._sent = [f"the shape of {sent.known_as}" for sent in (previous, following) if sent is not None]
            plain(communicator, following, previous, *receives)
            return ((1, 1, self._config.hidden_size),) * 2

        return communicate

    def _end(self, sends: bool, tensor: Any, peer: int) -> End:
        if tensor.dtype is torch.int64:
            end = End(sends, peer, self._sent.pop(0) if sends else "")
            self._shapes += [] if sends else [end]
        else:
            end = End(sends, peer, tensor.known_as if sends else "")
            if not sends:
                tensor.ends = [end, *(self._shapes.pop(0) for _ in self._shapes[:1])]
        return end

    def _batch(self, operations: Any) -> list[Any]:
        isend = torch.distributed.isend
        ends = [self._end(operation == isend, tensor, peer) for operation, tensor, peer, _ in operations]
        return [self._issue(operations[0][3], ends, None)]

    def _issue(self, group: Any, ends: list[End], peer: int | None) -> Any:
        ranks = tuple(range(self._ranks)) if peer is None else tuple(sorted((self._rank, peer)))
        kernel = Kernel((f"{group.name}{'' if peer is None else ' pair'}", ranks), ends)
        self.items.append(kernel)
        return SimpleNamespace(wait=lambda: self.items.append(Wait(kernel)))


def _take(tensor: Any, name: str) -> None:
    """Note what a rank takes a message for."""
    tensor = tensor[0] if isinstance(tensor, list) else tensor
    for end, about in zip(getattr(tensor, "ends", ()), ("", "the shape of "), strict=False):
        end.name = about + name
