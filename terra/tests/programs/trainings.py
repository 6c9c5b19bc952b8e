"""Programs that train, each with something that is hard to record as a graph or to run in parallel with Python."""

import copy
import pickle
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.programs.judge import Build
from tests.programs.layers import LENGTH, VOCABULARY, Decoder, against
from tests.programs.program import Feature, Program


class DCGAN(Program):
    """DCGAN: a generator and a judge with an Adam each; the judge's losses do not reach the generator."""

    name = "DCGAN"
    features = (Feature.BATCH, Feature.NUMBER, Feature.READ)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.generator = nn.Sequential(
            *(nn.ConvTranspose2d(5, 6, 4, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
            *(nn.ConvTranspose2d(6, 1, 4, 2, 1, bias=False), nn.Tanh()),
        )
        self.judge = nn.Sequential(
            *(nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.3)),
            *(
                nn.Conv2d(4, 6, 3, 1, 1, bias=False),
                nn.BatchNorm2d(6),
                nn.LeakyReLU(0.2),
                nn.Conv2d(6, 1, 4, bias=False),
            ),
        )
        for parameter in (*self.generator.parameters(), *self.judge.parameters()):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.1)
        self.making = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.judging = torch.optim.Adam(self.judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.modules = {"generator": self.generator, "judge": self.judge}
        self.optimizers = {"making": self.making, "judging": self.judging}

    def step(self, i: int) -> torch.Tensor:
        real = torch.from_numpy(self.array(i, 3, 1, 8, 8)).tanh()
        fake = self.generator(torch.randn(3, 5, 1, 1))
        self.judging.zero_grad()
        true, false = against(self.judge(real), 0.9), against(self.judge(fake.detach()), 0.0)
        true.backward()
        false.backward()
        self.judging.step()
        self.making.zero_grad()
        fooled = against(self.judge(fake), 1.0)
        fooled.backward()
        self.making.step()
        self.note("judge", (true + false).item(), "generator", fooled.item())
        return (true + false + fooled).detach()


class GPT2(Program):
    """GPT2 with tied embeddings, two micro-batches per step, decay for matrices only, and a cosine rate."""

    name = "GPT2"
    features = (Feature.BATCH, Feature.NUMBER, Feature.SCHEDULE, Feature.READ)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = Decoder()
        groups = [
            {
                "params": [parameter for parameter in self.net.parameters() if (parameter.dim() > 1) is matrices],
                "weight_decay": 0.1 * matrices,
            }
            for matrices in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.modules, self.optimizers = {"net": self.net}, {"adamw": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for batch in torch.from_numpy(self.integers(i, VOCABULARY, 4, LENGTH + 1)).chunk(2):
            logits = self.net(batch[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1)) / 2
            loss.backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.note("norm", norm.item())
        return total


class Randoms(Program):
    """Random numbers of every kind, with states that are saved, restored and seeded anew in mid-step."""

    name = "randoms"
    features = (Feature.GENERATOR, Feature.RESEED, Feature.BATCH, Feature.NUMBER, Feature.READ)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight = torch.randn(6, 6, requires_grad=True)
        self.own, self.other = torch.Generator().manual_seed(seed + 1), torch.Generator().manual_seed(seed + 2)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.tensors, self.optimizers = {"weight": self.weight}, {"sgd": self.optimizer}
        self.generators = {"own": self.own, "other": self.other}

    def step(self, i: int) -> torch.Tensor:
        inputs = torch.from_numpy(np.random.standard_normal((4, 6)).astype(np.float32))
        hidden = F.dropout(inputs @ self.weight, 0.2) + torch.randn(6, generator=self.own)
        before = torch.get_rng_state()
        noise = torch.rand(4, 6)
        torch.set_rng_state(before)
        again = torch.rand(4, 6)
        self.note("again", torch.equal(noise, again))
        hidden = hidden[torch.randperm(4)] * torch.empty(4, 6).bernoulli_(0.7, generator=self.other)
        chosen = torch.multinomial(hidden.detach().softmax(-1), 2, generator=self.own)
        hidden = hidden.gather(1, chosen) + torch.normal(0.0, 0.1, (4, 2)) + again[:, :2]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(i)
            hidden = hidden + torch.randint(3, (4, 2)) * 0.1
        scale = random.uniform(0.5, 1.0)
        self.note("scale", scale, "next", torch.rand(()).item())
        torch.manual_seed(self.seed + 7 * i)
        self.own.manual_seed(i)
        loss = (F.dropout(hidden, 0.5) * scale).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.weight.add_(torch.empty_like(self.weight).exponential_().log_normal_(0, 0.1), alpha=1e-3)
        return loss.detach()


class Branches(Program):
    """Branches, nested loops of changing count, and an early exit, all decided by values."""

    name = "branches"
    features = (Feature.READ, Feature.BRANCH, Feature.LOOP, Feature.BATCH, Feature.NUMBER, Feature.IDENTITY)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight, self.gate = torch.randn(5, 5, requires_grad=True), torch.randn(5, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight, self.gate], lr=0.05)
        self.tensors, self.optimizers = {"weight": self.weight, "gate": self.gate}, {"sgd": self.optimizer}

    def settle(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shrink the values until they are small, at most five times."""
        for turn in range(5):
            size = hidden.detach().abs().max().item()
            self.note("turn", turn, size)
            if size < 0.8:
                return hidden
            hidden = hidden * (0.8 / size) if turn == 2 else hidden.tanh()
        return hidden.clamp(-1, 1)

    def step(self, i: int) -> torch.Tensor:
        hidden = torch.from_numpy(self.array(i, 3, 5)) * (1 + i % 3) @ self.weight
        for outer in range(1 + i % 3):
            hidden = hidden.sin() if outer else hidden + 0.1
            for inner in range(outer):
                hidden = hidden + self.gate * (inner + 1)
        hidden = self.settle(hidden)
        if hidden.mean() > 0:
            self.note("up")
            hidden = hidden * self.gate.sigmoid()
        elif i % 2:
            hidden = hidden - self.gate.cos()
        loss = hidden.square().mean() + 0 * self.gate.sum()
        self.optimizer.zero_grad()
        loss.backward()
        while float(self.weight.grad.norm()) > 0.5:
            self.weight.grad.mul_(0.5)
            self.note("halved")
        self.optimizer.step()
        self.note("stepped")
        return loss.detach()


class Clipped(torch.autograd.Function):
    """Rounds; the gradient passes where the value was small. The second of two results has no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, limit: float, log: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        inside = tensor.abs() < limit
        ctx.save_for_backward(inside)
        ctx.log, ctx.limit = log, limit
        ctx.mark_non_differentiable(inside)
        return (tensor * 4).round() / 4, inside

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        ctx.log.append(f"clipped {ctx.limit.hex()}")
        return gradient * inside / ctx.limit, None, None


class AddedInPlace(torch.autograd.Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor.add_(added)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient if ctx.needs_input_grad[0] else None, gradient.sum(0) if ctx.needs_input_grad[1] else None


class Recomputing(torch.autograd.Function):
    """Keeps only its input, and runs a forward with autograd inside of its backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return (inputs @ weight).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = (inputs[0] @ inputs[1]).tanh()
        return torch.autograd.grad(output, inputs, gradient)


class Functions(Program):
    """Custom autograd Functions: what they save, change in place, and run as Python in their backward."""

    name = "functions"
    features = (Feature.BATCH, Feature.NUMBER)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight, self.bias = torch.randn(6, 6, requires_grad=True), torch.zeros(6, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight, self.bias], lr=0.1)
        self.tensors, self.optimizers = {"weight": self.weight, "bias": self.bias}, {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        inputs = torch.from_numpy(self.array(i, 3, 6))
        hidden = Recomputing.apply(inputs, self.weight)
        hidden = AddedInPlace.apply(hidden * 2, self.bias)
        rounded, inside = Clipped.apply(hidden, 1.0 + 0.1 * i, self.log)
        loss = (rounded - inputs).square().mean() + (inside * hidden).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.note("stepped")
        self.optimizer.step()
        return loss.detach()


class Hooks(Program):
    """Hooks on tensors, parameters, modules and autograd's nodes, some removed in mid-step; they write to the log."""

    name = "hooks"
    features = (Feature.BRANCH, Feature.BATCH, Feature.NUMBER, Feature.READ)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.factor, self.now = 1.0, 0
        first, last = self.net[0], self.net[2]
        first.weight.register_hook(self.scaled)
        last.bias.register_post_accumulate_grad_hook(self.at_once)
        self.net[1].register_forward_hook(lambda module, inputs, output: output + 0.01)
        self.net.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
        last.register_full_backward_hook(self.passed)
        self.optimizer = torch.optim.SGD([*first.parameters(), last.weight], lr=0.1)
        self.modules, self.optimizers = {"net": self.net}, {"sgd": self.optimizer}

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        self.note("scaled", self.factor)
        return gradient * self.factor

    def at_once(self, parameter: torch.Tensor) -> None:
        """Update the parameter in the backward, and release its gradient."""
        self.note("at once", parameter.grad.abs().sum().item())
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    def passed(
        self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        self.note("passed", len(inputs))
        return (inputs[0].clamp(-0.05, 0.05),) if self.now % 3 else None

    def step(self, i: int) -> torch.Tensor:
        self.factor, self.now = 1 / (1 + i), i
        self.optimizer.zero_grad()
        hidden = torch.from_numpy(self.array(i, 4, 5))
        inner = self.net[0](hidden)
        handles = [
            inner.register_hook(lambda gradient: self.note("inner")),
            inner.register_hook(lambda gradient: gradient * 2),
        ]
        if i % 2:
            handles.pop().remove()
        output = self.net(hidden)
        output.grad_fn.register_hook(lambda inputs, gradients: self.note("node", len(gradients)))
        output.retain_grad()
        loss = output.square().mean() + inner.mean()
        loss.backward()
        with torch.no_grad():
            self.net[0].bias.grad.add_(output.grad.sum() * 1e-2)
        self.optimizer.step()
        return loss.detach()


class Accumulation(Program):
    """A changing number of micro-batches, clipped gradients, a skipped step, and a rate that follows the loss."""

    name = "accumulation"
    features = (Feature.SCHEDULE, Feature.LOOP, Feature.BRANCH, Feature.READ, Feature.BATCH, Feature.NUMBER)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
        self.first, self.last = (
            torch.optim.SGD(self.net[place].parameters(), lr=0.1, momentum=0.5) for place in (0, 2)
        )
        self.cycle = OneCycleLR(self.first, max_lr=0.2, total_steps=200)
        self.plateau = ReduceLROnPlateau(self.last, factor=0.5, patience=0)
        self.modules, self.optimizers = {"net": self.net}, {"first": self.first, "last": self.last}

    def step(self, i: int) -> torch.Tensor:
        count, total = 1 + i % 3, 0.0
        for number in range(count):
            loss = (self.net(torch.from_numpy(self.array(10 * i + number, 3, 6))) - 1).square().mean()
            (loss / count).backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.net[0].parameters(), 0.4, error_if_nonfinite=True)
        torch.nn.utils.clip_grad_value_(self.net[2].parameters(), 0.1)
        # As after a loss scale that was too large.
        if norm.item() > 1.0:
            self.note("skipped", norm.item())
        else:
            self.first.step()
        self.last.step()
        # The first optimizer's gradients accumulate if they were not used.
        self.last.zero_grad()
        if i % 2:
            self.first.zero_grad(set_to_none=False)
        self.cycle.step()
        self.plateau.step(total.item())
        self.note("rates", self.cycle.get_last_lr()[0], self.last.param_groups[0]["lr"])
        return total


class Autocast(Program):
    """Nested sections in bfloat16, scaled losses, and a step that is skipped when a gradient overflows."""

    name = "autocast"
    features = (Feature.BATCH, Feature.NUMBER, Feature.BRANCH, Feature.READ)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.modules, self.optimizers = {"net": self.net}, {"adamw": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        inputs = torch.from_numpy(self.array(i, 4, 6))
        if i % 4 == 3:
            inputs = inputs * 1e30
        with torch.autocast("cpu", torch.bfloat16):
            # Uses a weight twice: the second time, its copy comes from autocast's cache.
            hidden = self.net[1](self.net[0](self.net[0](inputs)).relu())
            with torch.autocast("cpu", enabled=False):
                hidden = self.net[2](hidden.float())
            product = hidden @ hidden.t()
        self.note(product.dtype, hidden.dtype)
        loss = product.float().square().mean() + hidden[:, 0].mean() * inputs[0, 0]
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.note("scale", self.scaler.get_scale())
        return loss.detach()


class NumpyMemory(Program):
    """Arrays that share memory with tensors: inputs are overwritten in mid-step, and Python writes to results."""

    name = "numpy memory"
    features = (Feature.READ, Feature.LIBRARY, Feature.FROM_PYTHON)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.buffer = np.zeros((4, 5), np.float32)
        self.fed = torch.from_numpy(self.buffer)
        self.weight = torch.randn(5, 5, requires_grad=True)
        self.means = torch.zeros(5)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.tensors = {"weight": self.weight, "means": self.means, "fed": self.fed}
        self.optimizers = {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        self.buffer[:] = self.array(i, 4, 5)
        hidden = self.fed @ self.weight
        total = self.fed.sum(0)
        # As far as Python can tell, the fed values have been used by now.
        self.buffer[:] = -1
        self.buffer[0] = self.array(i + 1000, 5)
        hidden = hidden + self.fed * 0.1
        values = hidden.detach().clone().numpy()
        values *= 2
        scale = torch.tensor([float(values[0, 0]), 1.0 / (i + 1)])
        loss = (hidden * scale[1] + torch.from_numpy(values)).square().mean() + scale[0] * total.mean()
        self.optimizer.zero_grad()
        # Feed a copy, because the backward saves it and the memory is overwritten.
        copied = torch.tensor(self.buffer)
        (loss + (copied * hidden).mean()).backward()
        self.buffer += 1
        self.optimizer.step()
        self.means.numpy()[:] += np.asarray(self.weight.detach()).mean(0)
        self.note("means", float(self.means.numpy().sum()), "values", float(values.max()))
        return loss.detach()


class Identity(Program):
    """The same line takes another tensor in each step, and nothing else distinguishes the steps' operations."""

    name = "identity"
    features = (Feature.IDENTITY, Feature.CARRIED, Feature.BATCH)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
        self.optimizer = torch.optim.SGD(self.weights, lr=0.05)
        self.averages = [torch.zeros(4, 4), torch.ones(4, 4)]
        self.tensors = {
            **{f"weight{number}": weight for number, weight in enumerate(self.weights)},
            **{f"average{number}": average for number, average in enumerate(self.averages)},
        }
        self.optimizers = {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        inputs = torch.from_numpy(self.array(i, 3, 4))
        first, second, third = (self.weights[(i + place) % 3] for place in range(3))
        x, y = inputs @ first, inputs @ second + third[0]
        sum_value = (x if i % 2 else y) + 1
        product_value = (y if i % 2 else x) * 2
        # Python's containers determine the order.
        values = {"a": sum_value.sin(), "b": product_value.cos(), "c": (inputs @ third).tanh()}
        order = sorted(values, key=lambda key: (ord(key) * (i + 1)) % 5)
        total = values[order[0]] - values[order[1]] * values[order[2]]
        loss = total.square().mean() + sum(weight.square().mean() for weight in self.weights) * 0.01
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            # They swap places and names.
            self.averages[0].lerp_(self.weights[i % 3], 0.5)
            self.averages.reverse()
        self.note(*order)
        return loss.detach()


@dataclass
class Memory:
    hidden: torch.Tensor
    best: torch.Tensor | None = None


class Containers(Program):
    """Tensors in Python containers, carried from step to step, some with their graph, some freed in mid-step."""

    name = "containers"
    features = (Feature.CARRIED, Feature.BATCH, Feature.BRANCH, Feature.LOOP, Feature.READ, Feature.NUMBER)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.cell, self.out = nn.GRUCell(4, 5), nn.Linear(5, 4)
        self.average = copy.deepcopy(self.out)
        self.memory, self.replayed = Memory(torch.zeros(3, 5)), deque[torch.Tensor](maxlen=4)
        self.by_name: dict[str, list[torch.Tensor]] = {"losses": []}
        self.optimizer = torch.optim.Adam([*self.cell.parameters(), *self.out.parameters()], lr=0.01)
        self.modules = {"cell": self.cell, "out": self.out, "average": self.average}
        self.optimizers = {"adam": self.optimizer}

    def state(self) -> dict[str, torch.Tensor]:
        carried = {
            "hidden": self.memory.hidden,
            **{f"replayed{number}": tensor for number, tensor in enumerate(self.replayed)},
        }
        if self.memory.best is not None:
            carried["best"] = self.memory.best
        return {**super().state(), **{name: tensor.detach().clone() for name, tensor in carried.items()}}

    def step(self, i: int) -> torch.Tensor:
        # Every other step runs a backward through the previous step's graph again.
        hidden = self.memory.hidden.detach() if i % 2 == 0 else self.memory.hidden
        self.replayed.append(torch.from_numpy(self.array(i, 3, 4)))
        losses = []
        for inputs in self.replayed:
            hidden = self.cell(inputs, hidden)
            losses.append((self.out(hidden) - inputs).square().mean())
        loss = torch.stack(losses).mean()
        self.optimizer.zero_grad()
        loss.backward(retain_graph=i % 2 == 0)
        if i % 2:
            self.optimizer.step()
        self.memory.hidden = hidden
        self.note("replayed", len(losses))
        if self.memory.best is None or loss.detach() < self.memory.best:
            self.memory.best = loss.detach().clone()
        self.by_name["losses"].append(loss.detach())
        if len(self.by_name["losses"]) == 3:
            self.note("mean", torch.stack(self.by_name.pop("losses")).mean().item())
            self.by_name["losses"] = []
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.out.parameters(), strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)
        return loss.detach()


class Modes(Program):
    """Sections without autograd and in inference mode, parameters that freeze and thaw, a gradient penalty."""

    name = "modes"
    features = (Feature.BATCH, Feature.BRANCH, Feature.READ, Feature.NUMBER)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Softplus(), nn.Dropout(0.2), nn.Linear(6, 1))
        self.target = torch.zeros(3, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.modules, self.optimizers, self.tensors = (
            {"net": self.net},
            {"adam": self.optimizer},
            {"target": self.target},
        )

    @torch.no_grad()
    def update(self, output: torch.Tensor) -> None:
        self.target.mul_(0.7).add_(output, alpha=0.3)

    def step(self, i: int) -> torch.Tensor:
        inputs = torch.from_numpy(self.array(i, 3, 5)).requires_grad_()
        self.net[0].bias.requires_grad_(i % 3 != 1)
        self.net.eval()
        with torch.inference_mode():
            looked = self.net(inputs)
            self.note("looked", looked.mean().item(), looked.is_inference())
        self.net.train()
        self.update(self.net(inputs).detach())
        output = self.net(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        with torch.set_grad_enabled(i % 2 == 0):
            extra = output.exp().mean()
        self.note("differentiable", extra.requires_grad)
        loss = (output - self.target).square().mean() + penalty + 0.01 * extra
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Masks(Program):
    """Sizes that depend on data (masks, nonzero, unique), and every way in which Python reads a value in mid-step."""

    name = "masks"
    features = (Feature.DATA_SIZE, Feature.READ, Feature.BATCH, Feature.NUMBER, Feature.BRANCH, Feature.SHAPE)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight = torch.randn(5, 5, requires_grad=True)
        self.counts = torch.zeros(4, dtype=torch.long)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.05)
        self.tensors, self.optimizers = {"weight": self.weight, "counts": self.counts}, {"sgd": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        hidden = torch.from_numpy(self.array(i, 4, 5)) @ self.weight
        positive = hidden[hidden > 0]
        places = (hidden.detach().abs() > 1).nonzero()
        kinds, number = torch.from_numpy(self.integers(i, 4, 6)).unique(return_counts=True)
        self.counts.index_add_(0, kinds, number)
        hidden = hidden.clone()
        hidden[hidden < -1] = -1
        hidden = hidden.index_put((places[:, 0], places[:, 1]), torch.tensor(0.5), accumulate=True)
        self.note("sizes", len(positive), places.tolist(), kinds.numpy().tolist())
        self.note(
            "printed", repr(hidden[0].detach()), f"{hidden[0, 0]:.5f}", int(self.counts[0]), bool((hidden > 2).any())
        )
        copies = pickle.loads(pickle.dumps(hidden.detach()[0])), copy.deepcopy(places)
        repeated = torch.repeat_interleave(hidden[0, :4], self.counts.clamp(max=3))
        loss = positive.square().sum() * 0.1 + hidden.square().mean() + repeated.sum() * 0.01 + copies[0].sum() * 0
        if len(places) % 2:
            loss = loss + torch.masked_select(hidden, hidden > 0.5).sum() * 0.01
        if self.weight.abs().max() in torch.tensor([9.0]) or 3 in kinds:
            self.note("three")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class ComplexNumbers(Program):
    """Complex numbers: transforms, lazy conjugates and negations, real views of complex memory written in place."""

    name = "complex numbers"
    features = (Feature.BATCH, Feature.NUMBER)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight = torch.randn(5, 5, dtype=torch.complex64, requires_grad=True)
        self.kept = torch.zeros(3, 5, dtype=torch.complex64)
        self.optimizer = torch.optim.Adam([self.weight], lr=0.01)
        self.tensors, self.optimizers = {"weight": self.weight, "kept": self.kept}, {"adam": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        spectrum = torch.fft.rfft(torch.from_numpy(self.array(i, 3, 8))) @ self.weight
        turned = spectrum.conj()
        lazy = turned.imag
        self.note("lazy", turned.is_conj(), lazy.is_neg(), spectrum.mH.is_conj())
        product = spectrum @ turned.mT + spectrum.mH.mT * (1 + 0.5j * i) @ self.weight.conj()[:, :3]
        signal = torch.fft.irfft(turned * torch.polar(torch.ones(5), torch.arange(5.0)))
        with torch.no_grad():
            self.kept.real.add_(lazy, alpha=0.5)
            torch.view_as_real(self.kept)[..., 1] = spectrum.angle()
            self.kept.conj().mul_(0.9j)
            self.kept[0] = turned[0]
        loss = (
            signal.square().mean()
            + product.abs().mean() * 0.01
            + (lazy * spectrum.real).mean()
            + torch.view_as_real(spectrum * 1).amax()
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Recompute(Program):
    """Activations that both of torch's checkpoints recompute, with the forward's random numbers."""

    name = "recompute"
    features = (Feature.RESEED, Feature.BATCH, Feature.NUMBER)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(4))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.modules, self.optimizers = {"net": self.net}, {"adam": self.optimizer}

    def noisy(self, hidden: torch.Tensor, scale: float) -> torch.Tensor:
        # Called twice per step.
        self.note("noisy", scale)
        return self.net[1](hidden) + torch.randn_like(hidden) * scale

    def step(self, i: int) -> torch.Tensor:
        hidden = torch.from_numpy(self.array(i, 3, 6)).requires_grad_()
        hidden = checkpoint(self.net[0], hidden, use_reentrant=False)
        hidden = checkpoint(self.noisy, hidden, 0.1 / (i + 1), use_reentrant=True)
        # Draws other numbers in the recomputation.
        hidden = checkpoint(nn.functional.dropout, hidden, 0.2, use_reentrant=False, preserve_rng_state=False)
        hidden = checkpoint_sequential(self.net[2:], 2, hidden, use_reentrant=False)
        loss = (hidden - 0.5).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.note("drawn", torch.rand(()).item())
        return loss.detach()


PROGRAMS: dict[str, Build] = {program.name: program for program in Program.__subclasses__()}
