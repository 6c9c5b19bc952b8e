"""The late process group follows NCCL's rules: when communicators are made, which messages meet, and what waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.late.devices import Draw, begin, device, extension
from tests.late.group import join
from tests.late.hosts import run_hosts

SEEDS = range(6)


def hosts(count: int, does: Callable[[int], None], draw: Draw) -> None:
    def run_rank(rank: int) -> None:
        join(rank, count)
        does(rank)

    begin(draw)
    run_hosts(count, run_rank)


def value(rank: int, count: int = 4) -> torch.Tensor:
    return torch.full((count,), float(rank), device=device(rank))


def batch(*operations: tuple[Any, torch.Tensor, int]) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations]):
        work.wait()


def wait_for_word(ranks_done: set[int], rank: int) -> None:
    """Wait as for a message that does not use a device."""
    extension().wait_until(lambda: rank in ranks_done, f"a host waits to hear from host {rank}")


def test_messages_carry_what_they_were_given() -> None:
    def ring(rank: int) -> None:
        received = torch.empty(4, device=device(rank))
        batch((dist.isend, value(rank), (rank + 1) % 4), (dist.irecv, received, (rank - 1) % 4))
        assert received.tolist() == [float((rank - 1) % 4)] * 4

    for seed in SEEDS:
        hosts(4, ring, Draw.of(seed))


def test_a_batch_makes_the_communicator_of_all_ranks_and_waits_for_them() -> None:
    """This hung the first iterations of `--bpipe` with 8 or more stages over NCCL: before its first batch, a rank waits
    for a message that is sent only after the batches of others."""
    ranks_done: set[int] = set()

    def chain(rank: int) -> None:
        if rank == 2:
            wait_for_word(ranks_done, 1)
        batch((dist.isend, value(rank), 1) if rank == 0 else (dist.irecv, value(rank), 0)) if rank < 2 else None
        ranks_done.add(rank)

    with pytest.raises(
        RuntimeError, match=r"waits for the communicator \S+/all of ranks 0, 1, 2 to be made(.|\n)*hear from host 1"
    ):
        hosts(3, chain, Draw(1))


def test_a_message_by_itself_makes_the_communicator_of_two() -> None:
    ranks_done: set[int] = set()

    def chain(rank: int) -> None:
        if rank == 2:
            wait_for_word(ranks_done, 1)
        elif rank == 0:
            dist.send(value(0), 1)
        else:
            dist.recv(value(1), 0)
        ranks_done.add(rank)

    hosts(3, chain, Draw(1))


def exchange(by_batch: bool) -> Callable[[int], None]:
    def both(rank: int) -> None:
        received, peer = torch.empty(4, device=device(rank)), 1 - rank
        operations = (dist.isend, value(rank), peer), (dist.irecv, received, peer)
        if by_batch:
            batch(*operations)
        else:
            for work in [operation(tensor, who) for operation, tensor, who in operations]:
                work.wait()
        assert received.tolist() == [float(peer)] * 4

    return both


def test_two_that_send_to_each_other_first_stand_still_but_in_one_batch() -> None:
    """Kernels of one communicator run in the order of their issue, and one without its other end blocks the next."""
    hosts(2, exchange(by_batch=True), Draw(1))
    with pytest.raises(
        RuntimeError, match=r"nobody can go on: (.|\n)*send 0>1 has begun and waits(.|\n)*send 1>0 has begun and waits"
    ):
        hosts(2, exchange(by_batch=False), Draw(1))


def test_a_wait_holds_up_the_stream_and_not_the_host() -> None:
    reached: list[int] = []

    def one_sends_late(rank: int) -> None:
        if rank == 1:
            received = torch.empty(4, device=device(1))
            work = dist.irecv(received, 0)
            assert work is not None
            work.wait()
            doubled = received * 2
            reached.append(1)
            assert doubled.tolist() == [0.0] * 4
        else:
            dist.isend(value(0), 1)
            extension().wait_until(lambda: bool(reached), "a host waits for the other one's")

    hosts(2, one_sends_late, Draw(1))


def test_lengths_that_differ_are_refused() -> None:
    def unequal(rank: int) -> None:
        dist.send(value(0, 4), 1) if rank == 0 else dist.recv(value(1, 5), 0)
        torch.accelerator.synchronize()

    with pytest.raises(RuntimeError, match="16 bytes are sent and 20 received"):
        hosts(2, unequal, Draw(1))


def test_collectives_are_those_of_all_ranks_in_one_order() -> None:
    def all_of_them(rank: int) -> None:
        total, largest, first = value(rank), value(rank), value(rank)
        dist.all_reduce(total)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.broadcast(first, 2)
        assert (total.tolist(), largest.tolist(), first.tolist()) == ([3.0] * 4, [2.0] * 4, [2.0] * 4)

    for seed in SEEDS:
        hosts(3, all_of_them, Draw.of(seed))


def test_ranks_at_different_collectives_are_refused() -> None:
    def apart(rank: int) -> None:
        dist.all_reduce(value(rank)) if rank else dist.broadcast(value(rank), 0)
        torch.accelerator.synchronize()

    with pytest.raises(RuntimeError, match="rank 0 is at broadcast of 16 bytes and rank 1 at sum"):
        hosts(2, apart, Draw(1))


def test_an_aborted_group_lets_go_of_what_never_came() -> None:
    def alone(rank: int) -> None:
        if rank == 0:
            # The communicator is made with rank 1, which then sends nothing.
            work = dist.irecv(value(0), 1)
            assert work is not None
            work.wait()
            dist.distributed_c10d._get_default_group().abort()
            torch.accelerator.synchronize()
        else:
            dist.irecv(value(1), 0)

    hosts(2, alone, Draw(1))
