"""Put together what a configuration asks for: the driver, whose loop runs, and who else replaces functions of Megatron.

In: a configuration, and Megatron's arguments where there are any. Out: a `Composition`, which installs all of it and
takes it out again. The only place that knows which parts there are: the launcher and `install` differ in what they were
told, and in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.scheduling.hooks import patches
from megatron.scheduling.hooks.loops import Hooks
from megatron.scheduling.loop.delayed_wgrad import ask
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.executor import Loop
from megatron.scheduling.memory.replanning import Learner
from megatron.scheduling.memory.watermark import Watermark
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.placement.chunks import wraps_of
from megatron.scheduling.record.run_report import Monitor, Reporter


@dataclass(frozen=True)
class Composition:
    """Parts of one training that belong together. `reporter` is None where nothing is to be written."""

    driver: Driver
    loop: Loop | Hooks
    reporter: Reporter | None
    wraps: dict[patches.Patch, patches.Wrap]

    def install(self) -> patches.Installed:
        """Replace Megatron's functions.

        Taking them out ends the loop and the driver, too, which is collective. Raises Unfit for another Megatron.
        """
        installed = patches.install(self.wraps)
        installed.closing(self.driver.close)
        installed.closing(self.loop.close)
        return installed


def compose(config: SchedulingConfig, args: Any = None) -> Composition:
    """Compose all that the configuration asks for.

    Without Megatron's arguments, layers are not asked to put weights' gradients off.
    """
    watermark = None if config.report is None else Watermark(Path(config.report), config)
    driver = Driver(config, watermark)
    loop = Loop(driver, config) if config.own is not None else Hooks(driver, config.num_ranks)
    placed = wraps_of(config.positions)
    # Of the functions that it calls the loop only checks the signature.
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
