"""One rank of two, of which the first waits for what the second never sends.

In: its number, a port, the group's time-out in seconds.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.late.devices import Draw, device
from tests.late.processes import begin_process, stand_in_for_nccl

PATIENCE_S = 60.0


def main(rank: int, port: int, timeout_s: float) -> None:
    stand_in_for_nccl()
    begin_process(rank, rank, Draw(1))
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=PATIENCE_S))
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s))
    told, heard = torch.full((4,), float(rank), device=device(rank)), torch.empty(4, device=device(rank))
    operations = [dist.P2POp(dist.isend, told, 1 - rank), dist.P2POp(dist.irecv, heard, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert heard.tolist() == [1.0 - rank] * 4
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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
