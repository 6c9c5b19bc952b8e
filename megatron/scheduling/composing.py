"""Put together what a configuration asks for: the driver, the loop, and all patches.

The launcher and `install` differ only in Megatron's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.delayed_wgrad import ask
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.executor import Loop
from megatron.scheduling.loop.megatron_loops import Hooks
from megatron.scheduling.loop.watermark import Watermark
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.placement.chunks import wraps_of
from megatron.scheduling.record.run_report import Monitor, Reporter
from megatron.scheduling.replanning import Learner


@dataclass(frozen=True)
class Composition:
    """The parts of one training."""

    driver: Driver
    """Runs iterations."""

    loop: Loop | Hooks
    """Our own loop, or the hooks in Megatron's."""

    reporter: Reporter | None
    """Writes the report, if there is one."""

    wraps: dict[patches.Patch, patches.Wrap]
    """All patches."""

    def install(self) -> patches.Installed:
        """Replace Megatron's functions; removing the patches ends the loop and the driver, too, which is collective.

        Raises Unfit for another Megatron.
        """
        installed = patches.install(self.wraps)
        installed.closing(self.driver.close)
        if isinstance(self.loop, Loop):
            installed.closing(self.loop.close)
        return installed


def compose(config: SchedulingConfig, args: Any = None) -> Composition:
    """Compose all that the configuration asks for.

    Without Megatron's arguments, Transformer Engine's layers do not defer weights' gradients.
    """
    watermark = None if config.report is None else Watermark(Path(config.report), config)
    driver = Driver(config, watermark)
    loop = Loop(driver, config) if config.own is not None else Hooks(driver, config.num_ranks)
    placed = wraps_of(config.positions)
    # The loop has these too, but only to check their signatures.
    called = {patch: placed[patch] for patch in patches.LEAVES if patch in placed}
    wraps = placed | loop.wraps() | called
    if args is not None and patches.LINEAR in wraps:
        wraps |= ask(args)
    reporter = None if watermark is None else Reporter(config, driver, watermark)
    if reporter is not None:
        wraps |= reporter.wraps()
    elif config.metrics_interval is not None and (config.balance or config.own is not None):
        wraps |= Monitor(config, driver).wraps()
    if config.memory is not None and config.memory.learns:
        wraps |= Learner(config, driver).wraps(wraps)
    return Composition(driver, loop, reporter, wraps)
