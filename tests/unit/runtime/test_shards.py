"""Shards of the output layer in our own loop compute what the layer in one piece does, in any schedule."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.shards import InputShard, OutputShard, embedded, rows_gradient
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.lowering.forward_only import forwards_only
from tests.unit.runtime.pipeline import ROWS, WIDTH
from tests.unit.runtime.sharded import VOCABULARY, ShardedModel, in_one_piece, in_shards

SPLIT = (Vocabulary.ONE, Vocabulary.TWO, Vocabulary.INTERLACED)


def schedule(p: int, m: int, vocabulary: Vocabulary) -> ScheduleConfig:
    return ScheduleConfig("1f1b", p, m, vocabulary=vocabulary)


@pytest.mark.parametrize("vocabulary", SPLIT)
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (3, 2), (4, 1), (4, 9)])
def test_shards_compute_what_the_layer_in_one_piece_does(p: int, m: int, vocabulary: Vocabulary) -> None:
    actual, expected = in_shards(build(schedule(p, m, vocabulary))), in_one_piece(p, p, m)
    assert actual.losses.keys() == expected.losses.keys() == set(range(m))
    for microbatch, losses in expected.losses.items():
        torch.testing.assert_close(actual.losses[microbatch], losses, rtol=1e-12, atol=1e-13)
        assert torch.equal(actual.largest[microbatch], expected.largest[microbatch])
    assert any(largest.any() for largest in actual.largest.values()) or m < 4
    for gradient, reference in zip(actual.gradients(shards=True), expected.gradients(shards=False), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("vocabulary", [Vocabulary.ONE, Vocabulary.TWO])
def test_balancing_changes_no_bit(vocabulary: Vocabulary) -> None:
    plain = build(schedule(4, 8, vocabulary))
    moved = balance(plain)
    assert moved.hosts is not None
    pairs = zip(in_shards(plain).gradients(shards=True), in_shards(moved).gradients(shards=True), strict=True)
    assert all(torch.equal(before, after) for before, after in pairs)


def test_nothing_of_an_iteration_that_broke_off_is_left() -> None:
    shard = OutputShard(lambda x: x, 0, 3)
    received = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), torch.ones(2)
    shard.forward(Action(0, Kind.SHARD_FORWARD, 0), received)
    shard.begin()
    with pytest.raises(KeyError):
        shard.backward(Action(0, Kind.SHARD_BACKWARD, 0), (torch.zeros(1, 3, 2),))


@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 4), (4, 8)])
def test_evaluation_computes_losses_and_nothing_else(p: int, m: int) -> None:
    plan = forwards_only(build(schedule(p, m, Vocabulary.ONE)).layout, m)
    with torch.no_grad():
        actual = in_shards(plan)
    expected = in_one_piece(p, p, m)
    for microbatch, losses in expected.losses.items():
        torch.testing.assert_close(actual.losses[microbatch], losses, rtol=1e-12, atol=1e-13)
    assert actual.weights[0].grad is None


@pytest.mark.parametrize("vocabulary", [Vocabulary.ONE, Vocabulary.TWO])
def test_what_a_shard_holds_is_listed_and_gone_after_t(vocabulary: Vocabulary) -> None:
    """Logits, input, labels and token gradients; with algorithm 2 also statistics and part of the gradient."""
    shard = ShardedModel(1, 1).shard(0, vocabulary)
    received = (
        torch.randn(ROWS, WIDTH, dtype=torch.float64),
        torch.zeros(ROWS, dtype=torch.long),
        torch.ones(ROWS, dtype=torch.float64),
    )
    (own,) = shard.forward(Action(0, Kind.SHARD_FORWARD, 3), received)
    storages = shard.storages(3)
    early = (3 + WIDTH) * ROWS * 8 if vocabulary is Vocabulary.TWO else 0
    assert sum(storage.nbytes() for storage in storages) == (VOCABULARY + WIDTH + 2) * ROWS * 8 + early
    logits = StorageWeakRef(storages[1])
    assert storages[1].nbytes() == VOCABULARY * ROWS * 8
    del storages
    shard.backward(Action(0, Kind.SHARD_BACKWARD, 3), (own[None],))
    assert logits.expired()
    with pytest.raises(KeyError):
        shard.storages(3)


class _Rows(torch.nn.Embedding):
    """Rows 4 to 7 of a table of 12."""

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        return embedded(self.weight, tokens.flatten(), 4).view(*tokens.shape, -1)

    def add_gradient(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        torch.autograd.backward(
            self.weight, rows_gradient(gradient.flatten(0, 1), tokens.flatten(), 4, len(self.weight))
        )


def test_a_shard_of_the_embedding_looks_up_its_own_tokens() -> None:
    tokens = [torch.tensor([[1, 4, 11, 4]]), torch.tensor([[7, 8, 0, 3]])]
    rows, whole = _Rows(4, 3), torch.nn.Embedding(12, 3)
    with torch.no_grad():
        whole.weight[4:8] = rows.weight
    shard = InputShard(rows)
    shard.begin(tokens)
    for microbatch, of_all in enumerate(tokens):
        (part,) = shard.forward(Action(1, Kind.INPUT_FORWARD, microbatch), ())
        is_own = (of_all >= 4) & (of_all < 8)
        assert torch.equal(part, whole(of_all).where(is_own[..., None], 0))
        gradient = torch.randn(1, 4, 3)
        whole(of_all).backward(gradient)
        assert shard.backward(Action(1, Kind.INPUT_BACKWARD, microbatch), (gradient,)) == ()
    assert whole.weight.grad is not None
    assert torch.equal(rows.weight.grad, whole.weight.grad[4:8])  # type: ignore[arg-type]
