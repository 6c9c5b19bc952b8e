"""Draw programs at random. In: a seed. Out: a `Program`, and its listing, which is Python and is what runs.

A listing is complete: `from_listing` builds the same program of it again. Each statement has a line of its own, as a
program's statements have, so that places tell operations apart. What is drawn is valid: all values are 4 x 4 matrices
that stay small, and what is written in place is a copy of the statement's own that no backward needs.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.unit.terra.programs.program import Program

# What a listing has before and after its drawn lines.
_HEAD = '''\
"""Program {seed} of the grammar: {features}."""

import random

import numpy as np
import torch
from torch.nn import functional as F

from tests.unit.terra.programs.program import Program


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        ctx.save_for_backward(given)
        return given * 2

    @staticmethod
    def backward(ctx, gradient):
        (given,) = ctx.saved_tensors
        return gradient * 2 + 0 * given


class Drawn(Program):
    name = "grammar {seed}"
    features = frozenset()
    drawn = frozenset({drawn!r})

    def __init__(self, seed):
        super().__init__(seed)
        self.weights = [(torch.randn(4, 4) * 0.5).requires_grad_() for _ in range(3)]
        self.mean, self.carried, self.kept = torch.zeros(4, 4), torch.zeros(4, 4), []
        self.own = torch.Generator().manual_seed(seed)
        self.python = random.Random(seed)
        self.buffer = np.zeros((4, 4), np.float32)
        self.optimizer = {optimizer}
        self.tensors = {{"mean": self.mean, **{{f"weight{{number}}": weight for number, weight in enumerate(self.weights)}}}}
        self.optimizers, self.generators = {{"optimizer": self.optimizer}}, {{"own": self.own}}
{more_setup}
    def state(self):
        return {{**super().state(), "carried": self.carried.detach().clone()}}

    def step(self, i):
        x0 = torch.from_numpy(self.array(i, 4, 4))
        x1 = x0 @ self.weights[0]
        x2 = (x0 @ self.weights[1]).tanh()
'''


@dataclass(frozen=True)
class Drawing:
    """A program's seed, the features that were drawn, by the names of the grammar's rules, and the listing."""

    seed: int
    features: frozenset[str]
    listing: str


def build(seed: int) -> Program:
    return from_listing(draw(seed).listing, seed)


def from_listing(listing: str, seed: int) -> Program:
    """The program whose `draw` gave this listing."""
    # A file's name, so that places and tracebacks show the lines; none that exists.
    file = f"grammar-{seed}.py"
    linecache.cache[file] = len(listing), None, listing.splitlines(keepends=True), file
    namespace: dict[str, Any] = {"__name__": f"grammar_{seed}"}
    exec(compile(listing, file, "exec"), namespace)
    return namespace["Drawn"](seed)


def draw(seed: int) -> Drawing:
    """The same for the same seed, on every machine."""
    writer = _Writer(random.Random(f"terra grammar {seed}"))
    lines = [*writer.block(writer.random.randint(6, 12), depth=0), *writer.ending()]
    optimizer, setup = writer.optimizer()
    features = sorted(writer.features)
    head = _HEAD.format(
        seed=seed, features=", ".join(features), drawn=features, optimizer=optimizer, more_setup=_indented(setup, 2)
    )
    return Drawing(seed, frozenset(features), head + _indented(lines, 2))


def _indented(lines: list[str], depth: int) -> str:
    return "".join(f"{'    ' * depth}{line}\n" for line in lines)


@dataclass
class _Writer:
    """Draws statements. `values` are names of matrices that every path has by now; all but the first depend on a
    weight."""

    random: random.Random
    features: set[str] = field(default_factory=set)
    values: list[str] = field(default_factory=lambda: ["x0", "x1", "x2"])
    # Python numbers that every path has by now, each between -1 and 1.
    numbers: list[str] = field(default_factory=lambda: ["(i % 3) / 3", "1 / (i + 1)"])
    count: int = 2

    def new(self) -> str:
        self.count += 1
        return f"x{self.count}"

    def value(self) -> str:
        # Late ones more often, so that what is made is used.
        return self.values[-1 - min(self.random.randrange(len(self.values)), self.random.randrange(len(self.values)))]

    def one_of(self, *choices: str) -> str:
        return self.random.choice(choices)

    def block(self, num_statements: int, depth: int) -> list[str]:
        lines: list[str] = []
        for _ in range(num_statements):
            rules = [rule for rule in RULES if depth < 2 or rule not in _NESTING]
            rule = self.random.choice(rules)
            self.features.add(rule.__name__)
            lines += rule(self, depth)
        return lines

    def inner(self, depth: int, num_statements: int) -> tuple[list[str], str]:
        """Of a branch or loop: its lines, and a value that they made. What they name is theirs alone."""
        values, numbers = self.values[:], self.numbers[:]
        lines, made = self.block(num_statements, depth + 1), self.value()
        self.values, self.numbers = values, numbers
        return lines, made

    # -- the end of a step
    # -----------------------------------------------------------------------------------------------------------

    def ending(self) -> list[str]:
        # All of them, so that one that is wrong is seen in the loss.
        used = ", ".join(self.values[1:])
        lines = [
            f"loss = torch.stack([{used}]).mean(0).tanh().square().mean() + self.weights[2].square().mean() * 0.01"
        ]
        way = self.one_of("set to none", "kept", "accumulated")
        self.features.add(f"gradients {way}")
        if way == "accumulated":
            lines += ["loss.backward()", "if i % 2 == 0:", "    return loss.detach()"]
        else:
            lines += [f"self.optimizer.zero_grad(set_to_none={way != 'kept'})", "loss.backward()"]
        if self.random.random() < 0.4:
            self.features.add("clipping")
            lines.append("torch.nn.utils.clip_grad_norm_(self.weights, 0.5)")
        lines.append("self.optimizer.step()")
        if way == "accumulated":
            lines.append("self.optimizer.zero_grad()")
        if self.random.random() < 0.4:
            self.features.add("schedule")
            lines.append("self.schedule.step()")
        return [*lines, "return loss.detach()"]

    def optimizer(self) -> tuple[str, list[str]]:
        name, made = self.random.choice(
            [
                ("sgd", "torch.optim.SGD(self.weights, lr=0.1)"),
                ("momentum", "torch.optim.SGD(self.weights, lr=0.05, momentum=0.9, nesterov=True)"),
                ("adam", "torch.optim.Adam(self.weights, lr=0.01, foreach=False)"),
                ("adam foreach", "torch.optim.Adam(self.weights, lr=0.01, foreach=True)"),
                ("adamw", "torch.optim.AdamW(self.weights, lr=0.01, amsgrad=True)"),
                ("rmsprop", "torch.optim.RMSprop(self.weights, lr=0.01, momentum=0.5)"),
                ("adagrad", "torch.optim.Adagrad(self.weights, lr=0.05)"),
            ]
        )
        self.features.add(f"optimizer {name}")
        setup = []
        if "schedule" in self.features:
            setup.append("self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)")
        return made, setup


# -- rules: each writes the lines of one statement
# ---------------------------------------------------------------------------------------

Rule = Callable[[_Writer, int], list[str]]


def unary(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    return [f"{name} = {given}.{w.one_of('sin', 'tanh', 'sigmoid', 'relu', 'neg', 'abs', 'cos', 'clone')}()"]


def binary(w: _Writer, depth: int) -> list[str]:
    name, one, other = w.new(), w.value(), w.value()
    w.values.append(name)
    return [
        f"{name} = {w.one_of(f'{one} + {other}', f'{one} - {other}', f'({one} * {other}).tanh()', f'torch.maximum({one}, {other})')}"
    ]


def matmul(w: _Writer, depth: int) -> list[str]:
    name, given, number = w.new(), w.value(), w.random.randrange(3)
    w.values.append(name)
    return [
        f"{name} = ({w.one_of(f'{given} @ self.weights[{number}]', f'F.linear({given}, self.weights[{number}])')}).tanh()"
    ]


def normalized(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    return [
        f"{name} = {w.one_of(f'F.layer_norm({given}, (4,))', f'{given}.softmax(-1)', f'F.gelu({given})', f'{given} / 2')}"
    ]


def scalar(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    return [f"{name} = {given} {w.one_of('*', '+', '-')} ({w.one_of(*w.numbers)})"]


def view(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    ways = (
        *(
            f"{given}.t()",
            f"{given}.reshape(2, 8).view(4, 4)",
            f"{given}[1:2].expand(4, 4)",
            f"{given}.unsqueeze(1).squeeze(1)",
        ),
        *(f"torch.cat([{given}[2:], {given}[:2]])", f"{given}.flip(0)", f"{given}.transpose(0, 1).contiguous()"),
        *(
            f"torch.stack({given}.unbind(1))",
            f"{given}.narrow(1, 1, 2).repeat(1, 2)",
            f"{given}.view(2, 2, 4).movedim(0, 1).reshape(4, 4)",
        ),
    )
    return [f"{name} = {w.one_of(*ways).replace('.view(2, 2', '.reshape(2, 2')}"]


def view_of_size(w: _Writer, depth: int) -> list[str]:
    """How large the view is changes from step to step."""
    name, given = w.new(), w.value()
    w.values.append(name)
    return [f"{name} = {given}[: 1 + i % 3].mean(0).expand(4, 4)"]


def in_place(w: _Writer, depth: int) -> list[str]:
    name, given, other = w.new(), w.value(), w.value()
    w.values.append(name)
    writes = (
        *(
            f"{name}.mul_({w.one_of(*w.numbers)})",
            f"{name}.add_({other}, alpha=0.5)",
            f"{name}[1:3] = {other}[:2]",
            f"{name}[0].zero_()",
        ),
        *(
            f"{name}.view(-1)[3:9].mul_(2)",
            f"{name}.t()[1].add_(1)",
            f"{name}.masked_fill_(torch.eye(4, dtype=torch.bool), 0.5)",
        ),
        *(f"{name}.diagonal().copy_({other}[0])", f"{name}[:, i % 4] -= 0.5"),
    )
    return [
        f"{name} = {given}.clone(memory_format=torch.contiguous_format)",
        *w.random.sample(writes, w.random.randint(1, 3)),
        f"{name}.tanh_()",
    ]


def drawn(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    ways = (
        *(
            f"F.dropout({given}, 0.3)",
            f"{given} + torch.randn(4, 4) * 0.1",
            f"{given} * torch.bernoulli(torch.full((4, 4), 0.8))",
        ),
        *(f"{given}[torch.randperm(4)]", f"{given} + torch.rand_like({given}) * {w.one_of(*w.numbers)}"),
    )
    return [f"{name} = {w.one_of(*ways)}"]


def drawn_by_own(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    return [f"{name} = {given} + torch.randn(4, 4, generator=self.own) * 0.1"]


def reseeded(w: _Writer, depth: int) -> list[str]:
    ways = (
        *("torch.manual_seed(self.seed + i)", "self.own.manual_seed(i)", "torch.set_rng_state(torch.get_rng_state())"),
        "self.own.set_state(self.own.clone_state().get_state())",
    )
    return [w.one_of(*ways)]


def item(w: _Writer, depth: int) -> list[str]:
    name, given = f"c{w.count}", w.value()
    w.count += 1
    w.numbers.append(name)
    way = w.one_of(
        f"{given}.mean().tanh().item()",
        f"float({given}.detach().max().sigmoid())",
        f"{given}.detach().sin().tolist()[0][1]",
    )
    return [f"{name} = {way}", f"self.note({name!r}, {name})"]


def array(w: _Writer, depth: int) -> list[str]:
    """Another library computes in mid-step."""
    name, given = w.new(), w.value()
    w.values.append(name)
    return [f"{name} = {given} + torch.from_numpy(np.tanh({given}.detach().numpy()))"]


def fed(w: _Writer, depth: int) -> list[str]:
    """An array that lends its memory is overwritten behind the operation that reads it."""
    name, given = w.new(), w.value()
    w.values.append(name)
    return [
        "self.buffer[:] = self.array(i + 100, 4, 4)",
        f"{name} = {given} + torch.from_numpy(self.buffer)",
        "self.buffer[:] = -1",
    ]


def numbers(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    return [f"{name} = {given} * torch.tensor([{w.one_of(*w.numbers)}, 1.0, 0.5, -0.5])"]


def branch(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    condition = w.one_of(
        "i % 2", "i % 3 == 1", "self.python.random() < 0.5", f"{w.value()}.mean() > 0", f"{w.one_of(*w.numbers)} > 0.3"
    )
    inner, made = w.inner(depth, w.random.randint(1, 3))
    lines = [f"{name} = {given}", f"if {condition}:", *(f"    {line}" for line in inner), f"    {name} = {made} + 0.1"]
    if w.random.random() < 0.5:
        other, otherwise = w.inner(depth, w.random.randint(1, 2))
        lines += ["else:", *(f"    {line}" for line in other), f"    {name} = {otherwise} - 0.1"]
    w.values.append(name)
    return lines


def loop(w: _Writer, depth: int) -> list[str]:
    name, given, turn = w.new(), w.value(), f"k{w.count}"
    count = w.one_of("2", "i % 3", "1 + i % 2", "self.python.randint(0, 2)")
    values = w.values[:]
    w.values.append(name)
    inner, made = w.inner(depth, w.random.randint(1, 3))
    w.values = [*values, name]
    return [
        f"{name} = {given}",
        f"for {turn} in range({count}):",
        *(f"    {line}" for line in inner),
        f"    {name} = ({name} + {made}).sin()",
    ]


def identity(w: _Writer, depth: int) -> list[str]:
    name, one, other = w.new(), w.value(), w.value()
    w.values.append(name)
    return [f"{name} = ({one} if {w.one_of('i % 2', 'i % 3 == 2', 'self.python.random() < 0.5')} else {other}) + 1"]


def carried(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    return [f"{name} = {given} + self.carried", f"self.carried = {name}.detach().tanh()"]


def kept(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    return [
        f"self.kept.append({given}.detach())",
        f"{name} = {given} + torch.stack(self.kept).mean(0)",
        "if len(self.kept) == 3:",
        "    self.kept.clear()",
    ]


def averaged(w: _Writer, depth: int) -> list[str]:
    mode = w.one_of("no_grad", "inference_mode")
    name, given = w.new(), w.value()
    # What inference mode makes can be no part of a backward.
    last = f"self.note({name!r}, {name}.sum().item())" if mode == "inference_mode" else f"self.mean.lerp_({name}, 0.1)"
    return [f"with torch.{mode}():", f"    {name} = {given} * 0.5", f"    {last}"]


def masked(w: _Writer, depth: int) -> list[str]:
    """The data say how large it is."""
    name, given = w.new(), w.value()
    w.values.append(name)
    ways = (
        *(f"{given}[{given} > 0].sum().tanh()", f"{given}.masked_select({given} < 0.5).sum().sin()"),
        *(f"len({given}.detach().clamp(min=0).nonzero()) / 16", f"{given}.detach().round().unique().mean().tanh()"),
    )
    return [f"{name} = {given} + {w.one_of(*ways)}"]


def function(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    return [f"{name} = Doubled.apply({given}).tanh()"]


def hook(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.random.choice([each for each in w.values if each != "x0"])
    w.values.append(name)
    return [
        f"{name} = {given} * 1.5",
        f"_ = {name}.register_hook(lambda gradient: gradient * 0.5) if {name}.requires_grad else None",
    ]


def recomputed(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    way = w.one_of("True", "False")
    return [
        f"{name} = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x.tanh(), 0.2).sin(), {given}, "
        f"use_reentrant={way})"
    ]


def double_backward(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    # Of values of its own: a graph with a reentrant checkpoint in it gives no gradients to this.
    of = f"(x0 @ self.weights[0]).{w.one_of('sin', 'tanh')}().sum()"
    return [f"{name} = {given} + torch.autograd.grad({of}, self.weights[0], create_graph=True)[0].tanh()"]


def complex_value(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    return [f"{name} = (torch.fft.fft({given}).conj() * 0.25).{w.one_of('imag', 'real')} + {given}"]


def autocast(w: _Writer, depth: int) -> list[str]:
    name, given = w.new(), w.value()
    w.values.append(name)
    return [
        "with torch.autocast('cpu', torch.bfloat16):",
        f"    {name} = {given} @ self.weights[1]",
        f"{name} = {name}.float().tanh()",
    ]


RULES: tuple[Rule, ...] = (
    *(
        unary,
        binary,
        matmul,
        normalized,
        scalar,
        view,
        view_of_size,
        in_place,
        drawn,
        drawn_by_own,
        reseeded,
        item,
        array,
        fed,
        numbers,
    ),
    *(
        branch,
        loop,
        identity,
        carried,
        kept,
        averaged,
        masked,
        function,
        hook,
        recomputed,
        double_backward,
        complex_value,
        autocast,
    ),
)
_NESTING = (branch, loop)
