"""What the executor asks of whoever computes, and the stages of a rank in plain torch.

In: computations of a Program and the tensors that others made for them. Out: the tensors that others need. Knows no
schedule, no messages: which computation comes when, and where its tensors come from and go to, is the executor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from bpipe.schedule.action import Action, Key

Tensors = tuple[torch.Tensor, ...]
# A stage's model: the micro-batch's number and what the stage before it made, to what it makes. The first stage
# receives nothing and reads the micro-batch's data; the last one makes the loss.
Part = Callable[..., torch.Tensor | Tensors]


class Stage(Protocol):
    """The computations of one rank, of all stages that it has: an action names the stage and the micro-batch.

    A backward receives gradients of what its forward made, and makes gradients of what that received; the last stage's
    receives none. One that is split does so in its inputs' half; the weights' half comes later.
    """

    def forward(self, action: Action, received: Tensors) -> Tensors: ...

    def let_go(self, made: Tensors) -> None:
        """Release what a forward made: of these tensors only the graph behind them is still needed here."""

    def backward(self, action: Action, gradients: Tensors) -> Tensors: ...

    def backward_input(self, action: Action, gradients: Tensors) -> Tensors: ...

    def backward_weight(self, action: Action) -> None: ...


class Shards(Protocol):
    """The computations of one rank's shard of the vocabulary's output layer, or of its embedding: an action names rank
    and micro-batch.

    The last stage's forward makes what all shards of the output layer need; its backward, or the inputs' half, receives
    what they have made together: of each tensor the sum over all shards (algorithm 1). The first stage's forward
    receives the sum over all shards of the embedding, and its backward makes what these need.
    """

    def forward(self, action: Action, received: Tensors) -> Tensors:
        """Run S, from what the last stage made to this shard's part of the statistics; or IF, from nothing to its
        part of the embeddings."""

    def backward(self, action: Action, received: Tensors) -> Tensors:
        """Run T, from the statistics of all shards, each tensor with one more leading dimension, to this shard's part
        of the gradient.

        Or run IB, from the first stage's gradient to nothing.
        """


class TorchStages:
    """The stages of a rank in plain torch: `parts[stage]` computes one, autograd goes back.

    The halves of a split backward walk the same graph twice, so they take longer together than the whole, and nothing
    is freed between them: right, not fast.
    """

    def __init__(self, parts: Mapping[int, Part]) -> None:
        self._parts = dict(parts)
        # By stage and micro-batch: what its forward received and made, and between the halves of its backward the
        # gradients.
        self._held: dict[Key, tuple[Tensors, Tensors]] = {}
        self._gradients: dict[Key, Tensors] = {}

    def forward(self, action: Action, received: Tensors) -> Tensors:
        for tensor in received:
            # In place: another tensor on the same memory would keep it here when the micro-batch's activations leave.
            tensor.requires_grad_(tensor.is_floating_point())
        made = self._parts[action.stage](action.microbatch, *received)
        outputs = (made,) if isinstance(made, torch.Tensor) else made
        self._held[action.stage, action.microbatch] = received, outputs
        return outputs

    def let_go(self, made: Tensors) -> None:
        """Do nothing: torch looks at the shapes of what it goes back from, so the tensors stay."""

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        received, outputs = self._held.pop(action.key)
        # Behind labels or a mask that were passed on is no graph, and nobody makes gradients of them.
        torch.autograd.backward([output for output in outputs if output.requires_grad], gradients or None)
        return tuple(_gradient(tensor) for tensor in received if tensor.requires_grad)

    def backward_input(self, action: Action, gradients: Tensors) -> Tensors:
        key = action.stage, action.microbatch
        received, outputs = self._held[key]
        self._gradients[key] = gradients
        wanted = [tensor for tensor in received if tensor.requires_grad]
        # The first stage's half makes nothing that anybody needs.
        return torch.autograd.grad(outputs, wanted, gradients or None, retain_graph=True) if wanted else ()

    def backward_weight(self, action: Action) -> None:
        key = action.stage, action.microbatch
        received, outputs = self._held.pop(key)
        weights = [leaf for leaf in _leaves(outputs) if not any(leaf is tensor for tensor in received)]
        torch.autograd.backward(outputs, self._gradients.pop(key) or None, inputs=weights)


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad is None:
        raise ValueError(
            f"a part did not use a tensor {tuple(tensor.shape)} that it received, but the sender waits for its gradient"
        )
    return tensor.grad


def _leaves(outputs: Tensors) -> list[torch.Tensor]:
    """Return the leaves of the graph behind the outputs: weights, and what was received."""
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen, leaves = set(waiting), []
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        fresh = [behind for behind, _ in node.next_functions if behind not in seen]
        seen.update(fresh)
        waiting += fresh
    return leaves
