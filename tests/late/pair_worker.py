"""One of two ranks on late devices.

`lonely`: the first rank waits for a message that the second never sends. `probing`: the second's two-sided link works
in one direction only while the pair chooses a transport.

Takes one of these, the rank, a port, and a time-out in seconds. Prints what it received, or the chosen transport and
the reason against the other.
"""

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bpipe.transport import AUTO, connect
from bpipe.transport.distributed import Distributed, Works
from bpipe.transport.streams import Device
from tests.late.devices import Draw, device
from tests.late.processes import begin_process, stand_in_for_nccl

PATIENCE_S = 60.0


def waits_for_nothing(rank: int, store: dist.Store) -> None:
    sent, received = torch.full((4,), float(rank), device=device(rank)), torch.empty(4, device=device(rank))
    operations = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.tolist() == [1.0 - rank] * 4
    total = torch.full((3,), 1.0 + rank, device=device(rank))
    dist.all_reduce(total)
    assert total.tolist() == [3.0] * 3
    print("heard", flush=True)
    if rank == 0:
        for work in dist.batch_isend_irecv(operations[1:]):
            work.wait()
        torch.accelerator.synchronize()
    else:
        store.wait(["never"], timedelta(seconds=PATIENCE_S))


def losing(send: Any) -> Any:
    """Send only what makes the communicator, so that the other rank's kernel begins and waits."""
    sent: list[Works] = []

    def lose(transport: Distributed, tensors: Sequence[torch.Tensor]) -> Works:
        if not sent:
            sent.append(send(transport, tensors))
            return sent[0]
        return Works([], tensors)

    return lose


def looks_for_a_transport(rank: int, timeout_s: float) -> None:
    if rank == 1:
        Distributed._send = losing(Distributed._send)  # type: ignore[method-assign]
    connection, (link,) = connect.connect([(0, 1)], AUTO, timeout_s, Device(device(rank)))
    assert connection is not None
    print(f"chosen: {link.transport}; not nccl: {link.refused.get('nccl')}", flush=True)
    connection.close()


def main(role: str, rank: int, port: int, timeout_s: float) -> None:
    stand_in_for_nccl()
    begin_process(rank, rank, Draw(1))
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=PATIENCE_S))
    timeout = timedelta(seconds=timeout_s if role == "lonely" else PATIENCE_S)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timeout)
    if role == "lonely":
        waits_for_nothing(rank, store)
    else:
        looks_for_a_transport(rank, timeout_s)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
