"""Hooks from the installed Megatron into `bpipe`: the only code of this project that imports Megatron.

`install(config)` puts the hooks into a process from code, and `place(...)` moves its rank before there are process groups;
`python -m megatron.scheduling.launch` does both for an unmodified script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.scheduling.placement import place

if TYPE_CHECKING:
    from megatron.scheduling.arguments import SchedulingConfig
    from megatron.scheduling.patches import Installed

__all__ = ["install", "place"]


def install(config: SchedulingConfig) -> Installed:
    """Balance every pipelined iteration from now on. `.remove()` of the result puts Megatron's own functions back.

    Call it before `pretrain`, which looks the pipelined loop up once, and for a schedule whose stages are not where Megatron has them
    before process groups and models are made. Raises RuntimeError where the installed Megatron differs from the one that was tried, naming
    what differs, and ValueError for two pipes. Nothing was parsed, so the first iteration looks at the model's configuration: a ValueError
    says what of it cannot be balanced. The process groups may exist by then, so no rank is moved: that is `place`'s, before.
    """
    config.positions.require_one_pipe()
    # Not at the top: importing this package must not import Megatron, which the CPU stand-in has to precede.
    from megatron.scheduling.driver import Driver
    from megatron.scheduling.executor import Loop
    from megatron.scheduling.hooks import Hooks
    from megatron.scheduling.patches import install as install_patches
    from megatron.scheduling.placed import wraps_of

    driver = Driver(config)
    loop = Loop(driver, config) if config.own is not None else Hooks(driver, config.num_ranks)
    installed = install_patches(wraps_of(config.positions) | loop.wraps())
    installed.closing(loop.close)
    installed.closing(driver.close)
    return installed
