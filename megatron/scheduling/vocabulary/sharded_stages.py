"""Compute a rank's stages and its shard of the output layer with Megatron's own steps.

    F of the last stage   Megatron's step with the script's own. The model notes hidden states and labels and returns zeros for the
                          tokens' losses. The gradient of what the script's loss function makes of these, with all of Megatron's scalings,
                          is how much every token's loss counts: all ranks get it with the hidden states.
    S, T                  the shard's logits and their gradient, `bpipe.runtime.shards`, of algorithm 1 or 2
    T of the last rank    the losses are known: the script's loss function is called again, for the log
    B of the last stage   goes back from the hidden states with the sum of what all shards made

So a loss must be linear in the tokens' losses. T checks that: then the second gradient equals the first.
"""

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
