"""One rank of a shard of logits: its log-probabilities and entropies against those of the whole, which it draws too.

In: `RANK` and where the others are. Out: exit code 0 where values, gradients of its logits and, summed over ranks, of
the layer's input are those of the whole.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from bpipe.runtime.vocabulary.log_probs import vocabulary_parallel_log_probs
from bpipe.transport.distributed import gather_into

TOKENS, HIDDEN, ROWS = 32, 16, 96


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    made = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(count, HIDDEN, generator=made) for count in (TOKENS, ROWS))
    labels, each = torch.randint(ROWS, (TOKENS,), generator=made), ROWS // world

    def gather(own: torch.Tensor) -> torch.Tensor:
        every = torch.empty(world * len(own), own.shape[1], dtype=own.dtype)
        gather_into(every, own)
        return every.view(world, *own.shape)

    mine, first = x.clone().requires_grad_(), rank * each
    own_weight = weight[first : first + each].clone().requires_grad_()
    found = vocabulary_parallel_log_probs(mine @ own_weight.t(), labels, first, gather)
    (found.log_probs + 0.1 * found.entropy).sum().backward()
    dist.all_reduce(mine.grad)

    whole_x, whole_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs = (whole_x @ whole_weight.t()).log_softmax(-1)
    expected = log_probs.gather(1, labels[:, None]).squeeze(1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    (expected + 0.1 * entropy).sum().backward()
    assert whole_weight.grad is not None
    for one, other in (
        (found.log_probs, expected),
        (found.entropy, entropy),
        (mine.grad, whole_x.grad),
        (own_weight.grad, whole_weight.grad[first : first + each]),
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
