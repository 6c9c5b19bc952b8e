"""Which storages of a graph can be evicted, and how those of the next micro-batch are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from bpipe.runtime.capture import Claims, Retrace, SavedStorage, find
from bpipe.runtime.graph import Pieces

CPU = torch.device("cpu")


def moved(root: torch.Tensor, *inputs: torch.Tensor) -> set[int]:
    """The addresses of movable storages."""
    return {item.storage._cdata for item in find([root.grad_fn], inputs, CPU) if item.alone}


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def there_and_back(storages: Sequence[SavedStorage]) -> None:
    """Copy out, empty, fill, copy back."""
    copies = [torch.empty(0, dtype=torch.uint8).set_(item.storage).clone() for item in storages]  # type: ignore[call-overload]
    for item in storages:
        item.storage.resize_(0)
        assert item.storage.nbytes() == 0
    for item, copy in zip(storages, copies, strict=True):
        item.storage.resize_(item.nbytes)
        torch.empty(0, dtype=torch.uint8).set_(item.storage).copy_(copy)  # type: ignore[call-overload]


def test_parameters_and_their_views_never_leave() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    hidden = torch.relu(x @ weight)
    out = hidden @ weight.t()
    hidden_address = address(hidden)
    del hidden
    assert moved(out, x) == {address(x), hidden_address}


def test_a_tensor_python_still_holds_stays() -> None:
    """A cached mask is the very tensor that was saved, so counting tensors cannot show that somebody else holds it."""
    cache = {"mask": torch.rand(4, 8)}
    x = torch.randn(4, 8, requires_grad=True)
    out = (x * cache["mask"]).sum()
    assert address(cache["mask"]) not in moved(out, x)
    mask_address = address(cache["mask"])
    del cache["mask"]
    assert mask_address in moved(out, x)


@pytest.mark.parametrize(("device", "moves"), [("cpu", True), ("cpu:3", True), ("meta", False), ("cuda:0", False)])
def test_what_is_on_another_device_stays(device: str, moves: bool) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    items = find([x.exp().exp().sum().grad_fn], [x], torch.device(device))
    assert {item.alone for item in items} == {moves}


def test_views_of_one_storage_are_one_storage() -> None:
    """Q, K and V of an attention layer are strided views of one product; nothing may be made contiguous."""
    weight = torch.nn.Parameter(torch.randn(8, 24))
    x = torch.randn(4, 8, requires_grad=True)

    def attention() -> torch.Tensor:
        q, k, v = (x @ weight).chunk(3, dim=-1)
        return torch.softmax(q @ k.t(), dim=-1) @ v

    out = attention()
    alone = [item for item in find([out.grad_fn], [x], CPU) if item.alone]
    assert sorted(item.nbytes for item in alone) == [4 * 4 * 4, 4 * 8 * 4, 4 * 24 * 4]


class Twice(torch.autograd.Function):
    """A Function written in Python, as Megatron's are: it saves its input and its output."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * 2 + 0 * (x + y)


def test_what_two_micro_batches_saved_is_nobodys() -> None:
    """Only the two graphs hold the table, so only comparing them shows it."""
    x = torch.randn(4, 8, requires_grad=True)

    def two_graphs() -> tuple[torch.Tensor, torch.Tensor, int]:
        table = torch.rand(4, 8)
        return (x * table).sum(), (x * table).sum(), address(table)

    first, second, table = two_graphs()
    shared = Claims()

    def claim(out: torch.Tensor, microbatch: int) -> set[int]:
        storages = [item.storage for item in find([out.grad_fn], [x], CPU)]
        return {
            storage._cdata
            for storage, is_claimed in zip(storages, shared.claim(storages, microbatch), strict=True)
            if is_claimed
        }

    assert table in claim(first, 0)
    assert table not in claim(second, 1)


def test_what_one_micro_batch_holds_is_no_other_ones_until_it_is_released() -> None:
    storages = [torch.rand(4).untyped_storage() for _ in range(3)]
    addresses = frozenset(storage._cdata for storage in storages[:2])
    claims = Claims()
    assert claims.hold(addresses, 0)
    assert claims.hold(addresses, 0), "it may leave twice"
    assert not claims.hold(addresses, 1)
    assert claims.claim(storages, 1) == [False, False, True]
    claims.release(0)
    assert claims.claim(storages, 1) == [True, True, True]
    claims.clear()
    assert claims.claim(storages[1:], 1) == [True, True]
    assert not claims.hold(addresses, 0), "one of two is another one's, so none is held"
    assert claims.claim(storages[:1], 1) == [True]


class Stashing(torch.autograd.Function):
    """A Function that keeps tensors in a list on its `ctx`, as compiled Functions do, and saves one of them."""

    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        listed, both, elsewhere, viewed = x * 2, x * 3, x * 4, (x * 5)[1:]
        ctx.save_for_backward(x, both)
        ctx._tensors_no_vc_check = [listed, both, elsewhere, viewed.detach()]
        Stashing.kept = [elsewhere]
        return listed * both + elsewhere

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, both = ctx.saved_tensors
        listed, _, elsewhere, viewed = ctx._tensors_no_vc_check
        return grad * (listed * 3 + both * 2 + 4) + 0 * (elsewhere + x).sum() + 0 * viewed.sum()


def test_what_a_compiled_function_stashes_is_found_and_moves() -> None:
    """It is in no attribute that autograd exposes, so it was never found and never moved."""
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(7)).requires_grad_() for _ in range(2)]
    (expected,) = torch.autograd.grad(Stashing.apply(inputs[0]).sum(), inputs[0])
    received = inputs[1]
    out = Stashing.apply(received).sum()
    storages = find([out.grad_fn], [received], CPU)
    assert len(storages) == 5
    assert {item.kind for item in storages} == {"StashingBackward"}
    assert [address(Stashing.kept[0])] == [item.storage._cdata for item in storages if not item.alone]
    there_and_back([item for item in storages if item.alone])
    assert torch.equal(torch.autograd.grad(out, received)[0], expected)


def test_what_was_saved_through_a_hook_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        offloaded = Twice.apply(torch.exp(x))
    with pytest.raises(ValueError, match=r"saved a tensor through a hook of torch\.autograd\.graph \(save_on_cpu"):
        find([offloaded.grad_fn], [x], CPU)


Layers = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
# Held by Python code all the time, as weights and a cached mask are.
WEIGHT, MASK = torch.nn.Parameter(torch.randn(8, 8)), torch.rand(4, 8)


def layers(x: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Every case that is distinguished: inputs, outputs of their own node, views and their bases, lists."""
    hidden = torch.relu(x @ WEIGHT) * MASK
    tensors.append(hidden)
    first, second = torch.exp(hidden).split(4, -1)
    return Twice.apply(torch.cat([first * second, torch.softmax(second, -1)], -1)) * Stashing.apply(hidden)


def run_layers(of: Layers = layers) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the layers' output, what they received, and a list of tensors that are still held until it is cleared."""
    received, tensors = torch.randn(4, 8, requires_grad=True), []
    return of(received, tensors), received, tensors


def recorded(of: Layers = layers) -> Retrace | None:
    output, received, tensors = run_layers(of)
    tensors.clear()
    leaving = [item.storage for item in find([output.grad_fn], [received], CPU) if item.alone]
    assert leaving
    return Retrace.of([output.grad_fn], leaving)


def test_what_somebody_holds_is_not_found() -> None:
    """Whether through the saved tensor itself or through a view of it; the caller then does a full search."""
    retrace = recorded()
    assert retrace is not None
    output, received, tensors = run_layers()
    assert retrace.find([output.grad_fn], [received]) is None
    tensors[0] = tensors[0][1:].detach()
    assert retrace.find([output.grad_fn], [received]) is None
    tensors.clear()
    assert retrace.find([output.grad_fn], [received]) is not None
    elsewhere = received[:]
    assert retrace.find([output.grad_fn], [received]) is None
    del elsewhere
    assert retrace.find([output.grad_fn], []) is None, "the received input is the loop's"


def test_tensors_that_share_a_storage_now_or_no_longer_are_not_found() -> None:
    def shared(x: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        both = torch.rand(8, 8)
        return (x * both[:4] * both[4:]).sum()

    def separate(x: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        return (x * torch.rand(8, 8)[:4] * torch.rand(8, 8)[4:]).sum()

    for before, then in ((shared, separate), (separate, shared)):
        retrace = recorded(before)
        assert retrace is not None
        for of, is_found in ((before, True), (then, False)):
            output, received, _ = run_layers(of)
            assert (retrace.find([output.grad_fn], [received]) is not None) == is_found


TALL, WIDE = 64, 32
TALL_BYTES = TALL * WIDE * 4


class Chain:
    """A forward in three parts, as a loop keeps it: each part's detached input and its output."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.received = torch.randn(TALL, WIDE, requires_grad=True)
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        passed = self.received
        for part in (lambda x: (x * 2).tanh(), lambda x: x.sin().exp(), lambda x: x.sigmoid().sum()):
            leaf = passed.detach().requires_grad_()
            passed = part(leaf)
            self.inputs.append(leaf)
            self.outputs.append(passed)

    def pieces(self) -> Pieces:
        return Pieces([output.grad_fn for output in self.outputs], (*self.inputs, *self.outputs))

    def backward(self) -> torch.Tensor:
        gradient: Any = None
        for leaf, output in zip(reversed(self.inputs), reversed(self.outputs), strict=True):
            torch.autograd.backward(output, gradient)
            gradient = leaf.grad
        return gradient


def found_in(chain: Chain, pieces: Pieces) -> tuple[SavedStorage, ...]:
    return find(pieces.roots, [chain.received], CPU, pieces.held)


def test_a_backward_in_pieces_reads_what_was_emptied_and_filled_again() -> None:
    expected = Chain(1).backward()
    chain = Chain(1)
    pieces = chain.pieces()
    storages = [item.storage for item in found_in(chain, pieces) if item.alone and item.nbytes >= TALL_BYTES]
    # One of tanh and sin, one of exp and the third part's input, and one of sigmoid.
    assert len(storages) == 3
    del pieces
    copies = [storage.clone() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    for storage, copy in zip(storages, copies, strict=True):
        storage.resize_(copy.nbytes())
        storage.copy_(copy)
    assert torch.equal(chain.backward(), expected)


def test_what_somebody_else_holds_besides_the_loop_stays() -> None:
    """A module that keeps the tensor it was given last may read it again."""
    chain = Chain(0)

    def num_leaving() -> int:
        return sum(item.alone for item in found_in(chain, chain.pieces()) if item.nbytes >= TALL_BYTES)

    elsewhere = chain.inputs[1]
    assert num_leaving() == 2
    elsewhere = chain.outputs[1].detach()
    assert num_leaving() == 2
    del elsewhere
    assert num_leaving() == 3
