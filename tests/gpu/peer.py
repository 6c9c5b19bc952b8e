"""`peer` between two processes on one device: bytes written to the other's memory and read back, and the engine on top.

Reports whether every byte and every gradient is right. Nothing is timed: two processes on one GPU take turns. Rank 0 is
the evictor and does all the copying. Rank 1 lends memory, inspects it at the end of the rounds, and then runs the
program of the last stage, which hosts. There are no middle stages: each process makes its own stage's inputs.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bpipe.transport.memory import BufferLayout
from bpipe.transport.one_sided import Peer, Transport
from bpipe.transport.streams import Streams, synchronize
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result, random_bytes, repeats
from tests.gpu.one_stage import TIMEOUT_S, KeptLender
from tests.gpu.pair import EVICTOR, Facts, Member, judge_engines, run_engine, run_pair
from tests.gpu.streams import MODES, late_lanes

POISON = 0xFF


@dataclass(frozen=True)
class Sizes:
    """Sizes of the rounds. `kinds` are lists of buffer lengths in bytes, some of them odd on purpose."""

    kinds: tuple[tuple[int, ...], ...]
    num_buffers: int
    rounds: int
    stages: int
    microbatches: int
    rows: int
    width: int
    iterations: int


SIZES = {
    FULL: Sizes(
        ((24 << 20, 1, 65537), (513, 4096, 7), ((1 << 20) + 3,), (3 << 20, 3 << 20)), 3, 400, 4, 8, 1024, 1024, 200
    ),
    MODERATE: Sizes(((4 << 20, 1), (513, 4096, 7), ((1 << 20) + 3,)), 3, 60, 4, 8, 512, 512, 20),
    SMALL: Sizes(((4096, 1), (513, 7), (65537,)), 2, 12, 4, 8, 16, 16, 4),
}


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    result = Result(ok=True)
    evictor, lender = run_pair(_part, on, "peer", sizes, until)
    result.check("transport chosen for the pair", evictor["transport"] == "peer", evictor["transport"])
    rounds = evictor["rounds"]
    result.check(
        "put and get",
        rounds["wrong"] == 0,
        f"{rounds['wrong']} of {rounds['count']} rounds differ, {sizes.num_buffers} buffers reused",
    )
    result.check(
        "contents of the lender's memory",
        lender["wrong"] == 0,
        f"{lender['wrong']} of {sizes.num_buffers} buffers differ, seen by its owner",
    )
    judge_engines(evictor["engine"], lender["engine"], sizes, result)
    result.facts = {"evictor": evictor, "lender": lender}
    return result


def _part(member: Member, sizes: Sizes, until: float) -> Facts:
    # One after the other, each with its share of the time.
    begin = time.monotonic()
    facts = _rounds(member, sizes, begin + (until - begin) / 3)
    # The two need not stop together, because the evictor does all the copies.
    rounds = repeats(sizes.iterations, until, least=len(MODES))
    return {**facts, "engine": run_engine(member, member.connection.transport(), sizes, rounds)}


# -- rounds
# ----------------------------------------------------------------------------------------------------------------------


def _content(number: int, lengths: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """Return the tensors of a round, with the same numbers in both processes."""
    return [random_bytes(length, device, number) for length in lengths]


def _rounds(member: Member, sizes: Sizes, until: float) -> Facts:
    """Put and get hundreds of times; at the end the lender checks the contents of every host buffer."""
    on, device = member.on, member.on.device
    lender = KeptLender(device)
    lanes = late_lanes(on, TIMEOUT_S)
    transport = Peer(member.connection.control, lender, *lanes)
    lengths = dict(enumerate(sizes.kinds))
    layout = BufferLayout.of([range(len(sizes.kinds))] * sizes.num_buffers, lengths)
    facts: Facts = {}
    if member.rank == EVICTOR:
        transport.reach(layout)
        transport.announce(lengths).wait()
        ring = _Ring(on, transport, sizes)
        for _ in repeats(sizes.rounds, until, least=2 * sizes.num_buffers):
            ring.turn()
        facts["rounds"] = ring.end()
        synchronize(device)
        dist.barrier()
    else:
        transport.learn()
        transport.lend(layout.nbytes)
        dist.barrier()
        wrong = 0
        for number in range(sizes.num_buffers):
            expected = _content(_last_number(number), sizes.kinds[0], device)
            seen = [torch.zeros_like(tensor) for tensor in expected]
            piece, offsets = layout.place(number, sizes.kinds[0])
            lender.regions[piece].read(zip(offsets, seen, strict=True))
            wrong += not all(map(torch.equal, seen, expected))
        facts["wrong"] = wrong
    dist.barrier()
    transport.release()
    for lane in lanes:
        lane.close()
    return facts


def _last_number(buffer: int) -> int:
    return 1_000_000 + buffer


class _Ring:
    """Host buffers in turn: each content is read back and compared just before its buffer is reused."""

    def __init__(self, on: Accelerator, transport: Transport, sizes: Sizes) -> None:
        self._on, self._device = on, on.device
        self._transport = transport
        self._streams = Streams(on.device)
        self._sizes = sizes
        self._number = 0
        self._holding: dict[int, tuple[int, tuple[int, ...]]] = {}
        # Counted on the device, so that nothing in a round waits for the host.
        self._wrong = torch.zeros((), dtype=torch.int64, device=on.device)
        self._compared = 0

    def turn(self) -> None:
        buffer = self._number % self._sizes.num_buffers
        if buffer in self._holding:
            self._take(buffer)
        self._on.come_late(*MODES[self._number % len(MODES)], self._number)
        self._put(buffer, self._number, self._sizes.kinds[self._number % len(self._sizes.kinds)])
        self._number += 1

    def _put(self, buffer: int, number: int, lengths: tuple[int, ...]) -> None:
        tensors = [torch.full((length,), POISON, dtype=torch.uint8, device=self._device) for length in lengths]
        self._on.before_forward()
        for tensor, content in zip(tensors, _content(number, lengths, self._device), strict=True):
            tensor.copy_(content)
        with self._streams.outbound():
            pending = self._transport.put(buffer, tensors)
        pending.wait()
        for tensor in tensors:
            tensor.fill_(POISON)
        self._holding[buffer] = number, lengths

    def _take(self, buffer: int) -> None:
        number, lengths = self._holding.pop(buffer)
        tensors = [torch.full((length,), POISON, dtype=torch.uint8, device=self._device) for length in lengths]
        with self._streams.inbound():
            pending = self._transport.get(buffer, tensors)
        pending.wait()
        expected = _content(number, lengths, self._device)
        differing = [(tensor != content).any() for tensor, content in zip(tensors, expected, strict=True)]
        self._wrong += torch.stack(differing).any()
        self._compared += 1

    def end(self) -> dict[str, int]:
        """Compare what is still in the buffers, leave the last content in each, and return the results."""
        for buffer in sorted(self._holding):
            self._take(buffer)
        self._on.come_late(False, False, 0)
        for buffer in range(self._sizes.num_buffers):
            self._put(buffer, _last_number(buffer), self._sizes.kinds[0])
        return {"count": self._compared, "wrong": int(self._wrong)}
