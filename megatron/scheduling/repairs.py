"""Mend defects of the installed Megatron that would stop a run, each only where the defect is present.

In: an imported Megatron. Out: the same, mended, and the list of what was done. Knows nothing of schedules.
"""

from __future__ import annotations

import os
from collections.abc import Callable


def apply() -> tuple[str, ...]:
    """Apply every repair whose defect is present; returns what was mended, one line each."""
    return tuple(line for line in (repair() for repair in _REPAIRS) if line)


def _skip_compiling_helpers() -> str | None:
    """The wheel ships its dataset helpers compiled and no Makefile; calling `make` there fails and ends the process."""
    from megatron.core.datasets import utils

    if os.path.exists(os.path.join(os.path.dirname(utils.__file__), "Makefile")):
        return None
    utils.compile_helpers = lambda: None
    return "dataset helpers: shipped compiled, not built again"


_REPAIRS: tuple[Callable[[], str | None], ...] = (_skip_compiling_helpers,)
