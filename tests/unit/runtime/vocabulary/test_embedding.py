"""Shards of the embedding compared with one table, alone and tied to the output layer."""

from __future__ import annotations

import pytest
import torch

from bpipe.runtime.shards import Rows, embedded, rows_gradient
from tests.unit.runtime.vocabulary.test_output import VOCABULARY, distance, in_shards, layer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_the_sum_of_all_parts_is_the_table_bit_for_bit(num_shards: int, dtype: torch.dtype) -> None:
    inputs = layer(dtype)
    shards = [Rows(VOCABULARY, 1, num_shards).of(shard) for shard in range(num_shards)]
    parts = [embedded(inputs.weight[of.start : of.stop], inputs.labels, of.start) for of in shards]
    assert torch.equal(sum(parts[1:], parts[0]), inputs.weight[inputs.labels])


@pytest.mark.parametrize("num_shards", [1, 4])
def test_the_rows_gradients_are_the_tables(num_shards: int) -> None:
    inputs = layer(torch.float64)
    tokens, gradient = inputs.labels % 50, inputs.x  # some rows occur several times
    weight = inputs.weight.clone().requires_grad_()
    torch.nn.functional.embedding(tokens, weight).backward(gradient)
    shards = [Rows(VOCABULARY, 1, num_shards).of(shard) for shard in range(num_shards)]
    rows = torch.cat([rows_gradient(gradient, tokens, of.start, len(of)) for of in shards])
    assert weight.grad is not None
    assert distance(rows, weight.grad) < 2e-15


def test_half_precision_is_added_up_in_32_bit() -> None:
    """A thousand gradients of one row: in bf16, 1 + 1/256 rounds to 1, so each addition would be lost."""
    gradient = torch.full((1024, 4), 1 / 256, dtype=torch.bfloat16)
    gradient[0] = 1
    rows = rows_gradient(gradient, torch.zeros(1024, dtype=torch.long), 0, 2)
    assert torch.equal(rows, torch.tensor([[1 + 1023 / 256] * 4, [0.0] * 4]))


@pytest.mark.parametrize("algorithm", [1, 2])
def test_a_tied_shard_adds_what_both_layers_give_it(algorithm: int) -> None:
    inputs = layer(torch.float64)
    tokens = inputs.labels.roll(1)
    weight = inputs.weight.clone().requires_grad_()
    x = torch.nn.functional.embedding(tokens, weight)
    (torch.nn.functional.cross_entropy(x @ weight.t(), inputs.labels, reduction="none") * inputs.go).sum().backward()
    result = in_shards(inputs._replace(x=inputs.weight[tokens]), 4, algorithm)
    size = Rows(VOCABULARY, 1, 4).each
    shards = [
        result.weight[first : first + size] + rows_gradient(result.x, tokens, first, size)
        for first in range(0, VOCABULARY, size)
    ]
    assert weight.grad is not None
    assert distance(torch.cat(shards), weight.grad) < 2e-15


def test_a_pipeline_shares_out_what_its_tensor_rank_holds() -> None:
    rows = Rows(96, tensor=2, pipeline=3)
    assert [rows.of(rows.shard(1, rank)) for rank in range(3)] == [range(48, 64), range(64, 80), range(80, 96)]
    assert sorted(row for shard in range(rows.num_shards) for row in rows.of(shard)) == list(range(96))


def test_what_does_not_divide_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"50304 rows .* 14 equal shards, of 2 tensor- times 7 .* 896"):
        Rows(50304, 2, 7)
    # Megatron pads to a multiple of that divisor times the tensor-parallel size.
    assert Rows(29 * 2 * 896, 2, 7).each == 29 * 128
