"""Messages meet by their order in a communicator: crossed messages and waiting ranks are named, by hand for small loops."""

from __future__ import annotations

from bpipe.schedule.check.exchanges import End, Kernel, Loop, Wait, faults


def kernel(ranks: tuple[int, ...], *ends: tuple[str, int, str]) -> Kernel:
    return Kernel(("pairs", ranks), [End(kind == "send", peer, name) for kind, peer, name in ends])


def waited(*kernels: Kernel) -> Loop:
    return [item for kernel in kernels for item in (kernel, Wait(kernel))]


def test_a_message_passes_when_both_ends_have_begun() -> None:
    send, receive = kernel((0, 1), ("send", 1, "0F0")), kernel((0, 1), ("receive", 0, "0F0"))
    assert faults([waited(send), waited(receive)]) == []
    assert faults([waited(send), []]) == [
        "rank 0 waits for ranks [1] to make the communicator in which it passes 0F0",
    ]


def test_messages_of_one_way_are_taken_in_order() -> None:
    both = kernel((0, 1), ("send", 1, "0F1"), ("send", 1, "2B0"))
    taken = kernel((0, 1), ("receive", 0, "2B0"), ("receive", 0, "0F1"))
    assert faults([waited(both), waited(taken)]) == [
        "rank 1 takes 0F1 of rank 0 for 2B0",
        "rank 1 takes 2B0 of rank 0 for 0F1",
    ]
    # A message that nobody uses.
    unused = kernel((0, 1), ("receive", 0, "0F1"), ("receive", 0, ""))
    assert faults([waited(both), waited(unused)]) == []


def test_two_directions_in_one_communicator_share_a_queue() -> None:
    """Messages issued together have no order among themselves."""
    send, receive = ("send", 1, "0F0"), ("receive", 1, "1B0")
    backward, forward = ("send", 0, "1B0"), ("receive", 0, "0F0")
    first, second = (
        [kernel((0, 1), part) for part in (send, receive)],
        [kernel((0, 1), part) for part in (backward, forward)],
    )
    waits = [Wait(first[1])], [Wait(second[1])]
    assert faults([[*first, *waits[0]], [*second, *waits[1]]]) == [
        "rank 0 waits for rank 1 to take 0F0",
        "rank 1 waits for rank 0 to take 1B0",
    ]
    assert faults([[*first, *waits[0]], [*reversed(second), *waits[1]]]) == []
    assert faults([waited(kernel((0, 1), send, receive)), waited(kernel((0, 1), backward, forward))]) == []


def test_communicators_of_pairs_that_are_made_in_different_orders_are_never_made() -> None:
    """Three ranks in a ring, each of which begins with the next one."""
    pairs = [(0, 1), (1, 2), (0, 2)]

    def loop(rank: int, *, receives_first: bool) -> Loop:
        after, before = (rank + 1) % 3, (rank - 1) % 3
        send = kernel(pairs[rank], ("send", after, f"{rank}F0"))
        receive = kernel(pairs[before], ("receive", before, f"{before}F0"))
        return [receive, send, Wait(send), Wait(receive)] if receives_first else [send, receive, Wait(receive)]

    assert faults([loop(rank, receives_first=False) for rank in range(3)]) == [
        "rank 0 waits for ranks [1] to make the communicator in which it passes 0F0",
        "rank 1 waits for ranks [2] to make the communicator in which it passes 1F0",
        "rank 2 waits for ranks [0] to make the communicator in which it passes 2F0",
    ]
    assert faults([loop(rank, receives_first=rank == 1) for rank in range(3)]) == []


def test_what_nobody_waits_for_must_end_too() -> None:
    send, late = kernel((0, 1), ("send", 1, "0F0")), kernel((0, 1), ("send", 1, "0F1"))
    assert faults([[send, late], waited(kernel((0, 1), ("receive", 0, "0F0")))]) == [
        "rank 0 waits for rank 1 to take 0F1"
    ]
