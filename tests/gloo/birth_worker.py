"""One rank of a test's training runs in which the first batch of messages in a group waits for all its ranks, as NCCL's
does.

In and out: as worker.py. Source: `batch_isend_irecv` in torch.distributed; NCCL makes the group's communicator there.
"""

from __future__ import annotations

import sys
from typing import Any


def wait_for_all_at_the_first_batch() -> None:
    """Put a barrier of the group in front of its first batch."""
    import torch.distributed as dist

    exchange = dist.batch_isend_irecv
    # Held, so that no other group gets the place of one that is gone.
    made: list[Any] = []

    def batch_isend_irecv(operations: list[Any]) -> Any:
        group = operations[0].group
        if not any(group is known for known in made):
            made.append(group)
            dist.barrier(group=group)
        return exchange(operations)

    dist.batch_isend_irecv = batch_isend_irecv


if __name__ == "__main__":
    from tests.gloo import worker

    wait_for_all_at_the_first_batch()
    worker.main(*sys.argv[1:])
