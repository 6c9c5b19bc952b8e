"""The rows of the vocabulary's layers that each shard holds.

Tensor parallelism is outermost: the ranks of a pipeline share the rows that its tensor-parallel rank holds without
shards, so no row leaves its pipeline.
"""

import math
from dataclasses import dataclass

# Megatron pads to this times the tensor-parallel size by default.
MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the vocabulary in equal shards, one for each of `tensor` * `pipeline` ranks.

    Raises ValueError if shards would differ: additional rows would take part in the softmax and change the loss.
    """

    vocabulary: int
    tensor: int
    pipeline: int

    def __post_init__(self) -> None:
        if self.vocabulary % self.num_shards:
            multiple = math.lcm(MULTIPLE, self.pipeline)
            raise ValueError(
                f"a vocabulary of {self.vocabulary} rows cannot be split into {self.num_shards} equal shards, of "
                f"{self.tensor} tensor- times {self.pipeline} pipeline-parallel ranks: pad it with "
                f"--make-vocab-size-divisible-by {multiple}"
            )

    @property
    def num_shards(self) -> int:
        return self.tensor * self.pipeline

    @property
    def each(self) -> int:
        """Rows of one shard."""
        return self.vocabulary // self.num_shards

    def shard(self, tensor_rank: int, pipeline_rank: int) -> int:
        """Return the number of a rank's shard."""
        return tensor_rank * self.pipeline + pipeline_rank

    def of(self, shard: int) -> range:
        """Return the rows of a shard."""
        return range(shard * self.each, (shard + 1) * self.each)
