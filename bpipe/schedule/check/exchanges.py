"""Match the messages that the ranks of a pipeline issue as NCCL does: by their order, not by what they are.

In: what each rank issues and waits for, in order. Out: messages that are taken for each other, and ranks that wait for
ever.

NCCL knows no tags: of the messages from one rank to another in one communicator the first that is sent is the first that
is received. What is issued together is one kernel. On a rank, a communicator's kernels run one after the other, and one
is over when the other ends of its messages have begun. Messages that torch batches are in one communicator of all ranks
of the pipeline; others are in one for each two ranks, with both directions. The first kernel makes a communicator, for
which a rank waits until all of its ranks have come. Source: `pointToPoint` in torch's ProcessGroupNCCL, 2.11 to 2.15.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Lines of an answer: what is wrong in one place is so in all ranks.
_MOST = 8


@dataclass(eq=False, slots=True)
class End:
    """One end of a message, with the rank at the other.

    Attributes:
        name: What is sent, or what the receiver takes it for; empty if nobody uses what is received.
    """

    sends: bool
    peer: int
    name: str = ""


@dataclass(eq=False, slots=True)
class Kernel:
    """Messages that a rank issues together."""

    communicator: tuple[str, tuple[int, ...]]
    """Its name and its ranks."""
    ends: Sequence[End]


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank goes on when a kernel is over."""

    kernel: Kernel


Loop = Sequence[Kernel | Wait]


def faults(loops: Sequence[Loop]) -> list[str]:
    """Return, a line each, messages that are taken for each other and, if there are none, ranks that wait for ever."""
    run = _Run(loops)
    return (run.crossed() or run.waiting())[:_MOST]


class _Run:
    def __init__(self, loops: Sequence[Loop]) -> None:
        self._loops = loops
        # By communicator, sender and receiver: both ends of each message, in order.
        self._channels: dict[tuple[object, int, int], tuple[list[End], list[End]]] = {}
        self._kernel_of: dict[End, tuple[int, Kernel]] = {}
        for rank, loop in enumerate(loops):
            for kernel in (item for item in loop if isinstance(item, Kernel)):
                for end in kernel.ends:
                    way = (rank, end.peer) if end.sends else (end.peer, rank)
                    sent, received = self._channels.setdefault((kernel.communicator, *way), ([], []))
                    (sent if end.sends else received).append(end)
                    self._kernel_of[end] = rank, kernel
        self._other = {
            end: other
            for ends in self._channels.values()
            for both in zip(*ends, strict=False)
            for end, other in (both, both[::-1])
        }
        self._place = [0] * len(loops)
        self._queues: dict[tuple[int, object], deque[Kernel]] = {}
        self._begun: set[Kernel] = set()
        self._over: set[Kernel] = set()
        self._come: dict[object, set[int]] = {}

    def crossed(self) -> list[str]:
        """Return which messages are taken for others."""
        return [
            f"rank {receiver} takes {sent.name} of rank {sender} for {taken.name}"
            for (_, sender, receiver), ends in self._channels.items()
            for sent, taken in zip(*ends, strict=False)
            if taken.name not in ("", sent.name)
        ]

    def waiting(self) -> list[str]:
        """Run all ranks as far as they come, and return who waits for whom."""
        again = deque(range(len(self._loops)))
        while again:
            rank = again.popleft()
            again += [other for other in self._go_on(rank) if other not in again]
        ranks = range(len(self._loops))
        return [self._blocked(rank) for rank in ranks if self._place[rank] < len(self._loops[rank]) or self._left(rank)]

    def _left(self, rank: int) -> list[Kernel]:
        """Return the kernels at the heads of a rank's queues."""
        return [queue[0] for (owner, _), queue in self._queues.items() if owner == rank and queue]

    def _go_on(self, rank: int) -> Iterator[int]:
        """Let a rank go on until it waits, and yield the ranks that may go on then."""
        loop = self._loops[rank]
        while self._place[rank] < len(loop):
            item = loop[self._place[rank]]
            if isinstance(item, Wait):
                if item.kernel not in self._over:
                    return
            else:
                ranks = item.communicator[1]
                come = self._come.setdefault(item.communicator, set())
                if rank not in come:
                    come.add(rank)
                    yield from ranks if len(come) == len(ranks) else ()
                if len(come) < len(ranks):
                    return
                queue = self._queues.setdefault((rank, item.communicator), deque())
                queue.append(item)
                if len(queue) == 1:
                    yield from self._begin(rank, item)
            self._place[rank] += 1

    def _begin(self, rank: int, kernel: Kernel) -> Iterator[int]:
        """Let a kernel run, and end those whose last end that is; yield their ranks."""
        self._begun.add(kernel)
        others = [self._kernel_of[self._other[end]] for end in kernel.ends if end in self._other]
        for owner, candidate in [(rank, kernel), *others]:
            if candidate in self._over or candidate not in self._begun or self._missing(candidate):
                continue
            self._over.add(candidate)
            yield owner
            queue = self._queues[owner, candidate.communicator]
            queue.popleft()
            if queue:
                yield from self._begin(owner, queue[0])

    def _missing(self, kernel: Kernel) -> End | None:
        """Return an end whose other end has not begun."""
        return next(
            (
                end
                for end in kernel.ends
                if end not in self._other or self._kernel_of[self._other[end]][1] not in self._begun
            ),
            None,
        )

    def _blocked(self, rank: int) -> str:
        """Return what a rank waits for that never comes."""
        loop, place = self._loops[rank], self._place[rank]
        item = loop[place] if place < len(loop) else Wait(self._left(rank)[0])
        if isinstance(item, Kernel):
            missing = sorted({*item.communicator[1]} - self._come[item.communicator])
            names = ", ".join(end.name for end in item.ends if end.name)
            return f"rank {rank} waits for ranks {missing} to make the communicator in which it passes {names}"
        # Kernels before it in its queue run first.
        kernel = self._queues[rank, item.kernel.communicator][0]
        end = self._missing(kernel)
        assert end is not None, "what has begun and misses nothing is over"
        name = end.name or "a message that it needs for nothing"
        if end.sends:
            return f"rank {rank} waits for rank {end.peer} to take {name}"
        return f"rank {rank} waits for rank {end.peer} to send {name}"
