"""Log-probabilities and entropies of logits in shards against torch's of the whole, values and gradients."""

from __future__ import annotations

import pytest
import torch

from bpipe.runtime.vocabulary.log_probs import vocabulary_parallel_log_probs
from bpipe.runtime.vocabulary.output import statistics

TOKENS, ROWS = 24, 96


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits over about ten, labels, and the gradients of both results."""
    made = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(TOKENS, ROWS, generator=made, dtype=torch.float64)
    labels = torch.randint(ROWS, (TOKENS,), generator=made)
    return (logits.to(dtype), labels, *torch.randn(2, TOKENS, generator=made, dtype=torch.float64))


def whole(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(1, labels[:, None]).squeeze(1), -(log_probs.exp() * log_probs).sum(-1)


def of_shard(logits: torch.Tensor, labels: torch.Tensor, first_row: int) -> torch.Tensor:
    """What a rank gives the others, slowly."""
    own = statistics(logits, labels, first_row)
    wide = logits.to(own.dtype)
    weighed = ((wide - own[0][:, None]).exp() * wide).where(wide > -torch.inf, 0.0)
    return torch.cat((own, weighed.sum(1)[None]))


def in_shards(
    logits: torch.Tensor,
    labels: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor],
    number: int,
    temperature: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Every rank's results, and the gradients of all logits."""
    each = ROWS // number
    parts = [part.clone().requires_grad_() for part in logits.split(each, 1)]
    every = torch.stack([of_shard(part.detach() / temperature, labels, each * n) for n, part in enumerate(parts)])
    log_probs, entropies = [], []
    for n, part in enumerate(parts):
        given: list[torch.Tensor] = []

        def gather(own: torch.Tensor, given: list[torch.Tensor] = given) -> torch.Tensor:
            given.append(own)
            return every

        found = vocabulary_parallel_log_probs(part, labels, each * n, gather, temperature)
        torch.testing.assert_close(given, [every[n]], rtol=1e-6, atol=1e-6)
        (found.log_probs * gradients[0] + found.entropy * gradients[1]).sum().backward()
        log_probs.append(found.log_probs.detach())
        entropies.append(found.entropy.detach())
    return log_probs, entropies, torch.cat([part.grad for part in parts if part.grad is not None], 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
)
def test_shards_have_the_values_and_gradients_of_the_whole(
    dtype: torch.dtype, tolerance: float, number: int, temperature: float
) -> None:
    logits, labels, *gradients = drawn(dtype)
    # A row that never comes, as padded ones: the whole is computed without it.
    labels[labels == ROWS - 1] = 6
    reference = logits[:, : ROWS - 1].double().clone().requires_grad_()
    expected = whole(reference, labels, temperature)
    sum(((one * go).sum() for one, go in zip(expected, gradients, strict=True)), torch.zeros(())).backward()
    logits[:, ROWS - 1] = -torch.inf
    log_probs, entropies, grad = in_shards(logits, labels, (gradients[0], gradients[1]), number, temperature)
    for mine in log_probs:
        torch.testing.assert_close(mine.double(), expected[0].detach(), rtol=tolerance, atol=10 * tolerance)
        assert torch.equal(mine, log_probs[0]), "every rank has the same"
    for mine in entropies:
        torch.testing.assert_close(mine.double(), expected[1].detach(), rtol=tolerance, atol=10 * tolerance)
        assert torch.equal(mine, entropies[0])
    assert reference.grad is not None
    assert not grad[:, -1].any()
    torch.testing.assert_close(grad[:, :-1].double(), reference.grad, rtol=10 * tolerance, atol=2 * tolerance)
    assert grad.dtype is dtype


def test_a_temperature_of_nothing_is_refused() -> None:
    logits, labels, *_ = drawn(torch.float32)
    with pytest.raises(ValueError, match="temperature 0 must be above 0"):
        vocabulary_parallel_log_probs(logits, labels, 0, lambda own: own[None], 0.0)
