"""Compute a rank's stages and its shard of the output layer with Megatron's own steps.

    F of the last stage   Megatron's step with the script's own. The model notes hidden states and labels and returns zeros for the
                          tokens' losses. The gradient of what the script's loss function makes of these, with all of Megatron's scalings,
                          is how much every token's loss counts: all ranks get it with the hidden states.
    S, T                  the shard's logits and their gradient, `bpipe.runtime.shards`, of algorithm 1 or 2
    T of the last rank    the losses are known: the script's loss function is called again, for the log
    B of the last stage   goes back from the hidden states with the sum of what all shards made

So a loss must be linear in the tokens' losses. T checks that: then the second gradient equals the first.

Losses of further tokens: in the last stage's forward zeros replace them, too, and autograd says how much each counts. In the
last rank's T they are known, and Megatron's `process_mtp_loss` runs again on them, only for its log. The hidden states of the
next token and of each further one are concatenated in what the last stage sends to all shards, and are one sequence for S and T.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import unwrap_model

from bpipe.runtime.shards import EarlyShard, InputShard, OutputShard
from bpipe.runtime.stage import Tensors
from bpipe.schedule.action import Action
from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.chunks import Call, ChunkStages, RankPart
from megatron.scheduling.vocabulary.input_shards import Inputs, NotedStep, gather_tokens, noted_steps
from megatron.scheduling.vocabulary.output_shards import Log, LossInputs, OutputLayerShard

# A script's loss function of one micro-batch.
LossFunction = Callable[..., Any]


class ShardedStages(ChunkStages):
    """The stages of one rank whose pipeline shares the output layer. `shard` computes this rank's rows of it."""

    def __init__(
        self, part: RankPart, layer: OutputLayerShard, early: bool = False, inputs: Inputs | None = None
    ) -> None:
        """`early`: whether shards are computed by algorithm 2."""
        super().__init__(part)
        self._inputs = inputs
        self.inputs = None if inputs is None else InputShard(inputs.shard)
        # On the rank with the first stage: the script's step on each micro-batch of the call.
        self._noted_steps: list[NotedStep] = []
        self._layer = layer
        rest = layer.first_row, layer.rows.vocabulary, self._tell if self.has_last else None
        self.shard: OutputShard = EarlyShard(layer, *rest) if early else OutputShard(layer.logits, *rest)
        # Number of parts of a sequence in this rank's tensor-parallel group.
        self._parts = layer.tp_group.size() if layer.sequence_parallel else 1
        # By micro-batch, from the last stage's forward to the last rank's T: its loss function, how much each token's
        # loss counts, and what logs the losses of further tokens.
        self._losses: dict[int, tuple[LossFunction, torch.Tensor, Log | None]] = {}
        # By micro-batch, the shape of its labels, until the next call.
        self._shapes: dict[int, torch.Size] = {}
        self._differs: torch.Tensor | None = None

    def begin(self, call: Call | None) -> None:
        super().begin(call)
        self.shard.begin()
        self._losses.clear()
        self._shapes.clear()
        self._differs = None
        if self._inputs is not None and self.inputs is not None:
            self._noted_steps = noted_steps(call, self.chunks[0]) if call is not None and 0 in self.chunks else []
            pipeline = None if call is None else unwrap_model(call.models[0]).pg_collection.pp
            self.inputs.begin(
                [] if call is None else gather_tokens(self._noted_steps or None, pipeline, self._inputs.place)
            )

    def forward(self, action: Action, received: Tensors) -> Tensors:
        if action.stage == 0 and self._inputs is not None:
            return self._embed(action, received)
        if action.stage != self.last_stage:
            return super().forward(action, received)
        call, _ = self._of(action)
        loss_functions: list[LossFunction] = []

        def keep_loss_function(*args: Any) -> tuple[Any, LossFunction]:
            output, loss_function = call.forward_step_func(*args)
            loss_functions.append(loss_function)
            return output, loss_function

        # The loss of zeros is reported nowhere.
        input_, loss = self.step(action, received, keep_loss_function, [], not call.forward_only)
        tokens, log = self._layer.noted()
        hidden = joined(tokens)
        self.hold(action, input_, hidden)
        counts = [token.losses for token in tokens]
        if not call.forward_only:
            counts = [self._gradient(tokens[0].losses, loss), *counts_of_further(tokens)]
        self._losses[action.microbatch] = loss_functions[0], counts[0], log
        self._shapes[action.microbatch] = tokens[0].labels.shape
        return hidden, in_order([token.labels for token in tokens], self._parts), in_order(counts, self._parts)

    def _embed(self, action: Action, received: Tensors) -> Tensors:
        """Run the first stage's forward on the embeddings of all shards, at which its backward ends."""
        call, _ = self._of(action)
        assert self._inputs is not None
        assert self._inputs.given is not None, "the first stage is here"
        (embeddings,) = received
        self._inputs.given.give(embeddings.requires_grad_(not call.forward_only))
        # Not as a stage's input, of which Megatron's rotary embedding would take the length of the sequence.
        _, output = self.step(action, (), self._noted_steps[action.microbatch].step, call.losses, False)
        self.hold(action, embeddings, output)
        return (output,)

    def let_go(self, made: Tensors) -> None:
        # Labels belong to the batch.
        super().let_go(made[:1])

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        if action.stage != self.last_stage:
            return super().backward(action, gradients)
        # A sum over all shards, in 32 bit.
        (gradient,) = gradients
        _, output = self._held[action.key]
        if isinstance(self.shard, EarlyShard):
            # Of this tensor-parallel rank's rows alone: on the lane of the second step its collective would run at the
            # same time as the computation's.
            batch, _ = self._shapes[action.microbatch]
            gradient = self._layer.of_input(gradient.view(-1, batch, gradient.shape[-1]))
        return super().backward(action, (gradient.to(output.dtype),))

    def check(self) -> None:
        """Raise ValueError, after the last computation, for a loss that shards cannot compute."""
        if self._differs is not None and bool(self._differs):
            raise ValueError(
                "--bpipe-vocabulary: with this script's loss function the weight of each token depends on the "
                "losses, but backwards of shards run before the losses are known: make the loss a sum of token "
                "losses with fixed weights, or train without --bpipe-vocabulary"
            )

    def _tell(self, microbatch: int, values: torch.Tensor, largest: torch.Tensor) -> None:
        """Log the losses of a micro-batch's tokens, in the order of the logits, and whether labels had the largest."""
        call = self._call
        assert call is not None, "a shard computes for a call of the loop"
        loss_function, counts, log = self._losses.pop(microbatch)
        shape = self._shapes[microbatch]
        losses, *further = apart(values, shape, self._parts)
        losses.requires_grad_(not call.forward_only)
        if log is not None:
            log(further, apart(largest, shape, self._parts)[1:])
        chunk = self.chunks[self.last_stage]
        if call.config.timers is not None:
            # Megatron's function stops it.
            call.config.timers("forward-compute", log_level=2).start()
        loss, _ = schedules.forward_step_calc_loss(
            call.models[chunk],
            self._row(losses),
            loss_function,
            call.config,
            chunk if len(call.models) > 1 else None,
            call.collect_non_loss_data,
            call.num_microbatches,
            call.losses,
            call.cp_size,
            True,
        )
        if not call.forward_only:
            differs = (self._gradient(losses, loss) != counts).any()
            self._differs = differs if self._differs is None else self._differs | differs

    def _row(self, losses: torch.Tensor) -> torch.Tensor:
        """Return what the script's loss function gets of the tokens' losses."""
        return losses

    def _gradient(self, losses: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Return how much the loss grows with each token's loss, scaled as Megatron scales it."""
        assert self._call is not None, "a micro-batch belongs to a call of the loop"
        gradient = schedules.backward_step(losses, loss, None, self._call.config)
        if gradient is None:
            raise ValueError(
                "--bpipe-vocabulary: this script's loss does not depend on what its model returned: pass the "
                "model's output on unchanged, or train without --bpipe-vocabulary"
            )
        return gradient  # type: ignore[no-any-return]


class FurtherLosses:
    """Wrappers of Megatron's losses of further tokens and of its count of right predictions."""

    def __init__(self) -> None:
        self._logs = False

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        return {
            patches.FURTHER_LOSSES: patches.replaced_by(self._process),
            patches.ACCEPTED: patches.replaced_by(self._count),
        }

    def _process(self, process: Callable[..., Any], *, output_layer: Any, is_training: bool, **arguments: Any) -> Any:
        if not isinstance(output_layer, OutputLayerShard):
            return process(output_layer=output_layer, is_training=is_training, **arguments)
        if is_training:
            others = {name: value for name, value in arguments.items() if name != "hidden_states"}
            output_layer.log = functools.partial(self._log, process, others)
        # It would log zeros.
        return process(output_layer=output_layer, is_training=False, **arguments)

    @torch.no_grad()
    def _log(
        self,
        process: Callable[..., Any],
        arguments: dict[str, Any],
        losses: Sequence[torch.Tensor],
        largest: Sequence[torch.Tensor],
    ) -> None:
        """Log losses [b, s] of each further token, and whether its label had the largest logit."""
        logits, computed = iter(largest), iter(losses)
        replaced = {
            "hidden_states": torch.zeros(1 + len(losses), 1, 1, device=losses[0].device),
            "output_layer": lambda *_, **__: (next(logits), None),
            "compute_language_model_loss": lambda *_: next(computed),
            "scale_logits_fn": None,
        }
        with patch.object(self, "_logs", True):
            process(**{**arguments, **replaced}, is_training=True)

    def _count(
        self,
        count: Callable[..., Any],
        mtp_logits: torch.Tensor,
        mtp_labels: torch.Tensor,
        loss_mask: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self._logs:
            return count(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
        # Two classes, of which the second is right: no rank has the logits of more.
        largest = mtp_logits.t()
        classes = torch.stack((~largest, largest), -1).float()
        return count(classes, torch.ones_like(mtp_labels), loss_mask, args[0], True)


def joined(tokens: Sequence[LossInputs]) -> torch.Tensor:
    """Return the concatenated hidden states of all tokens."""
    return tokens[0].hidden if len(tokens) == 1 else torch.cat([token.hidden for token in tokens])


def in_order(values: Sequence[torch.Tensor], parts: int) -> torch.Tensor:
    """Return values [n] of several [b, s], in the order of the logits [s, b, r], of which each of `parts` ranks has a
    part of s of all."""
    turned = [value.detach().t() for value in values]
    if len(values) == 1:
        return turned[0].flatten()
    return torch.cat([value.reshape(parts, -1, value.size(1)) for value in turned], 1).flatten()


def apart(values: torch.Tensor, shape: torch.Size, parts: int) -> list[torch.Tensor]:
    """Return the several [b, s] of this shape from values [n], the inverse of `in_order`."""
    batch, length = shape
    several = values.view(parts, -1, length // parts, batch)
    return [value.reshape(length, batch).t().contiguous() for value in several.unbind(1)]


def counts_of_further(tokens: Sequence[LossInputs]) -> list[torch.Tensor]:
    """Return how much the training's loss grows with each further token's losses.

    Megatron would give it to their graph in the backward, which is too late for shards.
    """
    if len(tokens) == 1:
        return []
    hidden = tokens[0].hidden
    none = torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand_as(hidden)
    # The backward needs the graph of the hidden state.
    return list(torch.autograd.grad(hidden, [token.losses for token in tokens[1:]], none, retain_graph=True))
