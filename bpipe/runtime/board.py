"""A board on which every rank of a run can put a word for the others, outside of any collective.

In: nothing. Out: the store in which the ranks found each other, through a connection of its own; None where there is
none. A rank that is stuck, or alone in what happened to it, can still write and read here. Knows no failure and no
report.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

# A store that does not answer for so long is gone.
_TIMEOUT = timedelta(seconds=20)


def open_board() -> distributed_c10d.Store | None:
    """Open a connection for one thread.

    A restart of all ranks under torchrun may find the same store: it reads a board of its own.
    """
    if not dist.is_initialized():
        return None
    with contextlib.suppress(Exception):
        store = distributed_c10d._get_default_store().clone()
        store.set_timeout(_TIMEOUT)
        return distributed_c10d.PrefixStore(f"bpipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return None


def first_to_say(what: str) -> bool:
    """Return whether no other rank has said this before; true where nobody can be asked."""
    board = open_board()
    with contextlib.suppress(Exception):
        if board is not None:
            return int(board.add(f"said/{what}", 1)) == 1
    return True
