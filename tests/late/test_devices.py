"""The late device itself has the guarantees of CUDA, and no others."""

import gc

import pytest
import torch

from bpipe.transport.streams import current
from tests.late.devices import AS_LATE, COPIES_LAST, NUM_DEVICES, Draw, begin, device, extension

LATE = device()
MIB = 1 << 20


def drawn(draw: Draw | None = None, **named: int) -> None:
    # Garbage of other tests still counts as allocated.
    gc.collect()
    begin(draw or Draw(1), **named)


def numbers(count: int = 1000) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


def test_operations_come_out_as_on_a_cpu() -> None:
    drawn()
    x, weight = numbers(64).view(8, 8) / 64, torch.linspace(-1, 1, 64).view(8, 8)

    def losses(on: torch.device) -> list[torch.Tensor]:
        leaf = torch.nn.Parameter(weight.to(on))
        optimizer = torch.optim.Adam([leaf], 0.1)
        values = []
        for _ in range(3):
            loss = torch.nn.functional.gelu(x.to(on) @ leaf).softmax(-1).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values.append(loss.detach().cpu())
        return [*values, leaf.detach().cpu()]

    assert all(map(torch.equal, losses(LATE), losses(torch.device("cpu"))))
    assert "forced" not in extension().counts()


def test_nothing_is_done_before_somebody_waits() -> None:
    drawn(Draw(1, AS_LATE))
    copy = numbers().to(LATE)
    event = torch.Event(LATE)
    event.record()
    assert extension().standing(), "it is in progress"
    event.synchronize()
    assert copy[5].item() == 5.0


def orders_of_two_streams(ordered: bool) -> set[float]:
    """Return what a reader on one stream saw of a writer on another, over many seeds."""
    seen = set()
    for seed in range(20):
        drawn(Draw(seed))
        value = torch.zeros(1, device=LATE)
        torch.accelerator.synchronize()
        side = torch.Stream(LATE)
        value.add_(1)
        if ordered:
            side.wait_event(torch.accelerator.current_stream().record_event())
        with current(side):
            copy = value.clone()
        torch.accelerator.synchronize()
        seen.add(copy.item())
    return seen


def test_streams_run_in_any_order_but_for_their_events() -> None:
    assert orders_of_two_streams(ordered=False) == {0.0, 1.0}
    assert orders_of_two_streams(ordered=True) == {1.0}


def test_memory_that_was_freed_is_given_out_again_at_once_on_its_own_stream_only() -> None:
    drawn()
    first = torch.empty(5 * MIB, dtype=torch.uint8, device=LATE)
    address = first.data_ptr()
    side = torch.Stream(LATE)
    del first
    with current(side):
        elsewhere = torch.empty(5 * MIB, dtype=torch.uint8, device=LATE)
    assert elsewhere.data_ptr() != address
    assert torch.empty(5 * MIB, dtype=torch.uint8, device=LATE).data_ptr() == address


def test_record_stream_keeps_memory_until_that_stream_is_done() -> None:
    drawn(Draw(1, AS_LATE))
    first = torch.zeros(5 * MIB, dtype=torch.uint8, device=LATE)
    address = first.data_ptr()
    side = torch.Stream(LATE)
    side.wait_event(torch.accelerator.current_stream().record_event())
    with current(side):
        copy = first.clone()
    first.record_stream(side)
    del first
    assert torch.empty(5 * MIB, dtype=torch.uint8, device=LATE).data_ptr() != address
    side.synchronize()
    assert torch.empty(5 * MIB, dtype=torch.uint8, device=LATE).data_ptr() == address
    assert not copy.any()


def test_blocks_are_split_and_merged_as_by_torch_for_cuda() -> None:
    """What is smaller than 10 MiB gets a part of a 20 MiB segment; empty_cache returns whole segments."""
    drawn()
    parts = [torch.empty(5 * MIB, dtype=torch.uint8, device=LATE) for _ in range(4)]
    assert (torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()) == (20 * MIB, 20 * MIB)
    del parts[1]
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == 20 * MIB, "other parts are in use"
    parts.clear()
    whole = torch.empty(20 * MIB, dtype=torch.uint8, device=LATE)
    assert torch.accelerator.memory_reserved() == 20 * MIB, "the parts are merged"
    del whole
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == 0
    assert torch.accelerator.max_memory_reserved() == 20 * MIB


def test_a_fresh_segment_waits_for_the_device_as_cudamalloc_does() -> None:
    for synchronizes in (False, True):
        drawn(Draw(1, allocation_synchronizes=synchronizes))
        torch.zeros(10, device=LATE)
        assert extension().standing(), "what fits into a segment waits for nothing"
        big = torch.empty(30 * MIB, dtype=torch.uint8, device=LATE)
        assert bool(extension().standing()) is not synchronizes
        del big


def test_a_full_device_gives_back_what_is_cached_and_then_says_so() -> None:
    drawn(capacity=64 * MIB)
    first = torch.empty(40 * MIB, dtype=torch.uint8, device=LATE)
    del first
    second = torch.empty(50 * MIB, dtype=torch.uint8, device=LATE)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(20 * MIB, dtype=torch.uint8, device=LATE)
    del second


def test_one_hardware_queue_holds_up_what_is_behind_its_head() -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1: a waiting stream at the queue's head delays another one that need not wait."""
    for connections, over in ((0, True), (1, False)):
        drawn(Draw(1, connections=connections))
        waits, free, slow = (torch.Stream(LATE) for _ in range(3))
        late = extension()
        late.work(0, slow.stream_id, 5.0)
        waits.wait_event(slow.record_event())
        late.hold(0, slow.stream_id)
        waits.wait_event(slow.record_event())
        late.work(0, free.stream_id, 1.0)
        event = free.record_event()
        for _ in range(20):
            event.query()
        assert event.query() is over
        late.let_go(0)
        torch.accelerator.synchronize()


def test_events_tell_the_time_of_the_device() -> None:
    drawn()
    stream = torch.Stream(LATE)
    start, end = (torch.Event(LATE, enable_timing=True) for _ in range(2))
    start.record(stream)
    extension().work(0, stream.stream_id, 500.0)
    end.record(stream)
    end.synchronize()
    assert start.elapsed_time(end) == 0.5


def test_several_devices_have_streams_and_memory_of_their_own() -> None:
    drawn()
    first, second = numbers().to(device(1)), torch.zeros(1000, device=device(2))
    second.copy_(first)
    assert torch.equal(second.cpu(), numbers())
    assert [torch.accelerator.memory_allocated(index) for index in range(3)] == [0, 4096, 4096]
    with pytest.raises(RuntimeError, match=f"no device {NUM_DEVICES}"):
        torch.zeros(1, device=device(NUM_DEVICES))


def test_a_copy_to_the_host_and_a_number_wait_for_their_stream() -> None:
    drawn(Draw(1, COPIES_LAST))
    value = numbers().to(LATE).square().sum()
    assert value.item() == value.cpu() == numbers().square().sum()


def test_a_draw_repeats() -> None:
    def run() -> list[float]:
        values = []
        for seed in range(5):
            drawn(Draw(seed))
            value, sides = torch.zeros(1, device=LATE), [torch.Stream(LATE) for _ in range(3)]
            for number, side in enumerate(sides):
                with current(side):
                    value.mul_(2).add_(number)
            torch.accelerator.synchronize()
            values.append(value.item())
        return values

    assert run() == run()
    assert len(set(run())) > 1


def test_a_tensor_without_memory_is_refused() -> None:
    drawn()
    value = numbers().to(LATE)
    value.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="whose storage is empty"):
        value.add_(1)


def test_who_waits_for_whom_is_said_where_nobody_can_go_on() -> None:
    drawn()
    stopped, waiting = torch.Stream(LATE), torch.Stream(LATE)
    extension().hold(0, stopped.stream_id)
    waiting.wait_event(stopped.record_event())
    with pytest.raises(
        RuntimeError, match=r"nobody can go on: .*\n.*stream 1: a kernel that is held .*\n.*stream 2: wait for event"
    ):
        waiting.synchronize()
    extension().let_go(0)
