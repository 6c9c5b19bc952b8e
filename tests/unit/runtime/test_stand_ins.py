"""Stand-ins for features that manage memory themselves: that memory stays, the rest moves, and no bit changes.
Stand-ins that break an assumption are noticed.

Only the use of memory is imitated: who allocates, who holds, who writes again. No kernel of the real feature runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bpipe.runtime import RuntimeFault, graph
from bpipe.runtime.checksums import Verifier
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.transport.config import TransferConfig
from tests.unit.runtime.loop import WIDTH, Layer, new_weight, run_iteration, schedule, stage
from tests.unit.runtime.test_engine import Late, LateTransport

CPU = torch.device("cpu")
ITERATIONS = 2
# The most micro-batches in flight; owners have one buffer for each.
SLOTS = 8


class Double(torch.autograd.Function):
    """Copies its input into the given memory, and saves that memory for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        memory.copy_(x)
        ctx.save_for_backward(memory)
        return 2 * memory.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (memory,) = ctx.saved_tensors
        return 2 * memory.cos() * gradients[0], None


class Owner:
    """Lends memory to layers, one buffer for each micro-batch in flight."""

    def __init__(self, make: Callable[[], torch.Tensor], holds: bool = True) -> None:
        self.make, self.holds = make, holds
        self.buffers: list[torch.Tensor] = [make() for _ in range(SLOTS)] if holds else []
        self.lent = 0

    def lend(self) -> torch.Tensor:
        number, self.lent = self.lent % SLOTS, self.lent + 1
        return self.buffers[number] if self.holds else self.make()

    def layer(self, weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        return stage(weight, Double.apply(x, self.lend()))  # type: ignore[no-untyped-call]


def empty() -> torch.Tensor:
    return torch.empty(16, WIDTH)


def without_an_allocator() -> torch.Tensor:
    return torch.frombuffer(bytearray(16 * WIDTH * 4), dtype=torch.float32).view(16, WIDTH)


def trained(
    layer: Layer, verifier: Verifier | None = None, transport: Any = None
) -> tuple[torch.Tensor, Engine | None]:
    """The gradient after a few iterations, with an engine if there is a verifier."""
    plan, weight, engine = schedule(), new_weight(), None
    if verifier is not None:
        transfers = TransferConfig(minimum_bytes=1, timeout_s=1.0, poison=True)
        config = EngineConfig("rank 0", CPU, transfers, verifier=verifier, links={3: "gloo"})
        engine = Engine(plan, 0, transport or LateTransport(), config)
    for _ in range(ITERATIONS):
        run_iteration(engine, plan, weight, forward=layer)
    assert weight.grad is not None
    return weight.grad, engine


def moves_right(layer_of: Callable[[], Layer]) -> tuple[Engine, Verifier]:
    """Train a stand-in with and without an engine: not one bit differs."""
    verifier = Verifier("rank 0", CPU, math.inf)
    gradient, engine = trained(layer_of(), verifier)
    assert torch.equal(gradient, trained(layer_of())[0])
    assert engine is not None
    assert engine.moved_bytes[0] > 0
    assert verifier.certificate.iterations == ITERATIONS
    return engine, verifier


LENT_BYTES = 16 * WIDTH * 4


def staying(engine: Engine) -> int:
    return sum(nbytes for holder, nbytes in engine.shares[0].staying.items() if "held elsewhere" in holder)


def test_a_buffer_that_somebody_holds_stays() -> None:
    """Like a dispatcher's communication buffers: their owner holds a reference, so they never count as alone."""
    owners = []

    def layer() -> Layer:
        owners.append(Owner(empty))
        return owners[-1].layer

    engine, _ = moves_right(layer)
    assert staying(engine) >= LENT_BYTES
    assert all(buffer.untyped_storage().nbytes() == LENT_BYTES for buffer in owners[0].buffers)


def test_memory_without_an_allocator_stays() -> None:
    """Userbuffers wrap a pointer: only the graph holds the tensor, but its memory cannot be freed."""
    engine, _ = moves_right(lambda: Owner(without_an_allocator, holds=False).layer)
    assert staying(engine) >= LENT_BYTES
    # The same memory from torch's allocator moves.
    own, _ = moves_right(lambda: Owner(empty, holds=False).layer)
    assert staying(own) == staying(engine) - LENT_BYTES
    assert own.moved_bytes[0] == engine.moved_bytes[0] + LENT_BYTES


class Offloading:
    """Autograd hooks that take what a part of a layer saves: a copy, or the tensor itself."""

    def __init__(self, copies: bool) -> None:
        self.copies = copies
        self.groups: dict[int, torch.Tensor] = {}
        self.num_packed = self.num_given_back = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        self.num_packed += 1
        self.groups[self.num_packed] = tensor.clone() if self.copies else tensor
        return self.num_packed

    def unpack(self, tag: Any) -> torch.Tensor:
        if isinstance(tag, torch.Tensor):
            return tag
        self.num_given_back += 1
        return self.groups.pop(tag)

    def layer(self, weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            taken = (x.sin().exp() * x).tanh()
        return stage(weight, taken)


@pytest.mark.parametrize("copies", [True, False])
def test_what_hooks_keep_elsewhere_stays_and_the_rest_moves(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like fine-grained offloading: tensors that its hooks packed are not inspected, because that would unpack them."""
    owners: list[Offloading] = []

    def layer() -> Layer:
        owners.append(Offloading(copies))
        return owners[-1].layer

    with pytest.raises(ValueError, match="saved a tensor through a hook of tests"):
        trained(layer(), Verifier("rank 0", CPU, math.inf))
    monkeypatch.setattr(graph, "_ASIDE", {__name__})
    moves_right(layer)
    for owner in owners[1:]:
        assert owner.num_given_back == owner.num_packed > 0
        assert not owner.groups


class Graphed:
    """A captured part: static inputs, outputs and gradients per micro-batch in flight, rewritten at each replay."""

    def __init__(self) -> None:
        self.inputs, self.outputs, self.gradients = ([empty() for _ in range(SLOTS)] for _ in range(3))
        self.replayed = 0

    def layer(self, weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        number, self.replayed = self.replayed % SLOTS, self.replayed + 1
        pool = self

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
                pool.inputs[number].copy_(tensor)
                torch.sin(pool.inputs[number], out=pool.outputs[number])
                return pool.outputs[number].detach()

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
                torch.cos(pool.inputs[number], out=pool.gradients[number])
                return pool.gradients[number].mul_(gradients[0]).detach()

        # What follows saves the static output.
        return stage(weight, Replay.apply(x))  # type: ignore[no-untyped-call]


def test_a_static_pool_stays() -> None:
    """Like CUDA graphs of a part of each layer: what the rest of the layer saves moves."""
    pools = []

    def layer() -> Layer:
        pools.append(Graphed())
        return pools[-1].layer

    engine, _ = moves_right(layer)
    assert staying(engine) >= LENT_BYTES
    assert all(buffer.untyped_storage().nbytes() == LENT_BYTES for buffer in pools[0].outputs)


class Quantized(torch.autograd.Function):
    """A product that saves its operands in 8 or 4 bits with a scale per row; the module owns the weight's copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, cached: torch.Tensor, bits: int) -> torch.Tensor:
        scale = x.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        payload = (x / scale).round().to(torch.int8).view(torch.uint8)
        if bits == 4:
            payload = (payload[:, ::2] & 15) | (payload[:, 1::2] << 4)
        ctx.bits = bits
        ctx.save_for_backward(payload, scale, cached)
        return x @ cached.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        payload, scale, cached = ctx.saved_tensors
        if ctx.bits == 4:
            low, high = payload << 4, payload & 240
            signed = torch.stack((low, high), 2).flatten(1).view(torch.int8).float() / 16
        else:
            signed = payload.view(torch.int8).float()
        return gradients[0] @ cached.to(scale.dtype).t(), (signed * scale).t() @ gradients[0], None, None


@pytest.mark.parametrize("bits", [8, 4])
def test_eight_bit_payloads_and_their_scales_come_back(bits: int) -> None:
    def layer_of() -> Layer:
        # Made once and saved by every micro-batch, so it belongs to the module.
        cached = new_weight().detach().half()
        return lambda weight, x: stage(weight, Quantized.apply(x, weight, cached, bits))  # type: ignore[no-untyped-call]

    engine, verifier = moves_right(layer_of)
    plain, certifier = moves_right(lambda: stage)
    quantized = engine.moved_bytes[0] - plain.moved_bytes[0]
    assert quantized >= 16 * WIDTH * bits // 8 + 16 * 4
    assert verifier.certificate.storages > certifier.certificate.storages


class Reaching(LateTransport):
    """Makes one mistake of an owner or a link, at the second transfer of its kind."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self._wrong, self._puts, self._gets = wrong, 0, 0

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
        self._puts += 1
        pending, second = super().put(host_buffer, tensors), self._puts == 2

        def late() -> None:
            if second and self._wrong == "an owner writes before it was read":
                tensors[1].view(torch.float32).mul_(2)
            pending.wait()
            stored = self.taken[host_buffer]
            if second and self._wrong == "an owner writes after it was read":
                tensors[1].view(torch.float32).mul_(2)
            elif second and self._wrong == "a host buffer is given to two":
                stored[1].copy_(torch.arange(stored[1].numel()) % 7)
            elif second and self._wrong == "two storages of one size are exchanged":
                first, twin = _twins(stored)
                stored[first], stored[twin] = stored[twin], stored[first]
            elif second and self._wrong == "rows arrive in another order":
                stored[1] = stored[1].view(16, -1).flip(0).flatten()
            elif second and self._wrong == "the end is cut off":
                stored[1][-3:] = 0

        return Late(late)

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
        self._gets += 1
        if self._gets == 2 and self._wrong == "a load is not waited for":
            self.taken.pop(host_buffer)
            return Late(lambda: None)
        if self._gets == 2 and self._wrong == "a load is an older one's":
            older = self.older
            return Late(lambda: [tensor.copy_(stored) for tensor, stored in zip(tensors, older, strict=True)])  # type: ignore[arg-type, return-value]
        self.older = [tensor.clone() for tensor in self.taken[host_buffer]]
        return super().get(host_buffer, tensors)


def _twins(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """The positions of the first two tensors of equal size."""
    sizes = [tensor.numel() for tensor in tensors]
    first = next(number for number, size in enumerate(sizes) if sizes.count(size) > 1)
    return first, sizes.index(sizes[first], first + 1)


WRONG = (
    "an owner writes before it was read",
    "an owner writes after it was read",
    "a host buffer is given to two",
    "two storages of one size are exchanged",
    "rows arrive in another order",
    "the end is cut off",
    "a load is not waited for",
    "a load is an older one's",
)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_hypothesis_is_noticed_before_weights_are_updated(wrong: str) -> None:
    subject = "memory being evicted to" if wrong in WRONG[:2] else "data that came back from"
    place = r"iteration 1 since the start, micro-batch \d of stage 0, storage \d+ of .*\(float32 \[.*\], saved by "
    with pytest.raises(RuntimeFault, match=f"^rank 0: {subject} stage 3 over gloo .*{place}"):
        trained(stage, Verifier("rank 0", CPU, 1), Reaching(wrong))


def test_memory_of_two_micro_batches_is_nobodys_alone() -> None:
    """An owner lends one buffer several times and drops it: a reference count alone would allow its eviction."""

    def layer_of() -> Layer:
        shared: list[torch.Tensor] = []

        def layer(weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
            if not shared:
                shared.append(torch.ones(16, WIDTH))
            scale = shared[0]
            if len(shared) == 3:
                shared.clear()
            else:
                shared.append(scale)
            return stage(weight, x * scale)

        return layer

    moves_right(layer_of)
