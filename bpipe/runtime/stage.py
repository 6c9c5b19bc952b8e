"""The executor's interfaces to what computes and what carries messages, and the stages of a rank in plain torch."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from bpipe.runtime.graph import nodes_of
from bpipe.schedule.action import Action, Key
from bpipe.schedule.program import Message

Tensors = tuple[torch.Tensor, ...]
# A stage's model, called with the micro-batch's number and the outputs of the stage before. The first stage receives no
# tensors and reads the micro-batch's data; the last one returns the loss.
Part = Callable[..., torch.Tensor | Tensors]


class Messages(Protocol):
    """One rank's messages. Only `wait` waits for a neighbour, and only for a message that comes from one."""

    def post(self, message: Message) -> None:
        """Be ready to receive it. Messages of one rank are posted in the order in which that rank sends them."""

    def send(self, message: Message, tensors: Tensors) -> None:
        """Send tensors. They must not change until they were waited for, but the caller may drop them."""

    def wait(self, message: Message) -> Tensors:
        """Wait for a message and return its tensors; none for a message that this rank sent, whose tensors are free."""


class Stage(Protocol):
    """The computations of one rank, of all its stages. An action names the stage and the micro-batch.

    A backward receives gradients of its forward's outputs and returns gradients of its inputs; that of the last stage
    receives none. If a backward is split, its inputs' half does this, and the weights' half comes later.
    """

    def forward(self, action: Action, received: Tensors) -> Tensors: ...

    def let_go(self, made: Tensors) -> None:
        """Release the outputs of a forward: only their graph is still needed here."""

    def backward(self, action: Action, gradients: Tensors) -> Tensors: ...

    def backward_input(self, action: Action, gradients: Tensors) -> Tensors: ...

    def backward_weight(self, action: Action) -> None: ...


class Shards(Protocol):
    """The computations of one rank's shard of the output layer, or of the embedding. An action names rank and
    micro-batch.

    The last stage's forward makes what all shards of the output layer need. Its backward, or the inputs' half, receives
    the sum over all shards of each tensor (algorithm 1). The first stage's forward receives the sum over all shards of
    the embedding, and its backward makes what these need.
    """

    def forward(self, action: Action, received: Tensors) -> Tensors:
        """Run S: return this shard's part of the statistics of the last stage's output. Or run IF: receive nothing and
        return this shard's part of the embeddings."""

    def backward(self, action: Action, received: Tensors) -> Tensors:
        """Run T: receive the statistics of all shards, each tensor with a new leading dimension, and return this shard's
        part of the gradient. Or run IB: receive the first stage's gradient and return nothing."""


class TorchStages:
    """The stages of a rank in plain torch: `parts[stage]` computes the forward, autograd the backward.

    The halves of a split backward walk the same graph twice, so together they take longer than the whole, and nothing
    is freed between them: correct, not fast.
    """

    def __init__(self, parts: Mapping[int, Part]) -> None:
        self._parts = dict(parts)
        # By stage and micro-batch: the inputs and outputs of its forward, and between the halves of its backward the
        # gradients.
        self._held: dict[Key, tuple[Tensors, Tensors]] = {}
        self._gradients: dict[Key, Tensors] = {}

    def forward(self, action: Action, received: Tensors) -> Tensors:
        for tensor in received:
            # In place: another tensor on the same memory would keep it here when the micro-batch's activations leave.
            tensor.requires_grad_(tensor.is_floating_point())
        outputs = self._parts[action.stage](action.microbatch, *received)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        self._held[action.stage, action.microbatch] = received, outputs
        return outputs

    def let_go(self, made: Tensors) -> None:
        """Do nothing: torch's backward needs the shapes of the outputs, so the tensors stay."""

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        received, outputs = self._held.pop(action.key)
        # Labels or a mask that were passed on have no graph and get no gradients.
        torch.autograd.backward([output for output in outputs if output.requires_grad], gradients or None)
        return tuple(_gradient(tensor) for tensor in received if tensor.requires_grad)

    def backward_input(self, action: Action, gradients: Tensors) -> Tensors:
        received, outputs = self._held[action.key]
        self._gradients[action.key] = gradients
        inputs = [tensor for tensor in received if tensor.requires_grad]
        # Nobody needs a gradient of the first stage's inputs.
        return torch.autograd.grad(outputs, inputs, gradients or None, retain_graph=True) if inputs else ()

    def backward_weight(self, action: Action) -> None:
        received, outputs = self._held.pop(action.key)
        nodes = nodes_of(output.grad_fn for output in outputs)
        leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        weights = [leaf for leaf in leaves if not any(leaf is tensor for tensor in received)]
        torch.autograd.backward(outputs, self._gradients.pop(action.key) or None, inputs=weights)


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad is None:
        raise ValueError(
            f"a part did not use a tensor {tuple(tensor.shape)} that it received, but the sender waits for its gradient"
        )
    return tensor.grad
