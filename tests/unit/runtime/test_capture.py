"""Which storages of a graph may leave: what is whose, by small graphs where the answer can be seen."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from bpipe.runtime.capture import Claims, SavedStorage, find
from bpipe.runtime.graph import STASH, hiding, nodes_of, saved_names

CPU = torch.device("cpu")


def moved(root: torch.Tensor, *inputs: torch.Tensor) -> set[int]:
    """Storage addresses of what may leave."""
    return {item.storage._cdata for item in find([root.grad_fn], inputs, CPU) if item.alone}


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def there_and_back(found: Sequence[SavedStorage]) -> None:
    """Copy out, empty, fill, copy back."""
    copies = [torch.empty(0, dtype=torch.uint8).set_(item.storage).clone() for item in found]  # type: ignore[call-overload]
    for item in found:
        item.storage.resize_(0)
        assert item.storage.nbytes() == 0
    for item, copy in zip(found, copies, strict=True):
        item.storage.resize_(item.nbytes)
        torch.empty(0, dtype=torch.uint8).set_(item.storage).copy_(copy)  # type: ignore[call-overload]


def test_parameters_and_their_views_never_leave() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    hidden = torch.relu(x @ weight)
    out = hidden @ weight.t()
    mine = address(hidden)
    del hidden
    assert moved(out, x) == {address(x), mine}


def test_a_tensor_python_still_holds_stays() -> None:
    """A cached mask is the very tensor that was saved, so counting tensors cannot show that somebody else holds it."""
    cache = {"mask": torch.rand(4, 8)}
    x = torch.randn(4, 8, requires_grad=True)
    out = (x * cache["mask"]).sum()
    assert address(cache["mask"]) not in moved(out, x)
    kept = address(cache["mask"])
    del cache["mask"]
    assert kept in moved(out, x)


def test_the_received_input_leaves_although_the_loop_holds_it() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    out = (x * x).sum()
    assert moved(out) == set()
    assert moved(out, x) == {address(x)}


def test_views_of_one_storage_are_one_storage() -> None:
    """Q, K and V of an attention layer are strided views of one product; nothing may be made contiguous."""
    weight = torch.nn.Parameter(torch.randn(8, 24))
    x = torch.randn(4, 8, requires_grad=True)

    def attention() -> torch.Tensor:
        q, k, v = (x @ weight).chunk(3, dim=-1)
        return torch.softmax(q @ k.t(), dim=-1) @ v

    out = attention()
    found = [item for item in find([out.grad_fn], [x], CPU) if item.alone]
    assert sorted(item.nbytes for item in found) == [4 * 4 * 4, 4 * 8 * 4, 4 * 24 * 4]


def test_a_saved_output_somebody_keeps_stays() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    kept = torch.exp(x)
    out = kept.sum()
    assert address(kept) not in moved(out, x)


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


def test_python_functions_are_seen() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    out = Twice.apply(Twice.apply(x)).sum()
    assert len(moved(out, x)) == 3  # x, between, and the last output


def test_only_tensors_are_asked_for_and_all_of_them() -> None:
    """A node also saved sizes and flags, and asking for those too took most of the walk."""
    x = torch.randn(2, 4, 8, requires_grad=True)
    lstm = torch.nn.LSTM(8, 8, batch_first=True)
    attended = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
    picked = torch.stack([attended, lstm(x)[0]]).amax(0)[torch.arange(2), :, torch.tensor([0, 3])]
    normed = torch.nn.functional.layer_norm(torch.einsum("bd,bd->bd", picked, picked).clamp(min=0.1), [4]).std(0)
    out = sum(torch._foreach_minimum([torch.dropout(normed, 0.1, True)], [normed])) * 2
    nodes = list(nodes_of([out.grad_fn]))
    assert len({type(node) for node in nodes}) > 20
    for node in nodes:
        asked = saved_names(type(node))
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            holds_tensors = isinstance(value, torch.Tensor) or (
                isinstance(value, (tuple, list)) and any(map(torch.is_tensor, value))
            )
            assert not holds_tensors or name in asked, f"{node.name()}: {name}"


def test_what_two_micro_batches_saved_is_nobodys() -> None:
    """Nobody but two graphs holds the table, so only comparing them can tell."""
    x = torch.randn(4, 8, requires_grad=True)

    def two_graphs() -> tuple[torch.Tensor, torch.Tensor, int]:
        table = torch.rand(4, 8)
        return (x * table).sum(), (x * table).sum(), address(table)

    first, second, table = two_graphs()
    shared = Claims()

    def claim(out: torch.Tensor, microbatch: int) -> set[int]:
        storages = [item.storage for item in find([out.grad_fn], [x], CPU)]
        return {
            storage._cdata for storage, mine in zip(storages, shared.claim(storages, microbatch), strict=True) if mine
        }

    assert table in claim(first, 0)
    assert table not in claim(second, 1)


def test_what_one_micro_batch_holds_is_no_other_ones_until_it_is_released() -> None:
    storages = [torch.rand(4).untyped_storage() for _ in range(3)]
    addresses = frozenset(storage._cdata for storage in storages[:2])
    claims = Claims()
    assert claims.hold(addresses, 0)
    assert not claims.hold(addresses, 1)
    assert claims.claim(storages, 1) == [False, False, True]
    claims.release(0)
    assert claims.claim(storages, 1) == [True, True, True]
    claims.clear()
    assert claims.claim(storages[1:], 1) == [True, True]
    assert not claims.hold(addresses, 0), "one of two is another one's, so none is held"
    assert claims.claim(storages[:1], 1) == [True]


def test_looking_keeps_nothing_alive() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    hidden = torch.exp(x * 2)
    out = hidden.sum()
    storage, node = StorageWeakRef(hidden.untyped_storage()), weakref.ref(hidden)
    find([out.grad_fn], [x], CPU)
    del hidden, out
    gc.collect()
    assert node() is None
    assert storage.expired()


def test_a_graph_that_ran_is_refused() -> None:
    x = torch.randn(4, requires_grad=True)
    out = (x * x).sum()
    out.backward()
    with pytest.raises(RuntimeError, match=r"backward through the graph a second time|already been freed"):
        find([out.grad_fn], (), CPU)


def test_in_place_resizing_restores_what_autograd_sees() -> None:
    """The whole idea: copy out, empty, fill, copy back; the gradient does not know."""
    x = torch.randn(64, 8, requires_grad=True)
    expected = torch.autograd.grad(torch.exp(x.sin()).sum(), x)[0]
    out = torch.exp(x.sin()).sum()
    found = [item for item in find([out.grad_fn], [x], CPU) if item.alone]
    there_and_back(found)
    del found
    assert torch.equal(torch.autograd.grad(out, x)[0], expected)


def test_found_says_its_size() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (only,) = find([(x * x).sum().grad_fn], [x], CPU)
    assert isinstance(only, SavedStorage)
    assert only.nbytes == 4 * 8 * 4


def test_what_lies_elsewhere_stays() -> None:
    """It came out as movable: a copy of the stage's device would have been made of memory that is not there."""
    x = torch.randn(4, 8, requires_grad=True)
    there = torch.randn(4, 8, device="meta", requires_grad=True)
    assert [item.alone for item in find([(x * x).sum().grad_fn], [x], CPU)] == [True]
    assert [item.alone for item in find([(x * x).sum().grad_fn], [x], torch.device("cuda", 0))] == [False]
    assert [item.alone for item in find([(there * there).sum().grad_fn], [there], CPU)] == [False]


def test_a_device_without_an_index_is_any_of_its_type() -> None:
    there = torch.randn(4, 8, device="meta", requires_grad=True)
    (only,) = find([(there * there).sum().grad_fn], [there], torch.device("meta"))
    assert only.alone


class Stashing(torch.autograd.Function):
    """As a compiled Function keeps what the one that it was made from set on its `ctx`: in a list, and some of it
    saved too."""

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
    """It stands in no attribute that autograd gives, so it was never seen, and stayed."""
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(7)).requires_grad_() for _ in range(2)]
    (expected,) = torch.autograd.grad(Stashing.apply(inputs[0]).sum(), inputs[0])
    received = inputs[1]
    out = Stashing.apply(received).sum()
    found = find([out.grad_fn], [received], CPU)
    assert len(found) == 5
    assert {item.kind for item in found} == {"StashingBackward"}
    assert [address(Stashing.kept[0])] == [item.storage._cdata for item in found if not item.alone]
    there_and_back([item for item in found if item.alone])
    assert torch.equal(torch.autograd.grad(out, received)[0], expected)


class OnItsContext(torch.autograd.Function):
    """A Function that keeps a tensor as an attribute of `ctx`; compiled, torch moves it to a list."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.hidden = x @ weight
        ctx.save_for_backward(weight)
        return ctx.hidden * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grad * ctx.hidden) @ ctx.saved_tensors[0].t(), None


@pytest.mark.timeout(300)
def test_what_a_really_compiled_function_stashes_is_found() -> None:
    """Fails where another torch keeps such tensors elsewhere."""
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8)
    out = torch.compile(lambda x: OnItsContext.apply(x, weight).sin(), backend="aot_eager")(x)
    node = next(node for node in nodes_of([out.grad_fn]) if getattr(node, STASH, None))
    (stashed,) = getattr(node, STASH)
    where = address(stashed)
    del stashed
    assert moved(out, x) == {where}


def test_what_was_saved_through_a_hook_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        offloaded = Twice.apply(torch.exp(x))
    with pytest.raises(ValueError, match=r"saved a tensor through a hook of torch\.autograd\.graph \(save_on_cpu"):
        find([offloaded.grad_fn], [x], CPU)


def test_reentrant_checkpoints_are_walked_as_ever() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    out = checkpoint(lambda x: torch.exp(x) * x, x, use_reentrant=True).sum()
    assert moved(out, x) == {address(x)}


def test_nodes_that_hide_what_they_saved_are_named() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    shown = torch.exp(x * 2)
    shown[1:] = shown[1:] * 3
    assert hiding([shown.grad_fn]) == {"torch::autograd::CopySlices": 1}
    assert hiding([torch.exp(x).grad_fn]) == {}


class ReadOnce(Twice):
    """A Function that hands out what it saved once, to its backward."""

    clear_saved_tensors_on_access = True


def test_what_a_function_gives_only_once_is_left_to_its_backward() -> None:
    """The walk looked twice: the second look ended the run, and even the first would have taken what the backward
    needs."""
    x = torch.randn(4, 8, requires_grad=True)
    once = ReadOnce.apply(torch.exp(x).neg())
    out = torch.exp(once).sum()
    found = find([out.grad_fn], [x], CPU)
    assert [saved.nbytes for saved in found if saved.alone] == [128, 128], (
        "the two exponentials' outputs, and nothing of the Function's"
    )
    assert hiding([out.grad_fn]) == {"ReadOnceBackward": 1}
    out.backward()
    assert x.grad is not None


# -- quantised
# ----------------------------------------------------------------------------------------------------------------------


class Quantised(torch.Tensor):
    """A stand-in for a quantised tensor: 8 bits a value in a plain tensor, and a scale a row in another."""

    payload: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type[Quantised], payload: torch.Tensor, scale: torch.Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.payload, made.scale = payload, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["payload", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Quantised(args[0].payload, args[0].scale)
        raise NotImplementedError(f"{function} of a stand-in")

    def values(self) -> torch.Tensor:
        return (self.payload.to(self.scale.dtype) - 128) * self.scale


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return ((x / scale).round() + 128).to(torch.uint8), scale


class Product(torch.autograd.Function):
    """Saves its input in 8 bits: as a wrapper, or as its parts, which is how quantising layers save a wrapper of
    theirs."""

    cached: list[torch.Tensor] | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, as_wrapper: bool) -> torch.Tensor:
        payload, scale = quantised(x)
        saved = (Quantised(payload, scale),) if as_wrapper else (payload, scale)
        if Product.cached is not None:
            Product.cached.append(saved[0])
        ctx.save_for_backward(*saved, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        *saved, weight = ctx.saved_tensors
        x = saved[0].values() if len(saved) == 1 else Quantised(*saved).values()
        return gradient @ weight.t(), x.t() @ gradient, None


@pytest.mark.parametrize("as_wrapper", [False, True], ids=["its parts", "a wrapper"])
def test_a_quantised_payload_leaves_with_its_scale(as_wrapper: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(16, 16))
    expected = torch.autograd.grad(Product.apply(torch.ones(8, 16), weight, as_wrapper).sum(), weight)[0]  # type: ignore[no-untyped-call]
    output = Product.apply(torch.ones(8, 16), weight, as_wrapper)  # type: ignore[no-untyped-call]
    found = [item for item in find([output.grad_fn], (), CPU) if item.alone]
    assert sorted(item.nbytes for item in found) == [8 * 4, 8 * 16]
    there_and_back(found)
    assert torch.equal(torch.autograd.grad(output.sum(), weight)[0], expected)


@pytest.mark.parametrize("as_wrapper", [False, True], ids=["its parts", "a wrapper"])
def test_what_somebody_keeps_of_a_quantised_tensor_stays(as_wrapper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantised weight that a module caches is saved by every micro-batch."""
    monkeypatch.setattr(Product, "cached", [])
    weight = torch.nn.Parameter(torch.randn(16, 16))
    output = Product.apply(torch.ones(8, 16), weight, as_wrapper)  # type: ignore[no-untyped-call]
    alone = [item.nbytes for item in find([output.grad_fn], (), CPU) if item.alone]
    assert alone == ([] if as_wrapper else [8 * 4])


def test_a_payload_that_is_held_without_its_wrapper_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Product, "cached", [])
    weight = torch.nn.Parameter(torch.randn(16, 16))
    output = Product.apply(torch.ones(8, 16), weight, True)  # type: ignore[no-untyped-call]
    assert Product.cached is not None
    kept = Product.cached.pop().scale  # type: ignore[attr-defined]
    assert [item.nbytes for item in find([output.grad_fn], (), CPU) if item.alone] == [8 * 16]
    del kept
