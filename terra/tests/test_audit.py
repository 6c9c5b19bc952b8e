"""The audit of single steps finds each defect at the line that a comment marks, and nothing else."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import terra
from terra.audit.compare import compare
from terra.audit.report import document, text

Step = Callable[[], Any]


def marked(step: Callable[..., Any]) -> set[tuple[int, str]]:
    """Return the lines of the step that a comment marks, with the kinds that it names."""
    lines, first = inspect.getsourcelines(step)
    return {
        (first + number, kind)
        for number, line in enumerate(lines)
        if "# is " in line
        for kind in line.partition("# is ")[2].strip().split(" and ")
    }


def findings_of(audit: terra.Audit) -> set[tuple[int, str]]:
    return {(finding.place.line, finding.kind.name.lower()) for finding in audit.findings}


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.25), torch.nn.Linear(8, 2))


def training(
    optimizer: Callable[..., torch.optim.Optimizer], set_to_none: bool = True, **settings: Any
) -> tuple[torch.nn.Module, Step]:
    net = model()
    stepping, batch = optimizer(net.parameters(), lr=0.1, **settings), torch.randn(5, 4)

    def step() -> None:
        stepping.zero_grad(set_to_none)
        net(batch).pow(2).mean().backward()
        stepping.step()  # is scalar and host_read

    return net, step


def test_what_is_looked_at_computes_the_same() -> None:
    audited, plain = training(torch.optim.Adam), training(torch.optim.Adam)
    states = []
    for (net, step), is_audited in ((audited, True), (plain, False)):
        torch.manual_seed(11)
        if is_audited:
            terra.audit(step, num_steps=4, warm_up=1)
        else:
            for _ in range(5):
                step()
        states.append([*net.state_dict().values(), torch.get_rng_state()])
    for expected, actual in zip(*states, strict=True):
        assert torch.equal(expected, actual)


def test_nothing_is_left_behind() -> None:
    before = torch.manual_seed, torch.cuda.manual_seed
    terra.audit(training(torch.optim.SGD)[1])
    assert before == (torch.manual_seed, torch.cuda.manual_seed)
    with pytest.raises(RuntimeError, match="on purpose"):
        terra.audit(_raises, warm_up=0)
    assert before == (torch.manual_seed, torch.cuda.manual_seed)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def _raises() -> None:
    raise RuntimeError("on purpose")


def growing_rate() -> Iterator[None]:
    weight, steps = torch.ones(3), count(1)
    while True:
        weight.mul_(0.5)
        weight.add_(torch.ones(3), alpha=1 / next(steps))  # is scalar
        yield


def carried_state() -> Iterator[None]:
    weight, state = torch.randn(3, 3), [torch.zeros(3)]
    while True:
        state[0] = (weight @ state[0]).tanh()  # is replaced
        yield


def new_batch() -> Iterator[None]:
    weight, batches = torch.randn(3, 3), iter([torch.randn(2, 3) for _ in range(9)])
    while True:
        batch = next(batches)
        hidden = batch @ weight  # is replaced
        # The same tensor again is not another finding.
        hidden + batch @ weight
        yield


def numbers_of_python() -> Iterator[None]:
    weight = torch.ones(2)
    while True:
        weight.mul_(torch.tensor([0.5, 0.25]))  # is from_python
        yield


def number_in_a_branch() -> Iterator[None]:
    """The first step lacks the operation, and the others were not compared with each other."""
    weight, steps = torch.ones(3), count()
    while True:
        number = next(steps)
        if number > 1:
            weight.mul_(1 / number)  # is scalar and sometimes
        yield


def branch() -> Iterator[None]:
    weight, steps = torch.randn(3), count()
    while True:
        hidden = weight.sin()
        if next(steps) % 2:
            hidden = hidden.cos() + 1  # is sometimes
        hidden.exp()  # is source
        yield


def other_operand() -> Iterator[None]:
    """Only an operand differs: the operations, their locations and their order are the same."""
    weight, steps = torch.randn(3), count()
    while True:
        sine, cosine = weight.sin(), weight.cos()
        chosen = sine if next(steps) % 2 else cosine
        (chosen + 1).exp()  # is source
        yield


def longer_each_time() -> Iterator[None]:
    weight, steps = torch.randn(20), count(3)
    while True:
        part = weight[: next(steps)]  # is scalar
        part.sin().sum()
        yield


def longer_batches() -> Iterator[None]:
    weight, batches = torch.randn(3, 3), iter([torch.randn(length, 3) for length in range(1, 9)])
    while True:
        (next(batches) @ weight).sin()  # is shape
        yield


def reads() -> Iterator[None]:
    weight = torch.randn(3)
    while True:
        if weight.sum() > 100:  # is host_read
            raise AssertionError
        weight.max().item()  # is host_read
        weight.tolist()  # is host_read
        weight.numpy()  # is host_read
        weight.clone()
        yield


def options_that_are_not_always_given() -> Iterator[None]:
    """torch drops arguments that equal their defaults, so alternating with a default went unseen."""
    weight, turns = torch.randn(1, 2, 3, 3), count()
    while True:
        is_odd = bool(next(turns) % 2)
        torch.nn.functional.gelu(weight, approximate="tanh" if is_odd else "none")  # is attribute
        torch.add(weight, weight, alpha=3 if is_odd else 1)  # is scalar
        torch.nn.functional.scaled_dot_product_attention(weight, weight, weight, is_causal=is_odd)  # is attribute
        weight.sum(-1, keepdim=is_odd).exp().sum()  # is attribute
        weight.std(dim=None if is_odd else 1).exp()  # is attribute
        torch.cat([weight] * (2 + is_odd)).exp()  # is scalar
        yield


def prints_and_saves() -> Iterator[None]:
    weight, alone = torch.randn(3), torch.randn(())
    copied = weight.clone()
    while True:
        print(weight)  # is host_read
        repr([weight])  # is host_read
        str.__mod__("%s", (weight,))  # is host_read
        f"{weight} {alone:.3f}"  # is host_read
        assert torch.allclose(weight, copied)  # is host_read
        torch.testing.assert_close(weight, copied)  # is host_read
        pickle.dumps(weight)  # is host_read
        torch.save({"weight": weight}, io.BytesIO())  # is host_read
        torch.tensor([alone, 1.0]).sum()  # is host_read and from_python
        copied.apply_(lambda number: number)  # is host_read
        yield


def checks_of_linear_algebra() -> Iterator[None]:
    weight = torch.eye(3)
    while True:
        torch.linalg.inv(weight)  # is host_read
        torch.linalg.cholesky(weight)  # is host_read
        torch.linalg.eigh(weight)  # is host_read
        torch.linalg.svd(weight)  # is host_read
        torch.linalg.solve(weight, weight)  # is host_read
        torch.linalg.inv_ex(weight)
        yield


def sizes_by_data() -> Iterator[None]:
    weight = torch.randn(30)
    while True:
        weight.nonzero()  # is size
        weight[weight > 0]  # is size
        weight[torch.arange(3)]
        yield


def places_that_are_set() -> Iterator[None]:
    """One number is filled in where a mask holds, and nothing waits for the number of places."""
    weight, steps = torch.randn(3, 4), count(1)
    copied, row, mask = weight.clone(), torch.randn(4), torch.tensor([True, False, True])
    while True:
        weight[weight > 9] = 0.0
        weight[mask] = 1
        weight[1:, 2][mask[1:]] = 2.0
        weight[0, 1] = 3.0
        hidden = (copied * 2).requires_grad_()
        filled = hidden * 1
        filled[copied > 0] = 4.0
        filled.sum().backward()
        weight[weight > 0] = 1.0 / next(steps)  # is scalar
        weight[mask] = row  # is size
        weight[weight > 0] = row.sum()  # is size
        weight[mask.byte(), 1] = row[:2]  # is size
        weight[weight > 0] += 1  # is size
        yield


def seeding() -> Iterator[None]:
    while True:
        torch.manual_seed(7)  # is seed
        torch.rand(3)
        yield


def seeding_inside_of_a_context() -> Iterator[None]:
    """The state that a context sets at its end was attributed to Python's contextlib."""
    while True:
        with torch.random.fork_rng(devices=[]):  # is seed
            torch.rand(3)
        yield


def own_generator() -> Iterator[None]:
    own = torch.Generator().manual_seed(3)
    while True:
        torch.rand(3, generator=own)  # is generator
        torch.rand(3, generator=torch.default_generator)
        yield


def copies() -> Iterator[None]:
    """The line was once that of Python's copy, and the text had every byte of the tensor."""
    weights = iter([torch.randn(30) for _ in range(9)])
    while True:
        copy.deepcopy(next(weights))  # is replaced
        yield


def number_or_tensor() -> Iterator[None]:
    weight, numbers = torch.ones(3), iter([2.0, torch.ones(()), 2.0, 3.0, 4.0])
    while True:
        weight.mul(next(numbers))  # is attribute
        yield


def gradient_of_a_number() -> Iterator[None]:
    """Operations that autograd issues are attributed to the forward's line, not to the call of backward."""
    weight, steps = torch.randn(3, requires_grad=True), count(1)
    while True:
        loss = (weight * (1 / next(steps))).sum()  # is scalar
        weight.grad = None
        loss.backward()
        yield


class _Scaled(torch.autograd.Function):
    """A function whose own backward has the finding."""

    steps: Iterator[int] = count(1)

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 / next(_Scaled.steps))  # is scalar


DEFECTS = [value for value in list(vars().values()) if inspect.isgeneratorfunction(value)]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_found_at_its_line_and_nothing_else(defect: Callable[[], Iterator[None]]) -> None:
    assert marked(defect), "no line is marked"
    assert findings_of(terra.audit(partial(next, defect()), num_steps=4)) == marked(defect)


def test_a_backward_of_ones_own_is_named_at_its_line() -> None:
    weight = torch.randn(3, requires_grad=True)

    def step() -> None:
        loss = _Scaled.apply(weight).sum()
        weight.grad = None
        loss.backward()

    audit = terra.audit(step)
    assert findings_of(audit) == marked(_Scaled.backward)
    assert [finding.place.backward_of for finding in audit.findings] == ["_ScaledBackward"]


def test_beside_a_device_the_host_may_read_its_own() -> None:
    """Adam counts steps on the host, which does not end a capture; but numbers computed from it are frozen."""
    weight, steps = torch.ones(3, device="meta"), torch.ones(())

    def step() -> None:
        steps.add_(1)
        weight.mul_(1 / steps.item())  # is scalar

    assert findings_of(terra.audit(step)) == marked(step)


def test_a_collective_is_said(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        weight = torch.ones(3)

        def step() -> None:
            dist.all_reduce(weight)  # is collective

        assert findings_of(terra.audit(step)) == marked(step)
    finally:
        dist.destroy_process_group()


def test_the_text_has_a_line_for_each_and_says_what_it_cannot_see() -> None:
    audit = terra.audit(partial(next, growing_rate()))
    ((line, _),) = marked(growing_rate)
    report = text(audit)
    assert report.startswith("3 steps of 3 operations: 1 thing that a CUDA graph would freeze, lose or break on\n")
    assert f"test_audit.py:{line}\n  scalar changes: add_: alpha is 0.5 then 0.333333 then 0.25\n" in report
    assert "scalar changes: a replay repeats the captured number" in report
    assert "kernels that do not pass torch's dispatcher" in report
    (entry,) = document(audit)["findings"]
    assert (entry["kind"], entry["line"], entry["file"]) == ("scalar", line, __file__)


@pytest.mark.parametrize(("num_steps", "warm_up"), [(1, 1), (3, -1)])
def test_what_changes_needs_two_steps(num_steps: int, warm_up: int) -> None:
    with pytest.raises(ValueError, match="needs 2 or more"):
        terra.audit(partial(next, growing_rate()), num_steps, warm_up)


def test_two_steps_may_be_under_way_and_come_in_parts() -> None:
    """As with a pipeline's micro-batches, a backward uses what its forward made."""
    recorder, weight = terra.Recorder(), torch.randn(3, requires_grad=True)
    # Otherwise the first backward makes it and the others add to it.
    weight.grad = torch.zeros(3)
    losses = {}
    with recorder.running():
        for number in range(3):
            inputs = torch.randn(3)
            with recorder.step(number, inputs=[inputs]):
                losses[number] = (inputs * weight).exp().sum()
        for number in range(3):
            with recorder.step(number):
                losses.pop(number).backward()
    assert compare(list(recorder.steps.values())).findings == ()
