"""Draw programs at random from a seed: a `Program`, and its listing, which is the Python code that runs.

A listing is complete: `from_listing` builds the same program from it. Each statement has its own line, so that
locations distinguish operations. Drawn programs are valid: all values are 4 x 4 matrices that stay small, and only a
statement's own copy, which no backward needs, is written in place.
"""

import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.programs.program import Program

# The text of a listing before its drawn lines.
_HEAD = '''\
"""Program {seed} of the grammar: {features}."""

import random

import numpy as np
import torch
from torch.nn import functional as F

from tests.programs.program import Program


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
    """A program's seed, its features by the names of the grammar's rules, and its listing."""

    seed: int
    features: frozenset[str]
    listing: str


def build(seed: int) -> Program:
    return from_listing(draw(seed).listing, seed)


def from_listing(listing: str, seed: int) -> Program:
    """Return the program with this listing."""
    # A file name that does not exist, so that locations and tracebacks show the lines.
    file = f"grammar-{seed}.py"
    linecache.cache[file] = len(listing), None, listing.splitlines(keepends=True), file
    namespace: dict[str, Any] = {"__name__": f"grammar_{seed}"}
    exec(compile(listing, file, "exec"), namespace)
    return namespace["Drawn"](seed)


def draw(seed: int) -> Drawing:
    """Draw a program, the same for the same seed on every machine."""
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
    """Draws statements. `values` are matrices that exist on every path, and all except x0 depend on a weight."""

    random: random.Random
    features: set[str] = field(default_factory=set)
    values: list[str] = field(default_factory=lambda: ["x0", "x1", "x2"])
    # Python numbers that exist on every path, each between -1 and 1.
    numbers: list[str] = field(default_factory=lambda: ["(i % 3) / 3", "1 / (i + 1)"])
    count: int = 2

    def new(self) -> str:
        self.count += 1
        return f"x{self.count}"

    def value(self) -> str:
        # Prefer later values, so that results are used.
        return self.values[-1 - min(self.random.randrange(len(self.values)), self.random.randrange(len(self.values)))]

    def choose(self, *choices: str) -> str:
        return self.random.choice(choices)

    def filled(self, text: str, name: str) -> list[str]:
        """Return the lines of a text with a name for its result, values and a number."""
        x, y, c = self.value(), self.value(), self.choose(*self.numbers)
        return text.format(n=name, x=x, y=y, c=c).split("\n")

    def block(self, num_statements: int, depth: int) -> list[str]:
        lines: list[str] = []
        for _ in range(num_statements):
            name = self.random.choice([rule for rule in RULES if depth < 2 or rule not in ("branch", "loop")])
            self.features.add(name)
            rule = RULES[name]
            if callable(rule):
                lines += rule(self, depth)
            else:
                lines += self.filled(self.choose(*rule), result := self.new())
                self.values.append(result)
        return lines

    def inner(self, depth: int, num_statements: int) -> tuple[list[str], str]:
        """Return the lines of a branch or loop, and one of their values. Their names are local."""
        values, numbers = self.values[:], self.numbers[:]
        lines, value = self.block(num_statements, depth + 1), self.value()
        self.values, self.numbers = values, numbers
        return lines, value

    def ending(self) -> list[str]:
        # Use all values, so that a wrong one changes the loss.
        used = ", ".join(self.values[1:])
        lines = [
            f"loss = torch.stack([{used}]).mean(0).tanh().square().mean() + self.weights[2].square().mean() * 0.01"
        ]
        mode = self.choose("set to none", "kept", "accumulated")
        self.features.add(f"gradients {mode}")
        if mode == "accumulated":
            lines += ["loss.backward()", "if i % 2 == 0:", "    return loss.detach()"]
        else:
            lines += [f"self.optimizer.zero_grad(set_to_none={mode != 'kept'})", "loss.backward()"]
        if self.random.random() < 0.4:
            self.features.add("clipping")
            lines.append("torch.nn.utils.clip_grad_norm_(self.weights, 0.5)")
        lines.append("self.optimizer.step()")
        if mode == "accumulated":
            lines.append("self.optimizer.zero_grad()")
        if self.random.random() < 0.4:
            self.features.add("schedule")
            lines.append("self.schedule.step()")
        return [*lines, "return loss.detach()"]

    def optimizer(self) -> tuple[str, list[str]]:
        name, call = self.random.choice(
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
        return call, setup


# Expressions by rule, of existing values `x` and `y` and a number `c`.
EXPRESSIONS = {
    "unary": tuple(f"{{x}}.{name}()" for name in ("sin", "tanh", "sigmoid", "relu", "neg", "abs", "cos", "clone")),
    "binary": ("{x} + {y}", "{x} - {y}", "({x} * {y}).tanh()", "torch.maximum({x}, {y})"),
    "matmul": tuple(
        f"({product.replace('w', f'self.weights[{number}]')}).tanh()"
        for product in ("{x} @ w", "F.linear({x}, w)")
        for number in range(3)
    ),
    "normalized": ("F.layer_norm({x}, (4,))", "{x}.softmax(-1)", "F.gelu({x})", "{x} / 2"),
    "scalar": ("{x} * ({c})", "{x} + ({c})", "{x} - ({c})"),
    "view": (
        *("{x}.t()", "{x}.reshape(2, 8).view(4, 4)", "{x}[1:2].expand(4, 4)", "{x}.unsqueeze(1).squeeze(1)"),
        *("torch.cat([{x}[2:], {x}[:2]])", "{x}.flip(0)", "{x}.transpose(0, 1).contiguous()"),
        *("torch.stack({x}.unbind(1))", "{x}.narrow(1, 1, 2).repeat(1, 2)"),
        "{x}.reshape(2, 2, 4).movedim(0, 1).reshape(4, 4)",
    ),
    "view of changing size": ("{x}[: 1 + i % 3].mean(0).expand(4, 4)",),
    "random": (
        *("F.dropout({x}, 0.3)", "{x} + torch.randn(4, 4) * 0.1", "{x}[torch.randperm(4)]"),
        *("{x} * torch.bernoulli(torch.full((4, 4), 0.8))", "{x} + torch.rand_like({x}) * {c}"),
    ),
    "random by an own generator": ("{x} + torch.randn(4, 4, generator=self.own) * 0.1",),
    "numpy in mid-step": ("{x} + torch.from_numpy(np.tanh({x}.detach().numpy()))",),
    "tensor of numbers": ("{x} * torch.tensor([{c}, 1.0, 0.5, -0.5])",),
    "identity": tuple(
        f"({{x}} if {way} else {{y}}) + 1" for way in ("i % 2", "i % 3 == 2", "self.python.random() < 0.5")
    ),
    "size by data": (
        *("{x} + {x}[{x} > 0].sum().tanh()", "{x} + {x}.masked_select({x} < 0.5).sum().sin()"),
        "{x} + len({x}.detach().clamp(min=0).nonzero()) / 16",
        "{x} + {x}.detach().round().unique().mean().tanh()",
    ),
    "autograd function": ("Doubled.apply({x}).tanh()",),
    "recomputation": tuple(
        f"torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x.tanh(), 0.2).sin(), {{x}}, use_reentrant={way})"
        for way in (True, False)
    ),
    # Of separate values: a graph with a reentrant checkpoint gives them no gradients.
    "double backward": tuple(
        f"{{x}} + torch.autograd.grad((x0 @ self.weights[0]).{name}().sum(), self.weights[0], create_graph=True)[0].tanh()"
        for name in ("sin", "tanh")
    ),
    "complex": tuple(f"(torch.fft.fft({{x}}).conj() * 0.25).{part} + {{x}}" for part in ("imag", "real")),
}
# Statements by rule, which assign a value to `n`.
STATEMENTS = {
    # The array that lends its memory is overwritten after the operation that reads it.
    "lent memory": (
        "self.buffer[:] = self.array(i + 100, 4, 4)\n{n} = {x} + torch.from_numpy(self.buffer)\nself.buffer[:] = -1",
    ),
    "carried": ("{n} = {x} + self.carried\nself.carried = {n}.detach().tanh()",),
    "kept": (
        "self.kept.append({x}.detach())\n{n} = {x} + torch.stack(self.kept).mean(0)\n"
        "if len(self.kept) == 3:\n    self.kept.clear()",
    ),
    "hook": ("{n} = {x} * 1.5\n_ = {n}.register_hook(lambda gradient: gradient * 0.5) if {n}.requires_grad else None",),
    "autocast": (
        "with torch.autocast('cpu', torch.bfloat16):\n    {n} = {x} @ self.weights[1]\n{n} = {n}.float().tanh()",
    ),
    "without autograd": (
        "with torch.no_grad():\n    {n} = {x} * 0.5\n    self.mean.lerp_({n}, 0.1)",
        # Results of inference mode cannot be part of a backward.
        "with torch.inference_mode():\n    self.note('{n}', ({x} * 0.5).sum().item())\n{n} = {x}",
    ),
}
WRITES = (
    *("{n}.mul_({c})", "{n}.add_({y}, alpha=0.5)", "{n}[1:3] = {y}[:2]", "{n}[0].zero_()", "{n}.view(-1)[3:9].mul_(2)"),
    *("{n}.t()[1].add_(1)", "{n}.masked_fill_(torch.eye(4, dtype=torch.bool), 0.5)", "{n}[:, i % 4] -= 0.5"),
    "{n}.diagonal().copy_({y}[0])",
)
RESEEDS = (
    *("torch.manual_seed(self.seed + i)", "self.own.manual_seed(i)", "torch.set_rng_state(torch.get_rng_state())"),
    "self.own.set_state(self.own.clone_state().get_state())",
)
READS = ("{x}.mean().tanh().item()", "float({x}.detach().max().sigmoid())", "{x}.detach().sin().tolist()[0][1]")
CONDITIONS = ("i % 2", "i % 3 == 1", "self.python.random() < 0.5", "{x}.mean() > 0", "{c} > 0.3")
COUNTS = ("2", "i % 3", "1 + i % 2", "self.python.randint(0, 2)")


def in_place(w: _Writer, depth: int) -> list[str]:
    name = w.new()
    lines = w.filled("{n} = {x}.clone(memory_format=torch.contiguous_format)", name)
    for write in w.random.sample(WRITES, w.random.randint(1, 3)):
        lines += w.filled(write, name)
    w.values.append(name)
    return [*lines, f"{name}.tanh_()"]


def reseeded(w: _Writer, depth: int) -> list[str]:
    return [w.choose(*RESEEDS)]


def item(w: _Writer, depth: int) -> list[str]:
    name = f"c{w.count}"
    lines = w.filled(f"{{n}} = {w.choose(*READS)}\nself.note('{{n}}', {{n}})", name)
    w.count += 1
    w.numbers.append(name)
    return lines


def branch(w: _Writer, depth: int) -> list[str]:
    name = w.new()
    lines = w.filled(f"{{n}} = {{x}}\nif {w.choose(*CONDITIONS)}:", name)
    inner, value = w.inner(depth, w.random.randint(1, 3))
    lines += [*(f"    {line}" for line in inner), f"    {name} = {value} + 0.1"]
    if w.random.random() < 0.5:
        else_lines, else_value = w.inner(depth, w.random.randint(1, 2))
        lines += ["else:", *(f"    {line}" for line in else_lines), f"    {name} = {else_value} - 0.1"]
    w.values.append(name)
    return lines


def loop(w: _Writer, depth: int) -> list[str]:
    name, turn = w.new(), f"k{w.count}"
    lines = w.filled(f"{{n}} = {{x}}\nfor {turn} in range({w.choose(*COUNTS)}):", name)
    values = w.values[:]
    w.values.append(name)
    inner, value = w.inner(depth, w.random.randint(1, 3))
    w.values = [*values, name]
    return [*lines, *(f"    {line}" for line in inner), f"    {name} = ({name} + {value}).sin()"]


RULES: dict[str, tuple[str, ...] | Callable[[_Writer, int], list[str]]] = {
    **{name: tuple(f"{{n}} = {way}" for way in ways) for name, ways in EXPRESSIONS.items()},
    **STATEMENTS,
    **{rule.__name__: rule for rule in (in_place, reseeded, item, branch, loop)},
}
