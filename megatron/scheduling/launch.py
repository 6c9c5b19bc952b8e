"""Put the hooks in around a training run and take them out again.

In: Megatron's parsed arguments. Out: a context in which Megatron's pipelined loop is balanced, measured, or left as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.scheduling.arguments import add_arguments, config_from_args

__all__ = ["add_arguments", "scheduling"]


@contextlib.contextmanager
def scheduling(args: Any) -> Iterator[None]:
    """Install what the arguments ask for. Without `--bpipe` and `--bpipe-report` nothing of Megatron is touched."""
    config = config_from_args(args)
    if not config.active:
        yield
        return
    from megatron.scheduling.hooks import Hooks
    from megatron.scheduling.patches import install
    from megatron.scheduling.reporting import Reporter

    hooks = Hooks(config)
    reporter = Reporter(config.report) if config.report is not None else None
    wraps = hooks.wraps()
    if reporter is not None:
        wraps |= reporter.wraps()
        reporter.start()
    installed = install(wraps)
    try:
        yield
        if reporter is not None:
            reporter.finish(hooks.stage_report())
    finally:
        installed.remove()
