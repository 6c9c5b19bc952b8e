"""The embedding, shard by shard.

    IF   `embedded`: rows of the shard, zeros for other tokens: the sum of all parts is that of one table, bit for bit
    IB   `rows_gradient`: the gradients of the shard's tokens, added up by row

Shapes: n tokens, r rows of the shard, h hidden.
"""

import torch

from bpipe.runtime.vocabulary.output import rows_of


@torch.no_grad()
def embedded(weight: torch.Tensor, tokens: torch.Tensor, first_row: int) -> torch.Tensor:
    """Return embeddings [n, h], of the weight's type."""
    rows, inside = rows_of(tokens, first_row, len(weight))
    return weight[rows].where(inside[:, None], 0)


@torch.no_grad()
def rows_gradient(gradient: torch.Tensor, tokens: torch.Tensor, first_row: int, num_rows: int) -> torch.Tensor:
    """Return the rows' gradient [r, h] in 32 bit at least, from the embeddings' gradient [n, h]."""
    rows, inside = rows_of(tokens, first_row, num_rows)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    total = torch.zeros(num_rows, gradient.shape[1], dtype=wide, device=gradient.device)
    return total.index_add_(0, rows[inside], gradient[inside].to(wide))
