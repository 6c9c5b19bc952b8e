"""Which process is which rank of a schedule, in which direction its chunks count stages, and whose data each reads.

A schedule's rank is a position in the pipeline: position 0 has the first stage. The last of Megatron's pipeline ranks has
the last stage: there it computes the loss, logs, writes and counts tokens. So if the last stage is at position 0, as in a V,
Megatron's ranks count the positions backwards. With two pipes in opposite directions positions i and p-1-i have the same
stages. For Megatron they are one pipeline rank of two neighbouring data-parallel replicas: the first half of the positions
is one replica, and the second half, counted from its end, the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bpipe.schedule.layout import Layout


@dataclass(frozen=True)
class Positions:
    """Positions of the ranks of a pipeline."""

    num_ranks: int
    """Ranks of the schedule."""

    backwards: bool = False
    """Whether position j is Megatron's last pipeline rank minus j, otherwise j."""

    mirrored: tuple[bool, ...] = (False,)
    """By chunk, whether its stages go from the last of Megatron's pipeline ranks to the first."""

    pipes: tuple[int, ...] = ()
    """By chunk, the pipe whose micro-batches it computes in the first half of the positions; in the second half it is the
    other pipe's. Empty with one pipe."""

    @classmethod
    def of(cls, layout: Layout) -> Positions:
        """Return the positions of a layout.

        Args:
            layout: Which rank computes which stage.

        Raises:
            ValueError: A chunk does not go through all ranks in one direction, or there are several pipes that are not
                two in opposite directions.
        """
        placement = layout.placements[0]
        num_ranks = max(placement) + 1
        up = tuple(range(num_ranks))
        ways = []
        for first in range(0, len(placement), num_ranks):
            ranks = placement[first : first + num_ranks]
            if ranks not in (up, up[::-1]):
                last = first + len(ranks) - 1
                raise ValueError(
                    f"stages {first} to {last} are on ranks {', '.join(map(str, ranks))}: Megatron cuts a model into "
                    f"chunks, each of which goes through ranks 0 to {num_ranks - 1} in ascending or descending "
                    "order; place the stages that way"
                )
            ways.append(ranks == up)
        if layout.num_pipes > 1:
            return cls._of_two(layout, num_ranks, ways)
        # With one rank both directions are Megatron's.
        backwards = num_ranks > 1 and placement[-1] == 0
        return cls(num_ranks, backwards, tuple(num_ranks > 1 and goes_up is backwards for goes_up in ways))

    @classmethod
    def _of_two(cls, layout: Layout, num_ranks: int, ways: Sequence[bool]) -> Positions:
        first, *others = layout.placements
        if others != [tuple(num_ranks - 1 - rank for rank in first)] or num_ranks % 2 or num_ranks < 4:
            raise ValueError(
                f"{layout.num_pipes} pipes over {num_ranks} ranks: only two pipes in opposite directions can be "
                "trained, over an even number of 4 or more ranks, where rank p-1-i has the stages of rank i; place "
                "the second pipe's stages that way"
            )
        # Half of the ranks has the lower half of a chunk's stages in one pipe and the upper half in the other, so a wave
        # of these halves has each of them in the order of the positions and then in reverse.
        pipes = tuple(pipe for goes_up in ways for pipe in ((0, 1) if goes_up else (1, 0)))
        return cls(num_ranks, True, (True, False) * len(ways), pipes)

    @property
    def num_pipes(self) -> int:
        return 2 if self.pipes else 1

    @property
    def pipeline_size(self) -> int:
        """Number of ranks of a pipeline as Megatron has it."""
        return self.num_ranks // self.num_pipes

    @property
    def native(self) -> bool:
        """Whether every chunk is where Megatron's own loops have it."""
        return not any(self.mirrored)

    @property
    def folded(self) -> bool:
        """Whether one rank, Megatron's last, has the first stage and the last."""
        return self.mirrored[0]

    def rank_at(self, position: int) -> int:
        """Return Megatron's pipeline rank at a position."""
        nearer = self.num_ranks - 1 - position if self.half_of(position) else position
        return self.pipeline_size - 1 - nearer if self.backwards else nearer

    def half_of(self, position: int) -> int:
        """Return the half of a position with two pipes, 0 or 1; with one pipe 0."""
        return position // self.pipeline_size

    def position_of(self, rank: int, half: int = 0) -> int:
        """Return the position of one of Megatron's pipeline ranks."""
        nearer = self.pipeline_size - 1 - rank if self.backwards else rank
        return self.num_ranks - 1 - nearer if half else nearer

    def in_order[T](self, by_rank: Sequence[T], of_other_half: Sequence[T] = ()) -> tuple[T, ...]:
        """Order by position the values by Megatron's pipeline rank; with two pipes those of both halves."""
        halves = by_rank, of_other_half
        return tuple(halves[self.half_of(position)][self.rank_at(position)] for position in range(self.num_ranks))

    def seen(self, rank: int, chunk: int) -> int:
        """Return the pipeline rank as which a chunk is built: its stage is c times Megatron's ranks + this, as in
        Megatron's own loops."""
        return self.pipeline_size - 1 - rank if self.mirrored[chunk] else rank

    def replica_of(self, replica: int, chunk: int) -> int:
        """Return the data-parallel replica, as Megatron counts them, whose samples a chunk reads: one of its pair."""
        return self.pair_of(replica)[self.half_of_replica(replica) ^ self.pipes[chunk]] if self.pipes else replica

    def half_of_replica(self, replica: int) -> int:
        """Return the half of the positions in which a data-parallel replica of Megatron's is; with one pipe 0."""
        return replica % self.num_pipes

    def pair_of(self, replica: int) -> tuple[int, ...]:
        """Return the data-parallel replicas that are the two halves of the positions; with one pipe itself."""
        first = replica - self.half_of_replica(replica)
        return tuple(range(first, first + self.num_pipes))

    def here(self) -> int:
        """Return this process's position."""
        # Not at the top: reading the arguments needs no torch.
        from megatron.core import parallel_state

        half = self.half_of_replica(int(parallel_state.get_data_parallel_rank())) if self.pipes else 0
        return self.position_of(int(parallel_state.get_pipeline_model_parallel_rank()), half)

    def pipelines(self) -> list[tuple[int, ...]]:
        """Return the global ranks of every pipeline of the world, by position, each pipeline once.

        Equal on every rank. Collective over the world.
        """
        import torch.distributed as dist
        from megatron.core import parallel_state

        from bpipe.transport.distributed import gathered

        ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        halves = [ranks]
        if self.pipes:
            # Two of Megatron's pipelines, of neighbouring data-parallel replicas.
            replicas = gathered(ranks, parallel_state.get_data_parallel_group())
            halves = [replicas[replica] for replica in self.pair_of(parallel_state.get_data_parallel_rank())]
        return sorted(set(gathered(self.in_order(*halves))))
