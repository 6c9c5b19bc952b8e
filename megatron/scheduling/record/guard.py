"""Keep what a report needs from ending a training.

In: what is to be written. Out: it is written, or, from the first that could not be on, nothing more of it, with one
line that says so. Knows no format. What goes through here must be this rank's own affair: where one rank stops, the
others do not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from bpipe.runtime.failures import first_to_say


class Guard:
    """Guard of one purpose, such as "recording"."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self.open = True

    def run(self, act: Callable[[], None], place: Path | str) -> None:
        """Act, unless something failed before."""
        if not self.open:
            return
        try:
            act()
        except Exception as error:
            self.open = False
            # A disk that is full is full for many ranks: the first speaks for all.
            if first_to_say(self._purpose):
                said = (
                    error.strerror
                    if isinstance(error, OSError) and error.strerror
                    else f"{type(error).__name__}: {error}"
                )
                print(
                    f"bpipe: rank {dist.get_rank()}: {place}: {said}; {self._purpose} stops on ranks with this "
                    "error, training continues",
                    flush=True,
                )
