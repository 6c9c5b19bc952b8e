"""Shards of the output layer compared with the whole layer (autograd in 64 bit) and with Megatron's own loss."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from bpipe.runtime import shards
from bpipe.runtime.shards import (
    Rows,
    early_part,
    late_part,
    logits_gradient,
    losses,
    statistics,
    totals,
)

TOKENS, HIDDEN, VOCABULARY = 48, 32, 640


class Layer(NamedTuple):
    """`x` [n, h], `weight` [V, h], `labels` [n], `go` [n]: the gradient of every token's loss."""

    x: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    go: torch.Tensor


class Result(NamedTuple):
    losses: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor


def layer(dtype: torch.dtype, vocabulary: int = VOCABULARY, scale: float = 1.0) -> Layer:
    """A third of the tokens are masked. The logits span about ten."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = (0.4 * torch.randn(vocabulary, HIDDEN, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(vocabulary, (TOKENS,), generator=generator)
    counts = torch.rand(TOKENS, generator=generator) > 1 / 3
    return Layer(x, weight, labels, scale * counts / counts.sum())


def whole(inputs: Layer, dtype: torch.dtype = torch.float64) -> Result:
    """The whole layer, by autograd."""
    x, weight = (tensor.to(dtype).requires_grad_() for tensor in (inputs.x, inputs.weight))
    token_losses = torch.nn.functional.cross_entropy(x @ weight.t(), inputs.labels, reduction="none")
    (token_losses * inputs.go).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return Result(token_losses.detach(), x.grad, weight.grad)


def in_shards(inputs: Layer, num_shards: int, algorithm: int) -> Result:
    """Do what each rank would: compute its logits, gather all statistics, add its part to the sum."""
    rows = [Rows(len(inputs.weight), 1, num_shards).of(shard) for shard in range(num_shards)]
    weights = [inputs.weight[of.start : of.stop] for of in rows]
    logits = [inputs.x @ weight.t() for weight in weights]
    own = [statistics(y, inputs.labels, of.start) for y, of in zip(logits, rows, strict=True)]
    go = inputs.go.to(own[0].dtype)
    early = [early_part(*operands, go) for operands in zip(logits, weights, own, strict=True)] if algorithm == 2 else []
    sums = totals(torch.stack(own))
    gradients = [logits_gradient(y, inputs.labels, of.start, sums, go) for y, of in zip(logits, rows, strict=True)]
    if algorithm == 2:
        parts = [
            late_part(part, weight, inputs.labels, of.start, shard_sums, sums, go)
            for part, weight, of, shard_sums in zip(early, weights, rows, own, strict=True)
        ]
    else:
        parts = [gradient @ weight for gradient, weight in zip(gradients, weights, strict=True)]
    d_weight = torch.cat([gradient.t() @ inputs.x for gradient in gradients])
    d_x = torch.stack([part.to(own[0].dtype) for part in parts]).sum(0).to(inputs.x.dtype)
    return Result(losses(sums, inputs.labels, len(inputs.weight)), d_x, d_weight)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of the whole tensor."""
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_shards_make_what_one_layer_makes(num_shards: int, algorithm: int) -> None:
    """With almost no rounding, a term that is missing or counted twice cannot hide."""
    inputs = layer(torch.float64)
    for actual, expected in zip(in_shards(inputs, num_shards, algorithm), whole(inputs), strict=True):
        assert distance(actual, expected) < 2e-15


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_single_precision_loses_its_own_rounding_only(num_shards: int, algorithm: int) -> None:
    inputs = layer(torch.float32)
    actual, expected, single = in_shards(inputs, num_shards, algorithm), whole(inputs), whole(inputs, torch.float32)
    assert distance(actual.losses, expected.losses) < 9e-8
    for name in ("x", "weight"):
        error = distance(getattr(actual, name), getattr(expected, name))
        assert error < 3.5e-7
        assert error < 1.25 * distance(getattr(single, name), getattr(expected, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algorithm", [1, 2])
def test_half_precision_is_reduced_in_32_bit_so_its_error_does_not_grow_with_the_shards(
    algorithm: int, dtype: torch.dtype
) -> None:
    """`scale` is a loss scale: without it, gradients (1/32 per token, times a probability) underflow in fp16."""
    inputs = layer(dtype, scale=1024.0 if dtype == torch.float16 else 1.0)
    expected = whole(inputs)
    errors = []
    for num_shards in (1, 2, 4, 8):
        actual = in_shards(inputs, num_shards, algorithm)
        # The logits are rounded before the loss sees them.
        assert distance(actual.losses, expected.losses) < torch.finfo(dtype).eps
        assert distance(actual.weight, expected.weight) < 2 * torch.finfo(dtype).eps
        errors.append(distance(actual.x, expected.x))
    assert max(errors) < 2 * torch.finfo(dtype).eps
    assert errors[-1] < 1.25 * errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_shard_is_megatrons_loss_bit_for_bit(dtype: torch.dtype) -> None:
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as Stock

    inputs = layer(dtype)
    logits = inputs.x @ inputs.weight.t()
    wide, maximum = Stock.calculate_logits_max(logits.clone())
    mask, rows, label, total, exp = Stock.calculate_predicted_logits(wide, inputs.labels, maximum, 0, VOCABULARY)
    softmax, expected = Stock.calculate_cross_entropy_loss(exp, label, total)
    operands = Stock.prepare_gradient_calculation_operands(softmax, mask)
    gradient = Stock.calculate_gradients(operands[0], operands[1], rows, operands[2], operands[3], inputs.go)
    sums = totals(statistics(logits, inputs.labels, 0)[None])
    assert torch.equal(losses(sums, inputs.labels, VOCABULARY), expected)
    assert torch.equal(logits_gradient(logits, inputs.labels, 0, sums, inputs.go), gradient.to(dtype))


def test_a_label_that_is_no_row_counts_as_in_megatron() -> None:
    """Scripts mark ignored tokens this way and mask their losses, which must be finite all the same."""
    inputs = layer(torch.float64)
    labels = inputs.labels.clone()
    labels[0], labels[1] = -100, VOCABULARY
    actual = in_shards(inputs._replace(labels=labels, go=inputs.go.index_fill(0, torch.tensor([0, 1]), 0)), 4, 1)
    logits = inputs.x @ inputs.weight.t()
    spread = (logits.logsumexp(1) - logits.amax(1))[:2]
    assert torch.allclose(actual.losses[:2], spread, rtol=1e-14)
    assert actual.x[:2].abs().max() == 0


def test_everybody_makes_the_same_bits_of_what_all_gathered() -> None:
    """Large logits do not overflow either: the sum is relative to the maximum over all shards."""
    inputs = layer(torch.float32)
    logits = 40 * inputs.x @ inputs.weight.t()
    own = torch.stack(
        [statistics(logits[:, first : first + 80], inputs.labels, first) for first in range(0, VOCABULARY, 80)]
    )
    sums = totals(own)
    assert torch.isfinite(losses(sums, inputs.labels, VOCABULARY)).all()
    assert all(torch.equal(*pair) for pair in zip(sums, totals(own.clone()), strict=True))
    assert torch.equal(sums.maximum, logits.amax(1))


def test_a_few_tokens_at_a_time_are_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = layer(torch.bfloat16)
    at_once = in_shards(inputs, 2, 2)
    monkeypatch.setattr(shards, "_WIDE_AT_ONCE", 7 * VOCABULARY // 2)
    assert all(torch.equal(*pair) for pair in zip(in_shards(inputs, 2, 2), at_once, strict=True))


def test_gradients_take_the_place_of_the_logits() -> None:
    inputs = layer(torch.bfloat16)
    logits = inputs.x @ inputs.weight.t()
    sums = totals(statistics(logits, inputs.labels, 0)[None])
    gradient = logits_gradient(logits, inputs.labels, 0, sums, inputs.go)
    assert gradient.data_ptr() == logits.data_ptr()


def test_rows_that_pad_the_vocabulary_take_part_as_in_one_layer() -> None:
    """A vocabulary of 1000 rows is padded to 1024, so a shard may hold nothing but padding."""
    inputs = layer(torch.float64, vocabulary=1024)
    inputs.labels.clamp_(max=999)
    inputs.weight[1000:] = 0
    for actual, expected in zip(in_shards(inputs, 64, 2), whole(inputs), strict=True):
        assert distance(actual, expected) < 2e-15
