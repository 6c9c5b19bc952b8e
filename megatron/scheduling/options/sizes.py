"""Sizes of a run as its schedule counts them, and as Megatron does: several pipes over the same ranks.

Two pipes in opposite directions over p ranks, with v stages per rank each, are to Megatron pipelines of p/2 ranks with
2v virtual stages, and twice as many replicas: ranks i and p-1-i have the same stages and are neighbours in data
parallelism, so Megatron itself handles gradients, norms, the optimizer, samples and checkpoints of both. Imports no
Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.scheduling.hooks import upstream


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run."""

    num_ranks: int
    """Ranks of a pipeline."""
    num_chunks: int
    """Chunks of a rank in each pipe."""
    num_replicas: int
    """Pipelines, each with all its pipes."""
    num_microbatches: int | None
    """Micro-batches of all pipes in an iteration; None if the first iteration's are unknown before the run."""

    @classmethod
    def of(cls, args: Any, num_pipes: int) -> Sizes:
        """Return the sizes of arguments that Megatron has validated."""
        replicas = args.data_parallel_size // num_pipes
        known = args.global_batch_size is not None and args.step_batch_size_schedule is None
        return cls(
            num_ranks=args.pipeline_model_parallel_size * num_pipes,
            num_chunks=(args.virtual_pipeline_model_parallel_size or 1) // num_pipes,
            num_replicas=replicas,
            num_microbatches=args.global_batch_size // (args.micro_batch_size * replicas) if known else None,
        )


def share(args: Any, num_pipes: int) -> None:
    """Set Megatron's sizes of `num_pipes` pipes, once. Raises ValueError for sizes that they cannot have."""
    if num_pipes == 1 or getattr(args, "bpipe_num_pipes", 1) == num_pipes:
        return
    problems = list(_unfit(args, num_pipes))
    if problems:
        raise ValueError("\n  ".join(problems))
    num_ranks, chunks = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank
    args.bpipe_num_pipes = num_pipes
    args.pipeline_model_parallel_size = num_ranks // num_pipes
    # Layers per virtual stage and a layout of layers are the same for both.
    if chunks is not None:
        args.num_virtual_stages_per_pipeline_rank = chunks * num_pipes
    upstream.remark(
        f"Megatron counts {num_pipes} pipes over the same {num_ranks} ranks as pipelines of {num_ranks // num_pipes} "
        f"ranks, with {num_pipes} times as many virtual stages per rank and {num_pipes} times as many data-parallel "
        "replicas; its lines below use these numbers"
    )


def _unfit(args: Any, num_pipes: int) -> Iterator[str]:
    """Yield why these arguments cannot have that many pipes."""
    num_ranks = args.pipeline_model_parallel_size
    if num_ranks < 2 * num_pipes:
        # Megatron knows virtual stages only where a pipeline has two ranks or more.
        yield (
            f"{num_pipes} pipes need {2 * num_pipes} ranks or more, not {num_ranks}: use "
            f"--pipeline-model-parallel-size {2 * num_pipes}"
        )
    elif num_ranks % num_pipes:
        yield (
            f"{num_pipes} pipes need an even number of ranks, not {num_ranks}: use --pipeline-model-parallel-size "
            f"{num_ranks - 1} or {num_ranks + 1}"
        )
    block = args.tensor_model_parallel_size * args.context_parallel_size * num_ranks
    if args.world_size % block:
        yield (
            f"{args.world_size} processes are not a multiple of {block} (tensor {args.tensor_model_parallel_size} "
            f"times context {args.context_parallel_size} times pipeline {num_ranks}): launch {block}, or a multiple "
            "of it"
        )
    elif args.global_batch_size is not None and args.micro_batch_size is not None:
        replicas = args.world_size // block
        together = args.micro_batch_size * num_pipes * replicas
        below, rest = divmod(args.global_batch_size, together)
        if rest:
            nearest = " or ".join(str(count * together) for count in (below, below + 1) if count)
            yield (
                f"all pipes need the same number of micro-batches, but {args.global_batch_size} samples are not a "
                f"multiple of {together} ({num_pipes} micro-batches of {args.micro_batch_size} on each of {replicas} "
                f"replicas): use --global-batch-size {nearest}"
            )
    if args.use_tp_pp_dp_mapping:
        yield (
            "replicas of the two pipes must be neighbours in data parallelism, and this rank order separates them: "
            "drop --use-tp-pp-dp-mapping"
        )
    if args.use_mp_args_from_checkpoint_args:
        yield (
            "a checkpoint stores Megatron's sizes, which differ from the sizes of its pipes: drop "
            "--use-mp-args-from-checkpoint-args and give --pipeline-model-parallel-size and the other sizes"
        )
