"""What leaves is found again where another micro-batch saved it, just as a look at everything finds it, or not at
all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bpipe.runtime.capture import find
from bpipe.runtime.retrace import Retrace
from tests.unit.runtime.test_capture import CPU, Stashing, Twice

Stage = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
# Held by Python code all the time, as weights and a cached mask are.
WEIGHT, MASK = torch.nn.Parameter(torch.randn(8, 8)), torch.rand(4, 8)


def stage(x: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
    """A micro-batch with everything that is told apart: inputs, outputs of their own node, views and what they are
    views of, lists."""
    hidden = torch.relu(x @ WEIGHT) * MASK
    held.append(hidden)
    first, second = torch.exp(hidden).split(4, -1)
    return Twice.apply(torch.cat([first * second, torch.softmax(second, -1)], -1)) * Stashing.apply(hidden)


def forward(of: Stage = stage) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the stage's output, what it received, and what somebody still holds: nothing, once the list is cleared."""
    received, held = torch.randn(4, 8, requires_grad=True), []
    return of(received, held), received, held


def recorded(of: Stage = stage) -> Retrace | None:
    output, received, held = forward(of)
    held.clear()
    leaving = [item.storage for item in find([output.grad_fn], [received], CPU) if item.alone]
    assert leaving
    return Retrace.of([output.grad_fn], leaving)


def test_what_somebody_holds_is_not_found() -> None:
    """By the very tensor that was saved [2], and by a view of it [1]; then everything is looked at."""
    retrace = recorded()
    assert retrace is not None
    output, received, held = forward()
    assert retrace.find([output.grad_fn], [received]) is None
    held[0] = held[0][1:].detach()
    assert retrace.find([output.grad_fn], [received]) is None
    held.clear()
    assert retrace.find([output.grad_fn], [received]) is not None
    elsewhere = received[:]
    assert retrace.find([output.grad_fn], [received]) is None
    del elsewhere
    assert retrace.find([output.grad_fn], []) is None, "the received input is the loop's"


def test_tensors_that_share_a_storage_now_or_no_longer_are_not_found() -> None:
    def shared(x: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        both = torch.rand(8, 8)
        return (x * both[:4] * both[4:]).sum()

    def separate(x: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        return (x * torch.rand(8, 8)[:4] * torch.rand(8, 8)[4:]).sum()

    for before, then in ((shared, separate), (separate, shared)):
        retrace = recorded(before)
        assert retrace is not None
        for of, found in ((before, True), (then, False)):
            output, received, _ = forward(of)
            assert (retrace.find([output.grad_fn], [received]) is not None) == found
