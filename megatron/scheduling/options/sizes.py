"""Count a run's sizes as its schedule and its user do.

In: Megatron's arguments, once it has judged them, and the number of pipes. Out: `Sizes`. Several pipes over the same
ranks are to Megatron more replicas of a shorter pipeline (`pipes`). Imports no Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.scheduling.hooks import upstream


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run: `num_ranks` of a pipeline, `num_chunks` of a rank in each pipe, `num_replicas` of the pipeline
    with all its pipes.

    `num_microbatches` are those of all pipes in an iteration; None where the first one's are not known before the run.
    """

    num_ranks: int
    num_chunks: int
    num_replicas: int
    num_microbatches: int | None

    @classmethod
    def of(cls, args: Any, num_pipes: int) -> Sizes:
        upstream.require(args, "sizes")
        replicas = args.data_parallel_size // num_pipes
        known = args.global_batch_size is not None and args.step_batch_size_schedule is None
        return cls(
            num_ranks=args.pipeline_model_parallel_size * num_pipes,
            num_chunks=(args.virtual_pipeline_model_parallel_size or 1) // num_pipes,
            num_replicas=replicas,
            num_microbatches=args.global_batch_size // (args.micro_batch_size * replicas) if known else None,
        )
