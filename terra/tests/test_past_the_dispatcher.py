"""Uses of a step's tensors that are not operations (copies, swaps, lent memory) are bit-equal with a session."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.equal import KINDS, STEPS, is_equal, opened


def best_weights() -> Iterator[Any]:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    net.load_state_dict(
        {name: torch.full_like(tensor, place) for place, (name, tensor) in enumerate(net.state_dict().items())}
    )
    while True:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1)
        yield copy.deepcopy(net.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_of_several_has_each_of_them(kind: str) -> None:
    """Every copy was the first one's, because the identity by which it was remembered was reused."""
    with opened(kind) as session, session:
        copied = next(best_weights())
    assert {type(tensor) for tensor in copied.values()} == {torch.Tensor}


@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_is_built_as_what_is_copied(kind: str) -> None:
    """The same tensor twice is one copy, tensors that share memory share it again, and attributes are copied."""
    weight = torch.arange(6.0)

    def copied() -> list[torch.Tensor]:
        doubled = weight * 2
        doubled.label = "half"  # type: ignore[attr-defined]
        leaf = (weight * 3).requires_grad_()
        (leaf * leaf).sum().backward()
        memory: dict[int, Any] = {}
        return copy.deepcopy([doubled, doubled, doubled[2:4], leaf, torch.nn.Parameter(weight * 4), weight], memory)

    with opened(kind) as session:
        for _ in range(STEPS):
            with session:
                doubled, again, part, leaf, parameter, outer = copied()
    assert doubled is again
    part.zero_()
    assert doubled.tolist() == [0.0, 2.0, 0.0, 0.0, 8.0, 10.0]
    assert (doubled.label, type(parameter), parameter.requires_grad) == ("half", torch.nn.Parameter, True)  # type: ignore[attr-defined]
    assert leaf.requires_grad
    assert leaf.grad is not None
    assert leaf.grad.tolist() == (weight * 6).tolist()
    assert (parameter.tolist(), outer.tolist(), weight.tolist()) == (
        (weight * 4).tolist(),
        weight.tolist(),
        list(range(6)),
    )


def test_a_deep_copy_of_what_has_a_history_is_refused_as_ever() -> None:
    weight = torch.ones(3, requires_grad=True)
    with opened("threaded") as session, session, pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(weight * 2)
    with opened("threaded") as session:
        for _ in range(4):
            with session:
                hidden = weight * 2
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(hidden)


def parameters_made_in_the_step() -> Iterator[Any]:
    weight = torch.arange(3.0)
    while True:
        loaded = pickle.loads(pickle.dumps([torch.nn.Parameter(weight + 1), weight * 2]))
        yield isinstance(loaded[0], torch.nn.Parameter), loaded


def capsules() -> Iterator[Any]:
    weight = torch.randn(4, generator=torch.Generator().manual_seed(1))
    while True:
        weight.mul_(1.5)
        doubled = weight * 2
        taken = [torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)) for tensor in (doubled, weight)]
        taken += [
            torch.from_dlpack(doubled * 1),
            torch.from_dlpack((doubled * 1).__dlpack__()),
            torch.from_numpy(np.from_dlpack(doubled * 1)),
        ]
        doubled.add_(1)
        yield [*taken, doubled]


def called_on_each_number() -> Iterator[Any]:
    weight = torch.arange(4.0)
    while True:
        weight.mul_(1.5)
        doubled, tripled = weight * 2, weight * 3
        scalar = torch.ones(())
        doubled.apply_(lambda number, scalar=scalar: number + float(scalar * 2))
        weight.apply_(lambda number: number + 1)
        tripled.map_(doubled, lambda a, b: a * b)
        weight.map_(tripled, lambda a, b: a - b)
        tripled.map2_(doubled, weight, lambda a, b, c: a + b * c)
        yield doubled, tripled, weight * 1, doubled.apply_(lambda number: number) is doubled


def lists_of_tensors() -> Iterator[Any]:
    weight, mean = torch.arange(4.0), torch.zeros(())
    while True:
        weight.mul_(1.5)
        loss = weight.sum()
        mean.copy_(loss)
        lists = [
            torch.tensor([loss, mean, 2.0]),
            torch.as_tensor([[loss], [mean]]),
            torch.asarray([loss]),
            weight.new_tensor([loss, 1]),
        ]
        yield [
            *lists,
            torch.Tensor([loss, mean]),
            weight.new([loss, mean]),
            torch.tensor([1, 2]),
            torch.tensor(weight * 2),
        ]


def swapped() -> Iterator[Any]:
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.arange(2.0))
    while True:
        with torch.no_grad():
            first.add_(1)
            second.mul_(3)
        doubled, tripled = first.detach() * 2, second.detach() * 3
        torch.utils.swap_tensors(first, second)
        torch.utils.swap_tensors(doubled, tripled)
        with torch.no_grad():
            first.mul_(0.5)
        yield first * 1, second * 1, doubled + 1, tripled - 1


def set_apart_by_a_made_index() -> Iterator[Any]:
    table, index = torch.arange(12.0).reshape(6, 2), torch.tensor([1, 3])
    while True:
        table.add_(1)
        index.copy_(index.flip(0).sort().values)
        yield [
            torch.tensor_split(table * 2, index + 1),
            (table * 2).tensor_split(index),
            torch.tensor_split(table, index, dim=0),
            table.tensor_split(3),
        ]


def packed(kind: str) -> Iterator[Any]:
    torch.manual_seed(4)
    layer = getattr(torch.nn, kind)(3, 4, batch_first=True)
    words, batch, lengths = torch.nn.Embedding(7, 3), torch.arange(15).reshape(3, 5) % 7, torch.tensor([5, 3, 2])
    while True:
        packed_words = pack_padded_sequence(words(batch) * 2, lengths * 1, batch_first=True)
        hidden, last = layer(packed_words)
        again = PackedSequence(hidden.data * 2, hidden.batch_sizes + 0)
        padded, sizes = pad_packed_sequence(hidden, batch_first=True)
        padded = padded + pad_packed_sequence(again, batch_first=True)[0]
        for module in (layer, words):
            module.zero_grad()
        padded.square().sum().backward()
        yield padded, sizes, last, [parameter.grad for parameter in (*layer.parameters(), words.weight)]


def state_of(kind: str) -> Iterator[Any]:
    """A state is the argument at which a packed batch has its sizes, and it has gradients."""
    torch.manual_seed(4)
    layer = getattr(torch.nn, kind)(3, 4, batch_first=True)
    batch, state = torch.randn(2, 5, 3), torch.randn(1, 2, 4, requires_grad=True)
    while True:
        state.grad = None
        output, _ = layer(batch, (state * 2, state * 3) if kind == "LSTM" else state * 2)
        output.square().sum().backward()
        yield output, state.grad


def default_type_of_the_step() -> Iterator[Any]:
    numbers, turns = torch.arange(3), count()
    while True:
        first = torch.ones(3)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if next(turns) % 2 else before)
        tensors = first, torch.ones(3) + numbers / 2
        torch.set_default_dtype(before)
        yield tensors


def truths_for_numbers() -> Iterator[Any]:
    numbers, mask = torch.arange(3), torch.tensor([True, False, True])
    while True:
        one_hot = torch.nn.functional.one_hot(numbers + 0, 4)
        truths = [(numbers > 1) == True, mask.masked_fill(~mask, True), torch.full((2,), True), numbers + True]  # noqa: E712
        yield [one_hot * 2, one_hot == True, *truths, numbers.clamp(max=True) * 2]  # noqa: E712


def singular_values() -> Iterator[Any]:
    weight = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    while True:
        weight.mul_(1.1)
        doubled, even = weight * 2, weight + weight.T
        norms = (
            torch.linalg.matrix_norm(doubled, ord=2),
            torch.linalg.norm(weight, "nuc"),
            torch.norm(doubled, "nuc"),
            doubled.norm("nuc"),
        )
        values = torch.vmap(torch.linalg.svdvals)(torch.stack([doubled, even]))
        yield (
            values,
            torch.linalg.svdvals(doubled),
            torch.linalg.svdvals(weight),
            torch.linalg.eigvalsh(even),
            torch.linalg.cond(doubled),
            *norms,
        )


PROGRAMS = {
    **{
        name: function
        for name, function in list(vars().items())
        if inspect.isgeneratorfunction(function) and function not in (packed, state_of)
    },
    **{
        f"{function.__name__} {kind}": partial(function, kind)
        for function in (packed, state_of)
        for kind in ("LSTM", "GRU", "RNN")
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_gives_what_it_gives_without_a_session(name: str, kind: str) -> None:
    """Each of these ended the process, raised, or silently gave other numbers."""
    is_equal(kind, PROGRAMS[name])


class Labelled(torch.Tensor):
    """A subclass without a way to be taken apart."""


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: (weight * 2).as_subclass(Labelled),
        lambda weight: weight.as_subclass(Labelled) + 1,
        lambda weight: Labelled(weight * 2),
        lambda weight: torch.FloatTensor([weight.sum()]),
    ],
    ids=["made", "given", "constructed", "legacy"],
)
def test_what_cannot_be_is_refused_with_what_to_do(use: Callable[[torch.Tensor], object]) -> None:
    """Torch's own messages are about compilers and custom kernels."""
    weight = torch.ones(3)
    use(weight)
    with opened("threaded") as session:
        with session:
            use(weight)
        with pytest.raises(RuntimeError) as refused, session:
            use(weight)
    assert "must run outside of `with session:`" in refused.value.__notes__[0]


def with_a_dual(weight: torch.Tensor) -> None:
    with forward_ad.dual_level():
        forward_ad.make_dual(weight, weight)


def with_jvp(weight: torch.Tensor) -> None:
    torch.func.jvp(torch.sin, (weight,), (weight,))


@pytest.mark.parametrize("use", [with_a_dual, with_jvp])
def test_derivatives_ahead_are_refused_in_steps(use: Callable[[torch.Tensor], None]) -> None:
    """These ended the process (`masked_fill`, dropout), or differed in their last digits (`normalize`)."""
    weight = torch.linspace(-1, 1, 5)
    with opened("threaded") as session:
        with pytest.raises(RuntimeError, match=r"compute them outside of `with session:`"), session:
            use(weight)
        use(weight)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode derivatives"), session:
            pass
        with session:
            torch.func.grad(lambda tensor: tensor.sin().sum())(weight)


def product(weight: torch.Tensor) -> torch.Tensor:
    return (weight * 2).prod()


def filled_in(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().masked_fill(weight > 0, weight.sum()).square().sum()


def twice_of_products(weight: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad((weight * 2).cumprod(0).square().sum(), weight, create_graph=True)
    return gradient.square().sum()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (product, "multiply the numbers one by one"),
        (filled_in, r"use torch.where\(\)"),
        (twice_of_products, "higher-order derivatives of cumprod"),
    ],
)
def test_gradients_of_other_formulas_are_refused_in_steps(
    loss: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    """Torch uses another formula under a dispatch mode, so these gradients differed in their last digits."""
    weight = torch.linspace(-1, 1, 5).requires_grad_()
    with opened("threaded") as session:
        # The first step runs plainly.
        with session:
            loss(weight).backward()
        with pytest.raises(RuntimeError, match=words), session:
            loss(weight).backward()
        with session, torch.no_grad():
            torch.stack([weight.prod(), weight.masked_fill(weight > 0, weight.sum()).sum()])
        with session:
            (weight.detach().prod(0) + weight.cumprod(0).sum() + weight.masked_fill(weight > 0, 0.0).sum()).backward()
