"""What a graph in pieces saved is found in all of them, and moves unless somebody but its loop holds it."""

from __future__ import annotations

from typing import Any

import torch

from bpipe.runtime.capture import SavedStorage, find
from bpipe.runtime.graph import Pieces

CPU = torch.device("cpu")
ROWS, WIDTH = 64, 32
NBYTES = ROWS * WIDTH * 4


class Chain:
    """A forward of three parts, as a loop keeps it: of each what it was given, detached, and what it made."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.received = torch.randn(ROWS, WIDTH, requires_grad=True)
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        passed = self.received
        for part in (lambda x: (x * 2).tanh(), lambda x: x.sin().exp(), lambda x: x.sigmoid().sum()):
            given = passed.detach().requires_grad_()
            passed = part(given)
            self.inputs.append(given)
            self.outputs.append(passed)

    def pieces(self) -> Pieces:
        return Pieces([made.grad_fn for made in self.outputs], (*self.inputs, *self.outputs))

    def backward(self) -> torch.Tensor:
        gradient: Any = None
        for given, made in zip(reversed(self.inputs), reversed(self.outputs), strict=True):
            torch.autograd.backward(made, gradient)
            gradient = given.grad
        return gradient


def found_in(chain: Chain, pieces: Pieces) -> tuple[SavedStorage, ...]:
    return find(pieces.roots, [chain.received], CPU, pieces.held)


def test_a_backward_in_pieces_reads_what_was_emptied_and_filled_again() -> None:
    expected = Chain(1).backward()
    chain = Chain(1)
    pieces = chain.pieces()
    storages = [item.storage for item in found_in(chain, pieces) if item.alone and item.nbytes >= NBYTES]
    del pieces
    kept = [storage.clone() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    for storage, copy in zip(storages, kept, strict=True):
        storage.resize_(copy.nbytes())
        storage.copy_(copy)
    assert torch.equal(chain.backward(), expected)
