"""One rank of two whose two-sided link carries one way only, while the pair looks for a transport.

In: its number, a port, the group's time-out in seconds, and whether a trial is given up before that. Out: a line with
the transport that was chosen, and why not the other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bpipe.runtime.streams import copying_on
from bpipe.transport import AUTO, connect
from bpipe.transport.distributed import Distributed, Works
from tests.late.devices import Draw, device
from tests.late.processes import begin_process, stand_in_for_nccl

PATIENCE_S = 60.0


def losing(send: Any) -> Any:
    """Send what makes the communicator and nothing behind it: the other rank's kernel begins, and waits."""
    sent: list[Works] = []

    def lose(transport: Distributed, tensors: Sequence[torch.Tensor]) -> Works:
        if not sent:
            sent.append(send(transport, tensors))
            return sent[0]
        return Works([], tensors)

    return lose


def main(rank: int, port: int, timeout_s: float, gives_up: str) -> None:
    stand_in_for_nccl()
    begin_process(rank, rank, Draw(1))
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=PATIENCE_S))
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE_S))
    if rank == 1:
        Distributed._send = losing(Distributed._send)  # type: ignore[method-assign]
    if gives_up == "no":
        measure = connect.measure

        def patient(*given: Any) -> Any:
            *ends, within_s, abort = given
            return measure(*ends, within_s + PATIENCE_S, abort)

        connect.measure = patient
    connection, (link,) = connect.connect([(0, 1)], AUTO, timeout_s, copying_on(device(rank)))
    assert connection is not None
    print(f"chosen: {link.transport}; not nccl: {link.refused.get('nccl')}", flush=True)
    connection.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
