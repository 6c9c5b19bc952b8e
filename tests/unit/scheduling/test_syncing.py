"""Gradients are reduced after a chunk's last backward, and parameters gathered before their chunk computes."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action
from bpipe.schedule.files.text import read_action
from megatron.scheduling.loop.grad_sync import Marks, Syncing


class Log(list[str]):
    """Logs the calls of the trainer's functions; `inside` has the chunks that are inside their `no_sync`."""

    def __init__(self, num_chunks: int) -> None:
        super().__init__()
        self.models = [torch.nn.Linear(1, 1) for _ in range(num_chunks)]
        self.inside: set[int] = set()

    def config(self, **functions: Any) -> Any:
        return SimpleNamespace(**{"no_sync_func": None, "grad_sync_func": None, "param_sync_func": None, **functions})

    @contextlib.contextmanager
    def no_sync(self, chunk: int = 0) -> Iterator[None]:
        assert chunk not in self.inside
        self.inside.add(chunk)
        yield
        self.inside.remove(chunk)

    def start(self, operation: str, chunk: int) -> Any:
        def started(parameters: Any) -> None:
            assert list(parameters) == list(self.models[chunk].parameters())
            self.append(f"{operation} {chunk}")

        return started


def walked(order: list[Action], chunks: dict[int, int], log: Log, config: Any) -> None:
    """Run an iteration; the log marks what runs outside its chunk's `no_sync`."""
    syncing, guarded = Syncing(Marks.of(order, chunks), config, log.models), config.no_sync_func is not None
    syncing.begin()
    for action in order:
        syncing.before(action)
        log.append(str(action) if chunks[action.stage] in log.inside or not guarded else f"{action} alone")
        syncing.after(action)
    syncing.end()
    assert not log.inside


def order_of(config: ScheduleConfig, rank: int) -> list[Action]:
    return [slot.compute for slot in build(config).ranks[rank] if slot.compute is not None]


def of_one_chunk(text: str, stage: int, aligned: bool) -> list[str]:
    log = Log(1)
    functions = {"no_sync_func": log.no_sync} | ({"grad_sync_func": log.start("reduce", 0)} if aligned else {})
    walked([read_action(word) for word in text.split()], {stage: 0}, log, log.config(**functions))
    return list(log)


HALVES, SHARDS = "0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0F1 0S0 0T0 0S1 0B0 0T1 0B1"


@pytest.mark.parametrize(
    ("stage", "text", "aligned", "alone"),
    [
        (0, "0F0 0F1 0B0 0F2 0B1 0B2", False, "0B2"),
        # Nothing that a reduction could overlap with follows the first stage's last backward.
        *((0, HALVES, aligned, "0I1 0W1") for aligned in (False, True)),
        # A shard's weight has gradients from T alone, the others from B alone.
        *((0, SHARDS, aligned, "0T1 0B1") for aligned in (False, True)),
        # After the first stage's last backward all ranks add their rows of the embedding.
        (2, "2IF0 2IF1 2F0 2S0 2B0 2IB0 2F1 2T0 2S1 2T1 2B1 2IB1", True, "2T1 2B1 2IB1"),
    ],
)
def test_a_chunk_reduces_in_the_last_that_gives_each_weight_a_gradient(
    stage: int, text: str, aligned: bool, alone: str
) -> None:
    expected = [f"{word} alone" if word in alone.split() else word for word in text.split()]
    assert of_one_chunk(text, stage, aligned) == expected


def test_chunks_reduce_each_in_its_own_last_backward() -> None:
    log = Log(2)
    order = order_of(ScheduleConfig("interleaved-1f1b", 2, 2, num_chunks=2), 1)
    walked(order, {1: 0, 3: 1}, log, log.config(no_sync_func=[lambda: log.no_sync(0), lambda: log.no_sync(1)]))
    assert [line for line in log if line.endswith(" alone")] == ["3B1 alone", "1B1 alone"]


def test_chunks_that_share_a_function_are_inside_of_it_again() -> None:
    log = Log(2)
    order = order_of(ScheduleConfig("interleaved-1f1b", 2, 2, num_chunks=2), 1)
    syncing = Syncing(Marks.of(order, {1: 0, 3: 1}), log.config(no_sync_func=log.no_sync), log.models)
    syncing.begin()
    outside = []
    for action in order:
        syncing.before(action)
        outside += [str(action)] if not log.inside else []
        syncing.after(action)
    syncing.end()
    assert outside == ["3B1", "1B1"]
    assert not log.inside


def test_a_shard_of_the_embedding_reads_its_chunks_weights_first() -> None:
    """It is in the rank's last chunk, whose stage computes later, so that chunk is gathered first."""
    texts = ["1IF0", "1IF1", "1F0", "1F1", "2F0", "1S0", "1T0", "2I0", "2W0", "1I0", "1W0", "1IB0"]
    log, order = Log(2), [read_action(text) for text in texts]
    functions = [log.start("gather", chunk) for chunk in range(2)]
    syncing = Syncing(Marks.of(order, {1: 0, 2: 1}), log.config(param_sync_func=functions), log.models)
    syncing.begin()
    assert log == ["gather 1", "gather 0"]
    for action in order:
        syncing.before(action)
        syncing.after(action)
    syncing.end()
    assert log == ["gather 1", "gather 0"]


def test_an_aligned_reduction_starts_after_the_last_of_a_later_stage() -> None:
    text = "1F0 1F1 1S0 1T0 1S1 1B0 1T1 1B1"
    assert of_one_chunk(text, 1, aligned=True) == [*text.split(), "reduce 0"]
    two, order = Log(1), [read_action(text) for text in ("0F0", "0B0")]
    syncing = Syncing(
        Marks.of(order, {0: 0}, num_pipes=2), two.config(grad_sync_func=two.start("reduce", 0)), two.models
    )
    syncing.begin()
    for action in order:
        syncing.before(action)
        syncing.after(action)
    syncing.end()
    assert two == ["reduce 0"]


def test_an_aligned_reduction_starts_after_the_last() -> None:
    log = Log(2)
    order = order_of(ScheduleConfig("interleaved-1f1b", 2, 2, num_chunks=2), 1)
    functions = {"no_sync_func": [lambda: log.no_sync(0), lambda: log.no_sync(1)]}
    walked(
        order,
        {1: 0, 3: 1},
        log,
        log.config(**functions, grad_sync_func=[log.start("reduce", chunk) for chunk in range(2)]),
    )
    assert not [line for line in log if line.endswith(" alone")]
    assert log[log.index("3B1") + 1] == "reduce 1"
    assert log[-2:] == ["1B1", "reduce 0"]


@pytest.mark.parametrize(
    ("num_chunks", "gathered"), [(1, []), (2, ["gather 0", "gather 1"]), (3, ["gather 0", "gather 1", "gather 2"])]
)
def test_parameters_are_gathered_a_chunk_ahead(num_chunks: int, gathered: list[str]) -> None:
    log = Log(num_chunks)
    schedule = ScheduleConfig("interleaved-1f1b" if num_chunks > 1 else "1f1b", 2, 2, num_chunks=num_chunks)
    chunks = {2 * chunk: chunk for chunk in range(num_chunks)}
    walked(
        order_of(schedule, 0),
        chunks,
        log,
        log.config(param_sync_func=[log.start("gather", chunk) for chunk in range(num_chunks)]),
    )
    assert [line for line in log if line.startswith("gather")] == gathered
    assert log[: len(gathered[:2])] == gathered[:2]
    if num_chunks == 3:
        assert log.index("gather 2") == next(place for place, line in enumerate(log) if line.startswith("2F0")) - 1
