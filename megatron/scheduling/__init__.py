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
    """Balance every pipelined iteration from now on, in a training loop of your own.

    Call it before `pretrain`, which looks the pipelined loop up once, and, for a schedule that places stages differently
    from Megatron, before process groups and models are made. No arguments were parsed, so the first iteration checks
    the model's configuration and raises ValueError for what cannot be balanced. No rank is moved: `place` does that,
    earlier.

    Args:
        config: What to balance, and how.
        samples_by_chunk: Whether each chunk's data iterator has the samples of the replica that `samples_of` names.

    Returns:
        The patches. Their `remove()` puts Megatron's own functions back and frees memory: all ranks call it, with
        `failed=True` if an error ends the training.

    Raises:
        RuntimeError: The installed Megatron differs from the tested one. The message says how.
        ValueError: The configuration asks for what needs Megatron's trainer (a report, a budget), or there are two
            pipes without `samples_by_chunk`, because nothing could detect wrong samples.
    """
    from megatron.scheduling.options.arguments import BY_TRAINER, end_where

    end_where(
        [f"{name} in the configuration: {reason}" for name, reason in BY_TRAINER.items() if getattr(config, name)]
    )
    if config.positions.num_pipes > 1 and not samples_by_chunk:
        raise ValueError(
            "with two pipes each chunk reads the samples of its own pipe, and your own loop must supply them: give "
            "chunk c's iterator the samples of the data-parallel replica samples_of(config, c), and call "
            "install(config, samples_by_chunk=True)"
        )
    # Not at the top: importing this package must not import Megatron, which the CPU stand-in has to precede.
    from megatron.scheduling import composing

    return composing.install(config)[0]


def samples_of(config: SchedulingConfig, chunk: int) -> int:
    """Return the data-parallel replica whose samples a chunk of this rank reads, once there are process groups.

    It is the rank's own or, with two pipes, maybe that of the other rank with the same stages.
    """
    from megatron.core import parallel_state

    return config.positions.replica_of(int(parallel_state.get_data_parallel_rank()), chunk)
