"""Say which process is which rank of a schedule, and from which end of the pipeline each of its chunks counts.

In: a schedule's layout. Out: `Positions`. A schedule's rank is a position in the pipeline: position 0 has the first stage. Megatron counts
pipeline ranks, of which the last has the last stage: there it computes the loss, logs, writes and counts tokens. Where the last stage is at
position 0, as in a V, Megatron's ranks count the positions backwards.
Knows no model, and asks Megatron for nothing but this process's rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bpipe.ir.layout import Layout


@dataclass(frozen=True)
class Positions:
    """Of pipelines of `num_ranks`. `backwards`: position j is Megatron's pipeline rank p-1-j, otherwise j.

    `mirrored[chunk]`: the chunk's stages go down Megatron's pipeline ranks, from the last to the first, where Megatron's own go up.
    """

    num_ranks: int
    backwards: bool = False
    mirrored: tuple[bool, ...] = (False,)

    @classmethod
    def of(cls, layout: Layout) -> Positions:
        """Raises ValueError for a layout whose chunks do not each go through all ranks, one way or the other, or that has several pipes."""
        placement = layout.only_placement
        num_ranks = max(placement) + 1
        up = tuple(range(num_ranks))
        # With one rank both ways are the same, and then it is Megatron's.
        backwards = num_ranks > 1 and placement[-1] == 0
        mirrored = []
        for first in range(0, len(placement), num_ranks):
            ranks = placement[first : first + num_ranks]
            if ranks not in (up, up[::-1]):
                last = first + len(ranks) - 1
                raise ValueError(
                    f"stages {first} to {last} are on ranks {', '.join(map(str, ranks))}: Megatron cuts a model into chunks, each of which "
                    f"goes through ranks 0 to {num_ranks - 1} in order, one way or the other; place the stages so"
                )
            mirrored.append(ranks != up if not backwards else ranks == up)
        return cls(num_ranks, backwards, tuple(mirrored) if num_ranks > 1 else (False,) * len(mirrored))

    @property
    def native(self) -> bool:
        """Whether every chunk is where Megatron's own loops have it."""
        return not any(self.mirrored)

    @property
    def folded(self) -> bool:
        """Whether the first stage and the last are of one rank, Megatron's last."""
        return self.mirrored[0]

    def rank_at(self, position: int) -> int:
        """Megatron's pipeline rank at a position."""
        return self.num_ranks - 1 - position if self.backwards else position

    def position_of(self, rank: int) -> int:
        """Where one of Megatron's pipeline ranks is."""
        return self.rank_at(rank)

    def in_order[T](self, by_rank: Sequence[T]) -> tuple[T, ...]:
        """By position what is given by Megatron's pipeline rank."""
        return tuple(by_rank[self.rank_at(position)] for position in range(self.num_ranks))

    def seen(self, rank: int, chunk: int) -> int:
        """As which pipeline rank a chunk is built: stages of chunk c are c * p + this, as in Megatron's own loops."""
        return self.num_ranks - 1 - rank if self.mirrored[chunk] else rank

    def here(self) -> int:
        """This process's position."""
        # Not at the top: whoever only reads the arguments needs no torch.
        from megatron.core import parallel_state

        return self.position_of(int(parallel_state.get_pipeline_model_parallel_rank()))
