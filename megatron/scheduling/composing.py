"""Assemble and install the driver, the loop and all patches of a configuration."""

from pathlib import Path
from typing import Any

from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.executor import Loop
from megatron.scheduling.loop.halves import ask
from megatron.scheduling.loop.measurements import Watermark
from megatron.scheduling.loop.megatron_loops import Hooks, Recapture
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.placement.chunks import wraps_of
from megatron.scheduling.record.run_report import Reporter
from megatron.scheduling.replanning import Learner


def install(config: SchedulingConfig, args: Any = None) -> tuple[patches.Installed, Reporter | None]:
    """Replace Megatron's functions as the configuration asks. Raises Unfit for another Megatron.

    Removing the patches also closes the loop and the driver, which is collective.

    Args:
        config: What to balance, and how.
        args: Megatron's arguments. Without them, Transformer Engine's layers do not defer weights' gradients.

    Returns:
        The patches, and the reporter if there is a report.
    """
    watermark = None if config.report is None else Watermark(Path(config.report), config)
    driver = Driver(config, watermark)
    loop = Loop(driver, config) if config.own is not None else Hooks(driver, config.num_ranks)
    placed = wraps_of(config.positions)
    # The loop has these too, but only to check their signatures.
    called = {patch: placed[patch] for patch in patches.LEAVES if patch in placed}
    wraps = placed | loop.wraps() | called
    wraps[patches.GRAPHED] = patches.replaced_by(Recapture(driver).call)
    if args is not None and patches.LINEAR in wraps:
        wraps |= ask(args)
    reporter = None if watermark is None else Reporter(config, driver, watermark)
    if reporter is not None:
        wraps[patches.TRAIN_STEP] = patches.by_name(reporter.step)
    if config.memory is not None and config.memory.learns:
        observe, inner = patches.by_name(Learner(config, driver).step), wraps.get(patches.TRAIN_STEP)
        wraps[patches.TRAIN_STEP] = observe if inner is None else lambda step: observe(inner(step))
    installed = patches.install(wraps)
    installed.closing(driver.close)
    if isinstance(loop, Loop):
        installed.closing(loop.close)
    return installed, reporter
