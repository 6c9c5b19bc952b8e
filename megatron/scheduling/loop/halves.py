"""Defer the weights' half of a backward that a schedule splits: W, long after I.

All gradients of weights are the same, to the bit, at another time. Only linear layers are split. The rest of a backward
stays in I: norms, embeddings, routers, and the output layer, whose gradients are as wide as the vocabulary. Three things
make it exact:
  [1] A forward gets a weight that is detached from its parameter. Autograd calls a parameter's hooks for every backward that
      could have reached it, even one that brought nothing, and Megatron's reduction counts these calls.
  [2] I is Megatron's own backward, configured as if the weight's gradient were computed elsewhere, as Megatron does it for a
      deferred embedding. So tensor-parallel communication stays Megatron's.
  [3] W is one backward over all linear layers of a micro-batch. What several uses of a weight bring is summed before its
      parameter's hooks run once, in the order in which a whole backward sums it.

Transformer Engine's layers defer W themselves if they are built for it (`ask`). That is written from the documented
interface (`delay_wgrad_compute`, `backward_dw`) and was never run with Transformer Engine, which needs a GPU. Such a layer is
a queue with one entry per pass, so the W of a chunk must come in the order of its I.
"""

import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers
from megatron.core.utils import is_te_min_version, prepare_input_tensors_for_wgrad_compute

from bpipe.runtime import RuntimeFault
from bpipe.schedule.action import Key
from megatron.scheduling.hooks import patches
from megatron.scheduling.options.arguments import end_where

# The attribute of a linear layer's autograd node with the parameters that its forward did not see.
_CUT_OFF = "_bpipe_cut_off"
_WAY_OUT = "train with --bpipe-keep-weights-halves none"
# Versions from which on gradients can be deferred: at all, without being added up inside the product, and together with
# an overlapped reduction.
_ANY, _NOT_FUSED, _OVERLAPPED = "2.3.0", "2.7.0", "2.8.0"


@dataclass(slots=True)
class _Half:
    """One linear layer's part of W."""

    weight: torch.nn.Parameter

    bias: torch.nn.Parameter | None

    inputs: torch.Tensor
    """Inputs of the layer, [tokens, in] or [tokens, batch, in]."""

    gradient: torch.Tensor
    """Gradient of its output, [tokens, out] or [tokens, batch, out]."""

    gathers: Any
    """The group over which `inputs` are a part of the sequence; None if they are whole."""

    fused: bool
    """Whether the kernel that computes the product adds it to the parameter's main gradient."""

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of the weight and of the bias, computed as in Megatron's own backward."""
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
    """Add a weight's gradient to its main gradient.

    Returns:
        A dummy gradient for autograd, so that the parameter's hooks run.
    """
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
    """The node of one linear layer in W's graph, between a dummy loss and the layer's parameters."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, half: _Half) -> torch.Tensor:
        ctx.half = half
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        # Its tensors are freed once this layer is done, not only at the end of W.
        half, ctx.half = ctx.half, None
        return *half.gradients(), None


class _ForInputs:
    """The context that Megatron's backward gets, by which it appends the gradient to a list instead of computing the
    weight's."""

    use_bias = False
    # Otherwise it would compute the weight's gradient from the list. So it looks for a main gradient, and finds none.
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
    """What waits for one micro-batch's W."""

    halves: list[_Half] = field(default_factory=list)
    """In the order in which I deferred them."""

    passes: int = 0
    """Passes so far: its forward, and its I."""


class Halves:
    """The weights' halves of one rank, by stage and micro-batch.

    Unless it `defers` those of linear layers, I is the whole backward, and W is empty.
    """

    def __init__(self, defers: bool = True) -> None:
        self._defers = defers
        self._kept: dict[Key, _Kept] = {}
        # Where deferred halves go; None if no pass of a split backward is running.
        self._now: list[_Half] | None = None
        self._watched: dict[int, Any] = {}
        self._delaying: Mapping[int, Sequence[Any]] = {}
        # By stage, the micro-batches whose W its delaying modules run next.
        self._next: dict[int, deque[int]] = {}

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        if not self._defers:
            return {}
        return {patches.LINEAR: self._wrap_linear, patches.LINEAR_BACKWARD: patches.replaced_by(self._backward)}

    @contextlib.contextmanager
    def deferring(self, key: Key) -> Iterator[None]:
        """Defer W. To be entered around the forward of a micro-batch whose backward is split, and around its I."""
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
        """Run W: all that I has deferred of this micro-batch."""
        kept = self._kept.pop(key, _Kept())
        if kept.passes != 2:
            raise RuntimeFault(
                f"{_named(key)}: W runs after {kept.passes} passes, not after its forward and its I: has it "
                "already run?"
            )
        _run(kept.halves)
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
        storages = {}
        for half in self._kept.get(key, _Kept()).halves:
            for tensor in (half.inputs, half.gradient):
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage
        return tuple(storages.values())

    def begin(self, delaying: Mapping[int, Sequence[Any]] | None = None) -> None:
        """Begin an iteration. `delaying` has, by stage, the modules that keep a W themselves: `backward_dw` runs the oldest."""
        if self._kept:
            left = ", ".join(map(_named, self._kept))
            raise RuntimeFault(
                f"the W halves of {left} are left over from the last iteration: its weights lack their gradients"
            )
        self._delaying = delaying or {}
        self._next.clear()

    def abandon(self) -> None:
        """Drop everything, hooks of parameters included: the run is over."""
        self._kept.clear()
        self._now = None
        while self._watched:
            self._watched.popitem()[1].remove()

    def _wrap_linear(self, linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        signature = inspect.signature(linear)
        further = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if patches.is_further(parameter, patches.LINEAR)
        }

        @functools.wraps(linear)
        def run(input: torch.Tensor, weight: Any, bias: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            arguments = signature.bind(input, weight, bias, *args, **kwargs).arguments
            # A parameter that is not known here may affect the weight's gradient.
            unknown = any(arguments.get(name, default) != default for name, default in further.items())
            if unknown or not self._can_wait(input, weight, bias, arguments.get("grad_output_buffer")):
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
        """Whether this layer's W is deferred.

        Not without a backward; not if the weight is made from others; not under autocast, which W would not have; and
        not that of the output layer, even if Megatron defers it itself.
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

    def _backward(self, backward: Callable[..., Any], ctx: Any, gradient: torch.Tensor) -> Any:
        if not hasattr(ctx, _CUT_OFF):
            return backward(ctx, gradient)
        if self._now is None:
            raise RuntimeFault("a whole backward runs for a forward that was split: its weight gradients would be lost")
        for_inputs = _ForInputs(ctx)
        gradients = backward(for_inputs, gradient)  # [2]
        if len(for_inputs.grad_output_buffer) != 1:
            raise RuntimeFault(
                f"Megatron's linear layer no longer defers a weight's gradient the way it did: {_WAY_OUT}"
            )
        # Detached too: the graph that made the input has been through its backward, and would stay until W.
        inputs = ctx.saved_tensors[0].detach()
        gathers = ctx.tp_group if ctx.sequence_parallel else None
        weight, bias = getattr(ctx, _CUT_OFF)
        self._now.append(_Half(weight, bias, inputs, gradient, gathers, ctx.gradient_accumulation_fusion))
        return gradients

    def _watch(self, parameter: Any) -> None:
        """Make sure that a parameter of a split layer gets gradients from W only."""
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
    """Run one backward over all halves, in the order in which they were deferred, and empty the list."""
    nodes = []
    with torch.enable_grad():
        # In reverse: autograd begins with the node that was made last, and a whole backward began with the half that was
        # deferred first.
        while halves:
            half = halves.pop()
            nodes.append(_Weights.apply(half.weight, half.bias, half))
            del half
    if nodes:
        # Nobody reads these gradients.
        torch.autograd.backward(nodes, [nodes[0].detach()] * len(nodes))  # [3]


def _named(key: Key) -> str:
    return f"stage {key[0]}, micro-batch {key[1]}"


def ask(args: Any) -> dict[patches.Patch, patches.Wrap]:
    """Let the layers of this run's model defer, if they are Transformer Engine's, and raise ValueError if they cannot.

    Megatron's own flag asks for another schedule too. So it is set only in the arguments, for the reduction of gradients,
    and in the configuration of layers, from which it is hidden while the configuration checks itself.

    Args:
        args: Megatron's parsed arguments.

    Returns:
        Patches that must be in place while the model is built.
    """
    if args.transformer_impl != "transformer_engine":
        return {}
    needed = [
        (_ANY, "", True),
        (_NOT_FUSED, " without --gradient-accumulation-fusion", not args.gradient_accumulation_fusion),
        (_OVERLAPPED, " with --overlap-grad-reduce", args.overlap_grad_reduce),
    ]
    problems = [
        f"Transformer Engine defers weight gradients{when} only from version {version} on; use "
        "--bpipe-keep-weights-halves none"
        for version, when, applies in needed
        if applies and not is_te_min_version(version)
    ]
    if args.overlap_grad_reduce and args.add_bias_linear:
        problems.append(
            "Transformer Engine defers a bias's gradient together with its weight's, and an overlapped reduction "
            "would start too early; use --disable-bias-linear, drop --overlap-grad-reduce, or use "
            "--bpipe-keep-weights-halves none"
        )
    end_where(problems)
    args.delay_wgrad_compute = True
    return {patches.CONFIGURED: patches.replaced_by(_check_without_delay)}


def _check_without_delay(post_init: Callable[[Any], None], config: Any) -> None:
    delay, config.delay_wgrad_compute = config.delay_wgrad_compute, False
    post_init(config)
    config.delay_wgrad_compute = delay


def delaying(modules: Iterable[torch.nn.Module]) -> tuple[Any, ...]:
    """Return the modules of a chunk that may keep a W: not Megatron's own, which pass the call on or do nothing."""
    return tuple(
        module
        for module in modules
        if hasattr(module, "backward_dw")
        and any(base.__module__.split(".")[0] == "transformer_engine" for base in type(module).__mro__)
    )
