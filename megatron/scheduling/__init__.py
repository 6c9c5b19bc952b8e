"""Hooks from the installed Megatron into `bpipe`: the only code of this project that imports Megatron.

`install(config)` puts the hooks into a process from code, and `place(...)` moves its rank before there are process
groups; `python -m megatron.scheduling.launch` does both for an unmodified script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.scheduling.placement.rank_order import place

if TYPE_CHECKING:
    from megatron.scheduling.hooks.patches import Installed
    from megatron.scheduling.options.arguments import SchedulingConfig

__all__ = ["install", "place", "samples_of"]


def install(config: SchedulingConfig, *, samples_by_chunk: bool = False) -> Installed:
    """Balance every pipelined iteration from now on. `.remove()` of the result puts Megatron's own functions back
    and gives memory back: all ranks call it, with `failed=True` where an error ends the training.

    Call it before `pretrain`, which looks the pipelined loop up once, and for a schedule whose stages are not where
    Megatron has them before process groups and models are made. Raises RuntimeError where the installed Megatron
    differs from the one that was tried, naming what differs. Nothing was parsed, so the first iteration looks at the
    model's configuration: a ValueError says what of it cannot be balanced. The process groups may exist by then, so no
    rank is moved: that is `place`'s, before. What needs Megatron's trainer (a report, a budget, the optimizer's state
    on other ranks) is refused by name, with a ValueError. `samples_by_chunk`: each chunk's data iterator has the
    samples of the replica that `samples_of` names. Raises ValueError for two pipes without it, because nothing could
    notice.
    """
    config.refuse_what_needs_the_trainer()
    if config.positions.num_pipes > 1 and not samples_by_chunk:
        raise ValueError(
            "with two pipes each chunk reads the samples of its own pipe, and your own loop must supply them: give "
            "chunk c's iterator the samples of the data-parallel replica samples_of(config, c), and call "
            "install(config, samples_by_chunk=True)"
        )
    # Not at the top: importing this package must not import Megatron, which the CPU stand-in has to precede.
    from megatron.scheduling.composing import compose

    return compose(config).install()


def samples_of(config: SchedulingConfig, chunk: int) -> int:
    """Return the data-parallel replica whose samples a chunk of this rank reads, once there are process groups: its
    own, or of two pipes also the other one's of the same stages."""
    from megatron.core import parallel_state

    return config.positions.replica_of(int(parallel_state.get_data_parallel_rank()), chunk)
