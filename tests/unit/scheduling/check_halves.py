"""Backwards of Megatron's own layers, whole and in halves, compute the same in every bit."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._C._distributed_c10d import HashStore
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.runtime import RuntimeFault
from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.halves import Halves, ask, delaying

HIDDEN, LENGTH, BATCH = 64, 16, 2
MICROBATCHES = 4
# Halves far apart, several micro-batches in flight, forwards between the halves of others.
LATE = "F0 F1 F2 I0 I1 F3 W0 I2 I3 W1 W2 W3"
AT_ONCE = "F0 I0 W0 F1 F2 I1 W1 I2 W2 F3 I3 W3"
OUT_OF_STEP = "F0 F1 I0 I1 W0 W1 F2 F3 I2 W2 I3 W3"
ORDERS = (LATE, AT_ONCE, OUT_OF_STEP)


def config(**settings: Any) -> TransformerConfig:
    fields = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        **settings,
    }
    return TransformerConfig(**fields)


class Layers(torch.nn.Module):
    """A stage in the middle: layers only."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = config(**settings)
        spec = get_gpt_layer_local_spec(
            num_experts=self.config.num_moe_experts, normalization=self.config.normalization
        )
        self.block = TransformerBlock(self.config, spec, pre_process=False, post_process=False)

    def forward(self, received: torch.Tensor, microbatch: int) -> torch.Tensor:
        self.block.set_input_tensor(received)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return self.block(hidden_states=None, attention_mask=mask)


class Thrice(torch.nn.Module):
    """One weight that three consecutive layers share: the sum of only two gradients would not depend on their order."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = config(**settings)
        self.linear = ColumnParallelLinear(
            HIDDEN, HIDDEN, config=self.config, init_method=self.config.init_method, bias=True, skip_bias_add=False
        )

    def forward(self, received: torch.Tensor, microbatch: int) -> torch.Tensor:
        hidden = received
        for _ in range(3):
            hidden = self.linear(torch.tanh(hidden))[0]
        return hidden


class Whole(torch.nn.Module):
    """A model that is one stage: the embedding's weight is the output layer's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = config(**settings)
        self.model = GPTModel(
            self.config, get_gpt_layer_local_spec(), 128, LENGTH, share_embeddings_and_output_weights=True
        )

    def forward(self, received: torch.Tensor, microbatch: int) -> torch.Tensor:
        tokens = torch.randint(128, (BATCH, LENGTH), generator=torch.Generator().manual_seed(microbatch))
        places = torch.arange(LENGTH).expand(BATCH, LENGTH)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return self.model(tokens, places, mask, labels=tokens)


class Engines(torch.nn.Module):
    """A module that delays its weight gradients in a queue of its own, as Transformer Engine's do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.waiting: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = hidden @ self.weight.detach().t()
        output.register_hook(
            lambda gradient: self.waiting.append(gradient.flatten(0, 1).t() @ hidden.detach().flatten(0, 1))
        )
        return output

    def backward_dw(self) -> None:
        done = self.waiting.pop(0)
        self.weight.grad = done if self.weight.grad is None else self.weight.grad + done


Engines.__module__ = "transformer_engine.pytorch.pretended"


class Mixed(Thrice):
    """Megatron's and Transformer Engine's layers in one stage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.engines = Engines()

    def forward(self, received: torch.Tensor, microbatch: int) -> torch.Tensor:
        return self.engines(super().forward(received, microbatch))


class Besides(Thrice):
    """Uses the weight of a linear layer in a penalty, too."""

    def forward(self, received: torch.Tensor, microbatch: int) -> torch.Tensor:
        return super().forward(received, microbatch) + self.linear.weight.square().sum()


class Frozen(Thrice):
    """The linear layer's input needs no gradient, so it has no backward for inputs at all."""

    def forward(self, received: torch.Tensor, microbatch: int) -> torch.Tensor:
        return self.linear(received.detach())[0] + received


@dataclass(frozen=True)
class Case:
    """A kind of stage and its settings. `wrapped`: its gradients are reduced over data-parallel ranks, here one."""

    kind: Callable[..., torch.nn.Module] = Layers
    settings: tuple[tuple[str, Any], ...] = ()
    wrapped: bool = False

    def make(self) -> torch.nn.Module:
        tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        torch.manual_seed(1234)
        settings = dict(self.settings)
        model: Any = self.kind(**settings).to(settings.get("params_dtype", torch.float32))
        for parameter in model.parameters():
            # Norms and biases begin with ones and zeros, for which a wrong sum may look right.
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) / 50)
        if self.wrapped:
            reduction = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
            model = DistributedDataParallel(model.config, reduction, model)
            model.zero_grad_buffer()
        return model


def case(kind: Callable[..., torch.nn.Module] = Layers, wrapped: bool = False, **settings: Any) -> Case:
    return Case(kind, tuple(settings.items()), wrapped)


SWIGLU = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_expert_capacity_factor": 2.0,
    "moe_pad_expert_input_to_capacity": True,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
}
FUSED = {"gradient_accumulation_fusion": True}
CASES = {
    "gpt": case(),
    "swiglu": case(**SWIGLU),
    "bias of queries": case(**SWIGLU, add_qkv_bias=True),
    "bf16": case(params_dtype=torch.bfloat16, bf16=True, pipeline_dtype=torch.bfloat16),
    "experts": case(**EXPERTS),
    "recomputed": case(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "attention recomputed": case(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "norms recomputed": case(recompute_granularity="selective", recompute_modules=["layernorm"]),
    "one weight thrice": case(Thrice),
    "nothing to send": case(Frozen),
    "tied": case(Whole),
    "reduced": case(wrapped=True),
    "reduced, one weight thrice": case(Thrice, wrapped=True),
    "fused": case(**FUSED, wrapped=True),
    "fused, one weight thrice": case(Thrice, **FUSED, wrapped=True),
    "fused, recomputed": case(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, **FUSED, wrapped=True
    ),
    "fused, tied": case(Whole, **FUSED, wrapped=True),
}


class Stage:
    """Runs passes of a stage as the pipelined loop does; random numbers by micro-batch replace the other stages."""

    def __init__(self, model: torch.nn.Module, halves: Halves | None = None) -> None:
        self.model, self.halves = model, halves
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.sent: dict[int, torch.Tensor | None] = {}
        self.config = self.model.config
        self.config.deallocate_pipeline_outputs = False
        self.dtype = next(model.parameters()).dtype

    def _drawn(self, microbatch: int, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(microbatch)).to(self.dtype)

    def forward(self, microbatch: int) -> None:
        received = self._drawn(microbatch, (LENGTH, BATCH, HIDDEN)).requires_grad_()
        self.held[microbatch] = received, self.model(received, microbatch)

    def backward(self, microbatch: int) -> None:
        received, output = self.held.pop(microbatch)
        schedules.backward_step(received, output, self._drawn(100 + microbatch, output.shape), self.config)
        self.sent[microbatch] = received.grad

    def run(self, order: str) -> None:
        """Run passes of stage 0 by their names; a B is a backward that is not split."""
        assert self.halves is not None
        for name in order.split():
            key = 0, int(name[1:])
            if name[0] == "W":
                self.halves.run(key)
            else:
                with nullcontext() if f"B{key[1]}" in order else self.halves.deferring(key):
                    (self.forward if name[0] == "F" else self.backward)(key[1])


@contextmanager
def installed(halves: Halves) -> Iterator[None]:
    patched = patches.install(halves.wraps())
    try:
        yield
    finally:
        patched.remove()
        halves.abandon()


def gradients(stage: Stage) -> dict[str, torch.Tensor | None]:
    """The gradients of the weights, and those sent to the previous stage."""
    result = {
        name: getattr(parameter, "main_grad", parameter.grad) for name, parameter in stage.model.named_parameters()
    }
    return result | {f"sent {microbatch}": sent for microbatch, sent in sorted(stage.sent.items())}


def whole(of: Case, order: str) -> Stage:
    """Run stock Megatron's forwards and backwards in this order."""
    stage = Stage(of.make())
    for name in order.split():
        if name[0] == "F":
            stage.forward(int(name[1:]))
        elif name[0] in "IB":
            stage.backward(int(name[1:]))
    return stage


def split(of: Case, order: str, halves: Halves | None = None) -> Stage:
    halves = halves or Halves()
    stage = Stage(of.make(), halves)
    with installed(halves):
        halves.begin()
        stage.run(order)
        halves.begin()
    return stage


def same(expected: dict[str, torch.Tensor | None], actual: dict[str, torch.Tensor | None], name: str) -> None:
    assert expected.keys() == actual.keys()
    for key, gradient in expected.items():
        gradient_ = actual[key]
        if gradient is None:
            assert gradient_ is None, f"{name}: {key} has a gradient"
            continue
        assert gradient_ is not None, f"{name}: {key} has no gradient"
        assert gradient.abs().sum() > 0, (
            f"{name}: {key} has a gradient of zeros, which would be equal to anything forgotten"
        )
        assert torch.equal(gradient, gradient_), f"{name}: {key} differs by {(gradient - gradient_).abs().max()}"


def check_halves_make_the_whole() -> None:
    for name, of in CASES.items():
        expected = gradients(whole(of, LATE))
        for order in ORDERS if name in ("gpt", "fused, one weight thrice") else (LATE,):
            same(expected, gradients(split(of, order)), f"{name}, {order}")


def check_kept_for_nothing_they_are_whole_at_once() -> None:
    halves = Halves(defers=False)
    assert halves.wraps() == {}
    stage = Stage(CASES["gpt"].make(), halves)
    with installed(halves):
        stage.run("F0 F1 I0 I1")
        assert halves.storages((0, 0)) == ()
        expected = gradients(stage)
        stage.run("W0 W1")
    same(expected, gradients(stage), "none")
    same(expected, gradients(whole(CASES["gpt"], "F0 F1 B0 B1")), "none")


def check_a_whole_backward_between_split_ones_stays_whole() -> None:
    order = "F0 F1 F2 I0 W0 B1 I2 W2"
    for name in ("gpt", "recomputed", "fused"):
        of = CASES[name]
        same(gradients(whole(of, order)), gradients(split(of, order)), name)


def told(of: Case, run: Callable[[Case, str], Stage], order: str) -> Counter[str]:
    """How often each parameter was reported as ready."""
    counts: Counter[str] = Counter()
    names: dict[int, str] = {}

    def ready(group: object, parameter: torch.Tensor, *_: object, **__: object) -> None:
        counts[names[id(parameter)]] += 1

    make = Case.make

    def named(of: Case) -> torch.nn.Module:
        model = make(of)
        names.update({id(parameter): name for name, parameter in model.named_parameters()})
        return model

    with (
        mock.patch.object(_ParamAndGradBucketGroup, "register_grad_ready", ready),
        mock.patch.object(Case, "make", named),
    ):
        run(of, order)
    return counts


def check_every_parameter_is_told_once_a_micro_batch() -> None:
    for name, of in CASES.items():
        if of.wrapped:
            counts = told(of, split, LATE)
            assert counts == told(of, whole, LATE), name
            assert set(counts.values()) == {MICROBATCHES}, name


def check_only_what_linear_layers_need_is_left_between() -> None:
    """Inputs and output gradients of four linear layers (1 to 3, 1 to 1, 1 to 4, 4 to 1): 16 per hidden unit."""
    halves = Halves()
    stage = Stage(case(num_layers=1).make(), halves)
    with installed(halves):
        stage.run("F0 F1")
        received = weakref.ref(stage.held[0][0])
        stage.run("I0")
        # As if passed on to the previous stage.
        stage.sent.clear()
        assert sum(storage.nbytes() for storage in halves.storages((0, 0))) == 16 * LENGTH * BATCH * HIDDEN * 4
        assert received() is None, "what was received is held although no linear layer computed on it"
        assert halves.storages((0, 1)) == ()
        weak = [StorageWeakRef(storage) for storage in halves.storages((0, 0))]
        stage.run("W0")
        assert all(reference.expired() for reference in weak)


def check_what_waits_is_freed_as_it_is_done() -> None:
    """W holds less and less: its first layer's tensors are gone before its last one runs."""
    halves = Halves()
    stage = Stage(case(num_layers=1).make(), halves)
    alive = []
    with installed(halves):
        stage.run("F0 I0")
        weak = [StorageWeakRef(storage) for storage in halves.storages((0, 0))]
        for parameter in stage.model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _: alive.append(sum(not reference.expired() for reference in weak))
            )
        stage.run("W0")
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] <= 2 < alive[0]


def check_halves_out_of_turn_are_refused() -> None:
    for order, message in {
        "F0 I0 W0 W0": "stage 0, micro-batch 0: W runs after 0 passes",
        "F0 W0": "W runs after 1 passes",
        "W0": "W runs after 0 passes",
        "F0 I0": "the W halves of stage 0, micro-batch 0 are left over from the last iteration",
    }.items():
        with pytest.raises(RuntimeFault, match=message):
            split(CASES["gpt"], order)
    halves = Halves()
    stage = Stage(CASES["gpt"].make(), halves)
    with installed(halves):
        stage.run("F0")
        with pytest.raises(RuntimeFault, match="a whole backward runs for a forward that was split"):
            stage.backward(0)
    with (
        halves.deferring((0, 0)),
        pytest.raises(RuntimeFault, match="one pass begins inside another"),
        halves.deferring((0, 1)),
    ):
        pass


def check_a_weight_that_is_used_otherwise_too_is_refused() -> None:
    of = case(Besides)
    with pytest.raises(RuntimeFault, match=r"a weight of \(64, 64\) is used by a linear"):
        split(of, LATE)
    same(gradients(whole(of, LATE)), gradients(split(of, LATE, Halves(defers=False))), "besides")


def check_a_module_that_keeps_its_own_halves_is_called_in_its_order() -> None:
    results = []
    for order in (AT_ONCE, LATE):
        halves = Halves()
        stage = Stage(case(Mixed).make(), halves)
        modules = delaying(stage.model.modules())
        assert modules == (stage.model.engines,), "Megatron's own layers have a backward_dw too, which does nothing"
        with installed(halves):
            for _ in range(2):
                halves.begin({0: modules})
                stage.run(order)
        assert stage.model.engines.waiting == []
        results.append(gradients(stage))
    same(*results, "mixed")
    halves = Halves()
    stage = Stage(case(Mixed).make(), halves)
    with installed(halves):
        halves.begin({0: delaying(stage.model.modules())})
        with pytest.raises(RuntimeFault, match=r"micro-batch 1: its W comes before that of micro-batch 0, whose I"):
            stage.run("F0 F1 I0 I1 W1")


def check_transformer_engine_is_asked_to_delay_where_it_can() -> None:
    usual = {
        "transformer_impl": "transformer_engine",
        "gradient_accumulation_fusion": True,
        "overlap_grad_reduce": False,
    }

    def asked(version: str, **changes: Any) -> SimpleNamespace:
        args = SimpleNamespace(**{**usual, "add_bias_linear": True, "delay_wgrad_compute": False, **changes})
        since = tuple(map(int, version.split(".")))
        able = lambda least: since >= tuple(map(int, least.split(".")))  # noqa: E731
        with mock.patch("megatron.scheduling.loop.halves.is_te_min_version", able):
            args.wraps = ask(args)
        return args

    assert asked("0.0.0", transformer_impl="local").wraps == {}
    args = asked("2.3.0")
    assert args.delay_wgrad_compute
    for version, changes, message in (
        ("2.2.0", {}, "defers weight gradients only from version 2.3.0 on; use --bpipe-keep-weights-halves none"),
        (
            "2.6.0",
            {"gradient_accumulation_fusion": False},
            "without --gradient-accumulation-fusion only from version 2.7.0 on",
        ),
        (
            "2.7.0",
            {"overlap_grad_reduce": True, "add_bias_linear": False},
            "with --overlap-grad-reduce only from version 2.8.0 on",
        ),
        ("2.8.0", {"overlap_grad_reduce": True}, "use --disable-bias-linear"),
    ):
        with pytest.raises(ValueError, match=message):
            asked(version, **changes)
    assert asked("2.8.0", overlap_grad_reduce=True, add_bias_linear=False).delay_wgrad_compute
    with pytest.raises(AssertionError, match="overlap_moe_expert_parallel_comm must be enabled"):
        config(delay_wgrad_compute=True)
    installed = patches.install(args.wraps)
    assert config(delay_wgrad_compute=True).delay_wgrad_compute
    assert not config().delay_wgrad_compute
    installed.remove()


def check_a_layer_that_is_given_something_unknown_is_whole_at_once() -> None:
    """A later Megatron may pass a linear layer an argument that affects the weight's gradient, too."""

    def later(input, weight, bias, output_dtype=None):  # type: ignore[no-untyped-def]
        return tensor_parallel.linear_with_grad_accumulation_and_async_allreduce(
            input, weight, bias, False, False, False
        )

    halves, weight = Halves(), torch.nn.Parameter(torch.ones(2, 2))
    linear = halves._wrap_linear(later)
    with halves.deferring((0, 0)):
        known_output = linear(torch.ones(1, 2, requires_grad=True), weight, None, output_dtype=None)
        unknown = linear(torch.ones(1, 2, requires_grad=True), weight, None, output_dtype=torch.float32)
    (of_known, of_unknown) = (
        {next_ for next_, _ in output.grad_fn.next_functions} for output in (known_output, unknown)
    )
    assert {type(node).__name__ for node in of_known if node} == {"AccumulateGrad"}
    assert len([node for node in of_unknown if node]) == len([node for node in of_known if node]) + 1
    halves.abandon()


def setup() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
