"""What a graph in pieces saved is found in all of them, and moves unless somebody but its loop holds it."""

from __future__ import annotations

from typing import Any

import torch

from bpipe.runtime.capture import SavedStorage, find
from bpipe.runtime.graph_pieces import Holders, Pieces
from bpipe.runtime.retrace import Retrace

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


def sizes(found: tuple[SavedStorage, ...]) -> list[tuple[int, bool]]:
    return sorted((item.nbytes, item.alone) for item in found if item.nbytes >= NBYTES)


def test_every_piece_is_looked_through_and_what_its_loop_holds_may_leave() -> None:
    chain = Chain(0)
    # tanh's, sin's own input, which is tanh's, exp's, which is the third part's input, and sigmoid's.
    assert sizes(found_in(chain, chain.pieces())) == [(NBYTES, True)] * 3
    behind_the_output = find([chain.outputs[-1].grad_fn], [chain.received], CPU)
    assert sizes(behind_the_output) == [(NBYTES, True)], "the other pieces are not behind the output"


def test_without_its_holders_what_is_cut_stays() -> None:
    chain = Chain(0)
    found = find(chain.pieces().roots, [chain.received], CPU)
    assert sizes(found) == [(NBYTES, False)] * 2 + [(NBYTES, True)]


def test_what_somebody_else_holds_too_stays() -> None:
    """A module that keeps the tensor it was given last may read it again."""
    chain = Chain(0)
    elsewhere = chain.inputs[1]
    assert sizes(found_in(chain, chain.pieces())) == [(NBYTES, False)] + [(NBYTES, True)] * 2
    del elsewhere
    view = chain.outputs[1].detach()
    assert sizes(found_in(chain, chain.pieces())) == [(NBYTES, False)] + [(NBYTES, True)] * 2
    del view
    assert sizes(found_in(chain, chain.pieces())) == [(NBYTES, True)] * 3


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


def test_the_same_is_found_again_in_another_micro_batch_with_its_own_holders() -> None:
    chain = Chain(0)
    pieces = chain.pieces()
    leaving = [item.storage for item in found_in(chain, pieces) if item.nbytes >= NBYTES]
    retrace = Retrace.of(pieces.roots, leaving)
    assert retrace is not None
    other = Chain(2)
    cut = other.pieces()
    again = retrace.find(cut.roots, [other.received], cut.held)
    assert again is not None
    wanted = [item.storage for item in found_in(other, cut) if item.nbytes >= NBYTES]
    assert {one._cdata for one in again} == {one._cdata for one in wanted}
    del again, wanted
    assert retrace.find(cut.roots, [other.received]) is None, "holders that nobody named count"
    elsewhere = other.outputs[0]
    assert retrace.find(cut.roots, [other.received], cut.held) is None
    assert elsewhere is other.outputs[0]


def test_holders_are_counted_by_tensor_and_by_storage() -> None:
    loop = [torch.zeros(4)]
    loop += [loop[0], loop[0].view(2, 2)]
    twin = loop[0].detach()
    holders = Holders(tuple(loop))
    assert [holders.references(one) for one in (*loop, twin)] == [4, 4, 2, 0]
    assert holders.num_others(twin.untyped_storage(), ()) == 2
    assert holders.num_others(twin.untyped_storage(), [id(loop[0])]) == 1
    assert holders.num_others(torch.zeros(4).untyped_storage(), ()) == 0
    elsewhere = loop[0]
    assert Holders(tuple(loop)).num_others(twin.untyped_storage(), ()) == 1
    assert Holders(tuple(loop), [elsewhere]).num_others(twin.untyped_storage(), ()) == 2
