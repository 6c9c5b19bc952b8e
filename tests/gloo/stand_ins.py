"""Stand-ins, during one case of `worker.py`, for what this machine or Megatron lacks, by `--stand-in` name."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gloo import fused as fused_extension
from tests.gloo import worker

# isort: split
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules, utils
from megatron.core.tensor_parallel import layers
from megatron.training import get_args, training

from megatron.scheduling import cpu as cpu_runtime

patch = mock.patch.object


@contextlib.contextmanager
def births(folder: Path, case: str) -> Iterator[None]:
    """Make the first batch of messages in a group wait for all its ranks, as NCCL does to make the communicator."""
    exchange = dist.batch_isend_irecv
    # Keep the groups, so that no other gets the address of a freed one.
    born: list[Any] = []

    def batch_isend_irecv(operations: list[Any]) -> Any:
        group = operations[0].group
        if not any(group is earlier for earlier in born):
            born.append(group)
            dist.barrier(group=group)
        return exchange(operations)

    with patch(dist, "batch_isend_irecv", batch_isend_irecv):
        yield


@contextlib.contextmanager
def fused(folder: Path, case: str) -> Iterator[None]:
    """Accumulate weight gradients inside their matrix product, as on a GPU with Apex or Transformer Engine.

    The backward writes into `weight.main_grad`, so it must get the same parameter object that the forward saved.
    """
    arguments = tuple(flag for flag in cpu_runtime.ARGUMENTS if flag != "--no-gradient-accumulation-fusion")
    extension = fused_extension.extension()
    with (
        patch(cpu_runtime, "ARGUMENTS", arguments),
        patch(layers, "_grad_accum_fusion_available", True),
        patch(layers, fused_extension.NAME, extension, create=True),
        mock.patch.dict(sys.modules, {fused_extension.NAME: extension}),
    ):
        yield


@contextlib.contextmanager
def later(folder: Path, case: str) -> Iterator[None]:
    """Simulate a later Megatron: functions that its main branch extends, or may extend, have one more parameter.

    A call with a value other than the default ends the run.
    """

    def further(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        signature = inspect.signature(function)
        parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            assert kwargs.pop(name, None) is None
            return function(*args, **kwargs)

        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), parameter])  # type: ignore[attr-defined]
        return run

    plain = layers.linear_with_grad_accumulation_and_async_allreduce

    def linear(*args: Any, output_dtype: Any = None, **kwargs: Any) -> Any:
        assert output_dtype is None
        return plain(*args, **kwargs)

    # As in Megatron's main branch: after the common parameters, and at another position than here.
    extra = inspect.Parameter("output_dtype", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    linear.__signature__ = inspect.Signature([*inspect.signature(plain).parameters.values(), extra])  # type: ignore[attr-defined]
    linear.warned = plain.warned  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(patch(layers, plain.__name__, linear))
        for name in (
            *("forward_step", "backward_step", "forward_backward_pipelining_without_interleaving"),
            *("forward_backward_pipelining_with_interleaving", "deallocate_output_tensor", "check_first_val_step"),
        ):
            stack.enter_context(patch(schedules, name, further(getattr(schedules, name), "of_a_later_version")))
        yield


@contextlib.contextmanager
def offloading_without_a_gpu(folder: Path, case: str) -> Iterator[None]:
    """Run Megatron's fine-grained activation offloading, which requires Transformer Engine and a GPU.

    Replaces the switch of Transformer Engine's layers, the affinity to a GPU, and the check of a tensor's device.
    Writes to `<folder>/<case>.rank<r>.offloaded` how often something was offloaded and reloaded.
    """
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading

    counts = [0, 0]
    handler: Any = offloading.ChunkOffloadHandler

    def counted(plain: Any, place: int) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[place] += 1
            return plain(*args, **kwargs)

        return run

    takes = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
    switch = types.SimpleNamespace(CPUOffloadEnabled=False)
    with (
        patch(transformer_engine, "cpu_offload", switch, create=True),
        patch(utils, "set_ideal_affinity_for_current_gpu", lambda: None),
        patch(handler, "_can_manage_tensor_for_offload", takes),
        patch(handler, "offload", counted(handler.offload, 0)),
        patch(handler, "reload", counted(handler.reload, 1)),
    ):
        yield
    offloading.PipelineOffloadManager.reset_instance()
    (folder / f"{case}.rank{worker.LAUNCH_RANK}.offloaded").write_text(json.dumps(counts))


@contextlib.contextmanager
def lost_report(folder: Path, case: str) -> Iterator[None]:
    """Make the report unwritable after the first iteration.

    `full`: two ranks write to a device that is always full. `gone`: the folder is removed.
    """
    train_step = training.train_step
    signature = inspect.signature(train_step)

    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        report = get_args().bpipe_report
        if signature.bind(*args, **kwargs).arguments["iteration"] == 0 and report is not None:
            damage(Path(report))
        return result

    # Around the reporter's own step, so that it meets the damage at its next write.
    with patch(training, "train_step", step):
        yield


def damage(folder: Path) -> None:
    rank = dist.get_rank()
    if "full" in folder.name and rank in (1, 2):
        (folder / f"record_{rank:05d}.jsonl").symlink_to("/dev/full")
    if "gone" in folder.name:
        dist.barrier()
        if rank == 0:
            # Rename first, because another rank may be writing into the folder.
            shutil.rmtree(folder.rename(folder.with_name(f"taken_from_{rank}")))


STAND_INS: dict[str, Callable[[Path, str], AbstractContextManager[None]]] = {
    "births": births,
    "fused": fused,
    "later": later,
    "offloading": offloading_without_a_gpu,
    "lost_report": lost_report,
}
