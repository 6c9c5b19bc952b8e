"""Which rows a shard holds."""

from __future__ import annotations

import pytest

from bpipe.runtime.vocabulary.rows import Rows


def test_a_pipeline_shares_out_what_its_tensor_rank_holds() -> None:
    rows = Rows(96, tensor=2, pipeline=3)
    assert [rows.of(rows.shard(1, rank)) for rank in range(3)] == [range(48, 64), range(64, 80), range(80, 96)]
    assert sorted(row for shard in range(rows.num_shards) for row in rows.of(shard)) == list(range(96))


def test_what_does_not_divide_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"50304 rows .* 14 equal shards, of 2 tensor- times 7 .* 896"):
        Rows(50304, 2, 7)
    # Megatron pads to that times the tensor-parallel size.
    assert Rows(29 * 2 * 896, 2, 7).each == 29 * 128
