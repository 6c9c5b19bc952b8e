"""Sizes of a run as its schedule counts them: Megatron counts several pipes as more, shorter pipelines (`pipes`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
