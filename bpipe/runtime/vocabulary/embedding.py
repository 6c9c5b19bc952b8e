"""Look tokens up shard by shard.

In: a shard's rows of the embedding, tokens. Out: its part of the embeddings, its rows' gradient.

    IF   `embedded`: a token's row where it is the shard's, else zeros: the sum of all parts is what one table would give, bit for bit
    IB   `rows_gradient`: what the tokens of the shard's rows have for a gradient, added up a row

Shapes: n tokens, r rows of the shard, h hidden. Knows no group, no layer, no order.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def embedded(weight: torch.Tensor, tokens: torch.Tensor, first_row: int) -> torch.Tensor:
    """Return embeddings [n, h], of the weight's type."""
    rows = tokens - first_row
    mine = (rows >= 0) & (rows < len(weight))
    return weight[rows.where(mine, 0)].where(mine[:, None], 0)


@torch.no_grad()
def rows_gradient(gradient: torch.Tensor, tokens: torch.Tensor, first_row: int, num_rows: int) -> torch.Tensor:
    """Return the rows' gradient [r, h], 32 bit at least, from the embeddings' gradient [n, h]."""
    rows = tokens - first_row
    mine = (rows >= 0) & (rows < num_rows)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    found = torch.zeros(num_rows, gradient.shape[1], dtype=wide, device=gradient.device)
    return found.index_add_(0, rows[mine], gradient[mine].to(wide))
