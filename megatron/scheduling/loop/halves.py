"""Keep the weights' half of a backward that a schedule splits, until it asks for it: W, long after I.

In: passes of Megatron's model, each with the stage and micro-batch it is of. Out: the same gradients, to the bit, of
every weight, at another time. Knows no schedule and no engine.

Only linear layers are split, the rest of a backward stays in I: norms, embeddings, routers, and the output layer, whose gradients are a
vocabulary wide. Three things make it exact:
  [1] a forward gets a weight that is cut off from its parameter. Autograd tells a parameter's hooks of every backward that could have
      reached it, even of one that brought nothing, and Megatron's reduction counts them
  [2] I is Megatron's own backward, told that somebody else computes the weight's gradient, as it is where the embedding's is put off:
      what tensor parallelism sends stays Megatron's
  [3] W is one backward over all of a micro-batch's linear layers: what several uses of a weight bring is summed before its parameter
      hears of it once, in the order in which a whole backward sums it
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from bpipe.runtime.errors import RuntimeFault
from bpipe.schedule.action import Key
from megatron.scheduling.hooks import patches

# Under what name an autograd node of a linear layer has the parameters that its forward did not see.
_CUT_OFF = "_bpipe_cut_off"
_WAY_OUT = "train with --bpipe-keep-weights-halves none"


class Keep(enum.StrEnum):
    """Mode of deferring W: nothing is kept, so that I is the whole backward and W is empty; or what linear layers
    need is kept."""

    NONE = "none"
    LINEAR = "linear"


class Delaying(Protocol):
    """A module that keeps the W of its own passes and runs the oldest of them when it is called: Transformer
    Engine's, built to."""

    def backward_dw(self) -> None: ...


@dataclass(slots=True)
class _Half:
    """One linear layer's part of W: (tokens, in) that it computed on, and (tokens, out) of gradients, each maybe with a
    batch between.

    `gathers`: the group over which `inputs` are a part of the sequence; None where they are whole. `fused`: the product
    is added to the parameter's main gradient by the kernel that computes it.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    inputs: torch.Tensor
    gradient: torch.Tensor
    gathers: Any
    fused: bool

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of the weight and of the bias, computed as Megatron's own backward does."""
        inputs = self.inputs
        if self.gathers is not None:
            length, *rest = inputs.shape
            whole = get_global_memory_buffer().get_tensor([length * self.gathers.size(), *rest], inputs.dtype, "mpu")
            layers.dist_all_gather_func(whole, inputs, group=self.gathers)
            inputs = whole
        gradient, inputs = prepare_input_tensors_for_wgrad_compute(self.gradient, inputs)
        of_weight = _add_up(inputs, gradient, self.weight) if self.fused else gradient.t().matmul(inputs)
        return of_weight, gradient.sum(dim=0) if self.bias is not None else None


def _add_up(inputs: torch.Tensor, gradient: torch.Tensor, weight: Any) -> torch.Tensor | None:
    """Add a weight's gradient to its main gradient; returns what stands for it towards autograd, so that the
    parameter's hooks run."""
    kernels = layers.fused_weight_gradient_mlp_cuda
    whole = weight.main_grad.dtype is torch.float32
    (kernels.wgrad_gemm_accum_fp32 if whole else kernels.wgrad_gemm_accum_fp16)(inputs, gradient, weight.main_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    shape, zero = list(weight.main_grad.shape), bool(getattr(weight, "zero_out_wgrad", False))
    if layers.HAVE_TE:
        dummy: torch.Tensor = layers.get_dummy_wgrad(shape, inputs.dtype, zero=zero)
        return dummy
    return (torch.zeros if zero else torch.empty)(shape, dtype=inputs.dtype, device=inputs.device)


class _Weights(torch.autograd.Function):
    """The node of one linear layer in W's graph: between the loss that there is not and the layer's parameters."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, half: _Half) -> torch.Tensor:
        ctx.half = half
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        # Not kept until the whole of W is over: its tensors are free once this layer is done.
        half, ctx.half = ctx.half, None
        return *half.gradients(), None


class _ForInputs:
    """What Megatron's backward reads of its forward, with the weight's part put off: it hands the gradient to a list
    and goes on."""

    use_bias = False
    # Otherwise it would compute the weight's gradient from what the list got; so it looks for a main gradient, and
    # finds none.
    gradient_accumulation_fusion = True
    main_grad = None
    wgrad_deferral_limit = 0

    def __init__(self, of: Any) -> None:
        self._of = of
        self.grad_output_buffer: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


@dataclass(slots=True)
class _Kept:
    """What waits for one micro-batch's W, in the order in which I put it off. `passes`: its forward, and its I."""

    halves: list[_Half] = field(default_factory=list)
    passes: int = 0


class Halves:
    """The weights' halves of one rank, by stage and micro-batch."""

    def __init__(self, keep: Keep = Keep.LINEAR) -> None:
        self._keep = keep
        self._kept: dict[Key, _Kept] = {}
        # Where what is put off goes now: a pass of a backward that is split is under way.
        self._now: list[_Half] | None = None
        self._watched: dict[int, Any] = {}
        self._delaying: Mapping[int, Sequence[Delaying]] = {}
        # By stage, whose W its delaying modules run next.
        self._next: dict[int, deque[int]] = {}

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """Return what to put in place of what, as long as a schedule splits backwards."""
        if self._keep is Keep.NONE:
            return {}
        return {patches.LINEAR: self._wrap_linear, patches.LINEAR_BACKWARD: self._wrap_backward}

    @contextlib.contextmanager
    def deferring(self, key: Key) -> Iterator[None]:
        """Defer W around the forward of a micro-batch whose backward is split, and around its I.

        `run` computes it later.
        """
        if self._now is not None:
            raise RuntimeFault(
                f"{_named(key)}: one pass begins inside another, so their deferred gradients could not be told apart"
            )
        kept = self._kept.setdefault(key, _Kept())
        kept.passes += 1
        if kept.passes == 2:
            self._next.setdefault(key[0], deque()).append(key[1])
        self._now = kept.halves
        try:
            yield
        finally:
            self._now = None

    def run(self, key: Key) -> None:
        """Run W: all that I left of this micro-batch, once."""
        kept = self._kept.pop(key, _Kept())
        if kept.passes != 2:
            raise RuntimeFault(
                f"{_named(key)}: W runs after {kept.passes} passes, not after its forward and its I: has it "
                "already run?"
            )
        _run(kept.halves)
        self._run_delaying(key)

    def _run_delaying(self, key: Key) -> None:
        stage, microbatch = key
        waiting, modules = self._next[stage], self._delaying.get(stage, ())
        if modules and waiting[0] != microbatch:
            raise RuntimeFault(
                f"{_named(key)}: its W comes before that of micro-batch {waiting[0]}, whose I came first; "
                "Transformer Engine's layers keep deferred gradients in the order of I. Use another schedule, or "
                f"{_WAY_OUT}"
            )
        waiting.remove(microbatch)
        for module in modules:
            module.backward_dw()

    def storages(self, key: Key) -> tuple[torch.UntypedStorage, ...]:
        """Return what is held for this micro-batch's W, each storage once."""
        found = {}
        for half in self._kept.get(key, _Kept()).halves:
            for tensor in (half.inputs, half.gradient):
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage
        return tuple(found.values())

    def begin(self, delaying: Mapping[int, Sequence[Delaying]] | None = None) -> None:
        """Begin an iteration: nothing may be left of the last one.

        `delaying[stage]`: the modules that keep a W themselves.
        """
        if self._kept:
            left = ", ".join(map(_named, self._kept))
            raise RuntimeFault(
                f"the W halves of {left} are left over from the last iteration: its weights lack their gradients"
            )
        self._delaying = delaying or {}
        self._next.clear()

    def abandon(self) -> None:
        """Drop everything, and let go of the parameters: the run is over."""
        self._kept.clear()
        self._now = None
        while self._watched:
            self._watched.popitem()[1].remove()

    # -- what is put in place of Megatron's
    # -----------------------------------------------------------------------------------------

    def _wrap_linear(self, linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        signature = inspect.signature(linear)
        further = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if patches.is_further(parameter, patches.LINEAR)
        }

        @functools.wraps(linear)
        def run(input: torch.Tensor, weight: Any, bias: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            given = signature.bind(input, weight, bias, *args, **kwargs).arguments
            # What this knows nothing of may have a part in the weight's gradient.
            unknown = any(given.get(name, default) != default for name, default in further.items())
            if unknown or not self._can_wait(input, weight, bias, given.get("grad_output_buffer")):
                return linear(input, weight, bias, *args, **kwargs)
            output = linear(input, weight.detach(), None if bias is None else bias.detach(), *args, **kwargs)  # [1]
            node: Any = output.grad_fn
            if getattr(node, "_forward_cls", None) is not layers.LinearWithGradAccumulationAndAsyncCommunication:
                raise RuntimeFault(
                    f"a linear layer's output comes from {node}, not from Megatron's own backward, which is the one "
                    f"that is split: {_WAY_OUT}"
                )
            setattr(node, _CUT_OFF, (weight, bias))
            for parameter in (weight, bias):
                self._watch(parameter)
            return output

        return run

    def _can_wait(self, inputs: torch.Tensor, weight: Any, bias: Any, grad_output_buffer: object) -> bool:
        """Return whether this layer's W is put off.

        Not where nobody asks for a backward or it would have no node; not of a weight that is made from others; not
        under autocast, which W would not be; and not of the output layer, be it that Megatron puts it off itself.
        """
        return (
            self._now is not None
            and torch.is_grad_enabled()
            and inputs.requires_grad
            and weight.requires_grad
            and weight.is_leaf
            and (bias is None or (bias.is_leaf and bias.requires_grad))
            and grad_output_buffer is None
            and not getattr(weight, "is_embedding_or_output_parameter", False)
            and not torch.is_autocast_enabled("cuda")
        )

    def _wrap_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, gradient: torch.Tensor) -> Any:
            if not hasattr(ctx, _CUT_OFF):
                return backward(ctx, gradient)
            if self._now is None:
                raise RuntimeFault(
                    "a whole backward runs for a forward that was split: its weight gradients would be lost"
                )
            for_inputs = _ForInputs(ctx)
            gradients = backward(for_inputs, gradient)  # [2]
            if len(for_inputs.grad_output_buffer) != 1:
                raise RuntimeFault(
                    f"Megatron's linear layer no longer defers a weight's gradient the way it did: {_WAY_OUT}"
                )
            # Cut off too: what the input was made from has been through its backward, and would stay until W.
            inputs = ctx.saved_tensors[0].detach()
            gathers = ctx.tp_group if ctx.sequence_parallel else None
            weight, bias = getattr(ctx, _CUT_OFF)
            self._now.append(_Half(weight, bias, inputs, gradient, gathers, ctx.gradient_accumulation_fusion))
            return gradients

        return run

    def _watch(self, parameter: Any) -> None:
        """See to it that nothing else than W brings gradients of a parameter that it brings gradients of."""
        if parameter is not None and id(parameter) not in self._watched:
            self._watched[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._only_in_weights)

    def _only_in_weights(self, parameter: torch.Tensor) -> None:
        if self._now is not None:
            raise RuntimeFault(
                f"a weight of {tuple(parameter.shape)} is used by a linear layer, whose part of its gradient waits "
                "for W, and by something else, whose part does not: they would be added separately, in a different "
                f"order, and reported twice; {_WAY_OUT}"
            )


def backward_of_weight(
    weight: torch.nn.Parameter, inputs: torch.Tensor, gradient: torch.Tensor, gathers: Any, fused: bool
) -> None:
    """Run W of one linear layer whose I was computed elsewhere; the arguments are those of a `_Half`."""
    _run([_Half(weight, None, inputs, gradient, gathers, fused)])


def _run(halves: list[_Half]) -> None:
    """One backward over all of them, in the order in which they were put off; the list is empty afterwards."""
    nodes = []
    with torch.enable_grad():
        # Backwards: autograd begins with the node that was made last, and a whole backward began with what was put off
        # first.
        while halves:
            half = halves.pop()
            nodes.append(_Weights.apply(half.weight, half.bias, half))
            del half
    if nodes:
        # Nobody reads these gradients.
        torch.autograd.backward(nodes, [nodes[0].detach()] * len(nodes))  # [3]


def _named(key: Key) -> str:
    return f"stage {key[0]}, micro-batch {key[1]}"
