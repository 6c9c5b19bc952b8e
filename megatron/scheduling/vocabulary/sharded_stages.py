"""Compute a rank's stage and its shard of the output layer with Megatron's own steps, as our executor asks for them.

In: as `chunks`, and what all shards have gathered. Out: what other ranks need, and the losses that Megatron's loop
returns. Knows no order and no messages.

    F of the last stage   Megatron's step over the script's own. The model notes hidden states and labels and gives zeros for the tokens'
                          losses; what the script's loss function makes of these, with all of Megatron's scalings, has for its gradient how
                          much every token's loss counts: it goes to all ranks with the hidden states.
    S, T                  the shard's logits and their gradient, `bpipe.runtime.shards`, of algorithm 1 or 2
    T of the last rank    the losses are known: the script's loss function is called again, for what is logged
    B of the last stage   goes back from the hidden states with the sum of what all shards made

So a loss must be linear in the tokens' losses. Whether it is, is seen in T: the second gradient equals the first then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import unwrap_model

from bpipe.runtime.shards import EarlyShard, InputShard, OutputShard
from bpipe.runtime.stage import Tensors
from bpipe.schedule.action import Action
from megatron.scheduling.loop.chunks import Call, ChunkStages, RankPart
from megatron.scheduling.vocabulary.input_shards import Inputs, NotedStep, gather_tokens, noted_steps
from megatron.scheduling.vocabulary.mtp import apart, counts_of_further, in_order, joined
from megatron.scheduling.vocabulary.output_shards import Log, OutputLayerShard

# A script's loss function of one micro-batch.
LossFunction = Callable[..., Any]


class ShardedStages(ChunkStages):
    """The stages of one rank whose pipeline shares the output layer; `shard` computes this rank's rows of it, by
    algorithm 2 if `early`."""

    def __init__(
        self, part: RankPart, layer: OutputLayerShard, early: bool = False, inputs: Inputs | None = None
    ) -> None:
        super().__init__(part)
        self._inputs = inputs
        self.inputs = None if inputs is None else InputShard(inputs.shard)
        # Of the rank that has the first stage: what its script's step did with each micro-batch of the call.
        self._noted_steps: list[NotedStep] = []
        self._layer = layer
        told = self._tell if self.has_last else None
        self.shard: OutputShard | EarlyShard
        if early:
            self.shard = EarlyShard(layer, layer.first_row, layer.rows.vocabulary, told)
        else:
            self.shard = OutputShard(layer.logits, layer.first_row, layer.rows.vocabulary, told)
        # In so many parts this rank's tensor-parallel group has a sequence.
        self._parts = layer.tp_group.size() if layer.sequence_parallel else 1
        # By micro-batch, from the last stage's forward to the last rank's T: its loss function, how much each token's
        # loss counts, and who wants to know those of further tokens.
        self._losses: dict[int, tuple[LossFunction, torch.Tensor, Log | None]] = {}
        # And of each the shape of its labels, until the next call.
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
        kept: list[LossFunction] = []

        def keeping(*given: Any) -> tuple[Any, LossFunction]:
            output, loss_function = call.forward_step_func(*given)
            kept.append(loss_function)
            return output, loss_function

        # What it would return of zeros is nobody's loss.
        given, loss = self.step(action, received, keeping, [], not call.forward_only)
        each, log = self._layer.noted()
        hidden = joined(each)
        self.hold(action, given, hidden)
        counts = [one.losses for one in each]
        if not call.forward_only:
            counts = [self._gradient(each[0].losses, loss), *counts_of_further(each)]
        self._losses[action.microbatch] = kept[0], counts[0], log
        self._shapes[action.microbatch] = each[0].labels.shape
        return hidden, in_order([one.labels for one in each], self._parts), in_order(counts, self._parts)

    def _embed(self, action: Action, received: Tensors) -> Tensors:
        """Return the first stage's forward, of what all shards have looked up: that is what autograd goes back to."""
        call, _ = self._of(action)
        assert self._inputs is not None
        assert self._inputs.given is not None, "the first stage is here"
        (embeddings,) = received
        self._inputs.given.give(embeddings.requires_grad_(not call.forward_only))
        # It is no stage's output: of one Megatron's rotary embedding would take the length of the sequence.
        _, made = self.step(action, (), self._noted_steps[action.microbatch].step, call.losses, False)
        self.hold(action, embeddings, made)
        return (made,)

    def let_go(self, made: Tensors) -> None:
        # Labels are the batch's own.
        super().let_go(made[:1])

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        if action.stage != self.last_stage:
            return super().backward(action, gradients)
        # A sum over all shards comes in 32 bit.
        (gradient,) = gradients
        made = self._held[action.stage, action.microbatch][1]
        if isinstance(self.shard, EarlyShard):
            # Of this tensor-parallel rank's rows alone: on the lane of a second step its collective would meet the
            # computation's.
            batch, _ = self._shapes[action.microbatch]
            gradient = self._layer.of_input(gradient.view(-1, batch, gradient.shape[-1]))
        return super().backward(action, (gradient.to(made.dtype),))

    def check(self) -> None:
        """Raise ValueError, behind the last computation, for a loss that shards cannot compute."""
        if self._differs is not None and bool(self._differs):
            raise ValueError(
                "--bpipe-vocabulary: with this script's loss function the weight of each token depends on the "
                "losses, but backwards of shards run before the losses are known: make the loss a sum of token "
                "losses with fixed weights, or train without --bpipe-vocabulary"
            )

    def _tell(self, microbatch: int, found: torch.Tensor, largest: torch.Tensor) -> None:
        """The losses of a micro-batch's tokens are known, in the order of the logits, and whose label had the largest."""
        call = self._call
        assert call is not None, "a shard computes for a call of the loop"
        loss_function, counts, log = self._losses.pop(microbatch)
        shape = self._shapes[microbatch]
        losses, *further = apart(found, shape, self._parts)
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
        """Return what the script's loss function is given of the losses of tokens."""
        return losses

    def _gradient(self, losses: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Return how much the loss grows with each token's, scaled as Megatron scales it."""
        assert self._call is not None, "a micro-batch belongs to a call of the loop"
        found = schedules.backward_step(losses, loss, None, self._call.config)
        if found is None:
            raise ValueError(
                "--bpipe-vocabulary: this script's loss does not depend on what its model returned: pass the "
                "model's output on unchanged, or train without --bpipe-vocabulary"
            )
        return found  # type: ignore[no-any-return]
