"""Split the word embedding of a model over all ranks of its pipeline, and get the tokens that all ranks look up.

The last chunk of every rank has a shard of the embedding, under the name of the whole one. Positions, dropout and the rest of
Megatron's embedding stay in the first stage, whose word embeddings are what the ranks have looked up together.

Only the first rank reads data, and all ranks need its tokens before it computes. So the script's step is called for all
micro-batches when an iteration begins, with a model that only notes its arguments. The forward repeats what was noted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from bpipe.runtime.shards import Rows, embedded, rows_gradient
from megatron.scheduling.loop.chunks import Call

_DROP = "train without --bpipe-vocabulary-input"


def undrawn(config: Any) -> Any:
    """Return a configuration by which a layer draws no weights: that would change all later random numbers."""
    config = copy.copy(config)
    config.perform_initialization = False
    return config


def mark(weight: Any, config: Any) -> None:
    """Mark a shard's weight as Megatron marks that of the whole layer."""
    weight.is_embedding_or_output_parameter = True
    if config.use_mup:
        weight.is_embedding_parameter = True


def reduce(tensor: torch.Tensor, scatters: bool, group: Any) -> torch.Tensor:
    """Return the sum over tensor-parallel ranks, or this rank's part of the sequence of it."""
    sum_ = reduce_scatter_to_sequence_parallel_region if scatters else reduce_from_tensor_model_parallel_region
    return sum_(tensor, group=group)  # type: ignore[no-any-return]


def piece(key: str, data: torch.Tensor, shard: int, rows: Rows, replica_id: tuple[int, int, int]) -> ShardedTensor:
    """Return a shard's entry in a checkpoint: its rows of the whole weight."""
    return ShardedTensor.from_rank_offsets(
        key, data, (0, shard, rows.num_shards), replica_id=replica_id, allow_shape_mismatch=True
    )


class GivenEmbeddings(torch.nn.Module):
    """Word embeddings of a first stage that all shards have looked up."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._tensor_group = model.pg_collection.tp
        self._scatters = model.embedding.word_embeddings.reduce_scatter_embeddings
        self._given: torch.Tensor | None = None

    def give(self, embeddings: torch.Tensor) -> None:
        """Set the word embeddings [b, s, h] of the model's next forward, of this tensor-parallel rank's rows."""
        self._given = embeddings

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        embeddings, self._given = self._given, None
        if embeddings is None:
            raise ValueError(
                "with --bpipe-vocabulary-input a model can embed only what its pipeline's ranks have looked up: "
                f"{_DROP}"
            )
        if self._scatters:
            embeddings = embeddings.transpose(0, 1).contiguous()
        return reduce(embeddings, self._scatters, self._tensor_group)


class EmbeddingShard(VocabParallelEmbedding):  # type: ignore[misc]
    """Megatron's own layer with fewer rows. Only `part` computes; a model's call returns the given embeddings."""

    def __init__(self, model: Any, rows: Rows, number: int) -> None:
        """Make rows without values."""
        self.rows, self.number = rows, number
        super().__init__(
            num_embeddings=rows.each * rows.tensor,
            embedding_dim=model.config.hidden_size,
            init_method=model.config.init_method,
            config=undrawn(model.config),
            tp_group=model.pg_collection.tp,
        )
        self.config = model.config
        # If the rank's last chunk is the first stage, too.
        self.given: GivenEmbeddings | None = None
        self._computes = False

    @property
    def first_row(self) -> int:
        return self.rows.of(self.number).start

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings [b, s, h] of tokens [b, s]."""
        self._computes = True
        try:
            # Through the module, whose hooks may gather its weight.
            return self(tokens)  # type: ignore[no-any-return]
        finally:
            self._computes = False

    def add_gradient(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the weight's gradient from that of embeddings [b, s, h] of tokens [b, s], as autograd would."""
        if self.weight.requires_grad:
            rows = rows_gradient(gradient.flatten(0, 1), tokens.flatten(), self.first_row, len(self.weight))
            torch.autograd.backward(self.weight, rows.to(self.weight.dtype))

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if self._computes:
            return embedded(self.weight, input_.flatten(), self.first_row).view(*input_.shape, -1)
        assert self.given is not None, "only a first stage embeds"
        return self.given(input_)  # type: ignore[no-any-return]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the rows of the whole table, under its key and of its shape."""
        assert metadata is not None, "Megatron says which ranks have replicas"
        key, replica = f"{prefix}weight", metadata["dp_cp_group"].rank()
        return {key: piece(key, self.weight, self.number, self.rows, (0, 0, replica))}


def place(first: Any, last: Any, shard: EmbeddingShard) -> None:
    """Put a shard into a rank's last chunk, in place of the whole layer, and `GivenEmbeddings` into the first stage."""
    mark(shard.weight, last.config)
    if first.pre_process:
        embeddings = GivenEmbeddings(first)
        if first is last:
            shard.given = embeddings
        else:
            first.embedding.word_embeddings = embeddings
    if not last.pre_process:
        last.embedding = MegatronModule(last.config)
    last.embedding.word_embeddings = shard


class Inputs(NamedTuple):
    """A rank's part of the embedding."""

    shard: EmbeddingShard
    """Its rows."""

    given: GivenEmbeddings | None
    """Replaces the whole layer on the rank with the first stage; None on others."""

    place: int
    """Rank in the pipeline with the first stage."""

    @classmethod
    def of(cls, chunks: Sequence[Any], place: int) -> Inputs:
        """Return the parts that were placed in a rank's chunks."""
        first, last = unwrap_model(chunks[0]), unwrap_model(chunks[-1])
        shard = last.embedding.word_embeddings
        assert isinstance(shard, EmbeddingShard), "it is split together with the output layer"
        if first is last or not first.pre_process:
            return cls(shard, shard.given, place)
        return cls(shard, first.embedding.word_embeddings, place)


@dataclass
class NotedStep:
    """A script's step on a micro-batch."""

    args: tuple[Any, ...]
    """Positional arguments of its model."""

    kwargs: dict[str, Any]
    """Its arguments by name."""

    loss_function: Callable[..., Any]
    """What the step returned."""

    @property
    def tokens(self) -> torch.Tensor:
        """Tokens [b, s]. Raises ValueError if the model got none."""
        tokens = self.kwargs.get("input_ids", self.args[0] if self.args else None)
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or self.kwargs.get("decoder_input") is not None:
            raise ValueError(
                "--bpipe-vocabulary-input: this script calls its model without tokens [b, s], which all ranks must "
                f"look up: {_DROP}"
            )
        return tokens

    def step(self, data: Any, model: torch.nn.Module, *rest: Any) -> tuple[Any, Callable[..., Any]]:
        """Run in place of the script's step."""
        return model(*self.args, **self.kwargs), self.loss_function


def noted_steps(call: Call, chunk: int) -> list[NotedStep]:
    """Call the script's step for every micro-batch of a call, with a model that computes nothing.

    Raises ValueError for a step that computes with its model's output.
    """
    return [_note_step(call, call.models[chunk], call.data[chunk]) for _ in range(call.num_microbatches)]


def _note_step(call: Call, model: torch.nn.Module, data: Any) -> NotedStep:
    nothing = torch.zeros((), requires_grad=True)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((args, kwargs))
        return nothing

    with patch.object(model, "forward", note):
        output, loss_function = call.forward_step_func(data, model)
    if output is not nothing or len(calls) != 1:
        raise ValueError(
            "--bpipe-vocabulary-input: this script's step must call its model exactly once and return the model's "
            f"output unchanged, because it is called before there is an output: {_DROP}"
        )
    ((args, kwargs),) = calls
    return NotedStep(args, kwargs, loss_function)


def gather_tokens(steps: list[NotedStep] | None, pipeline: Any, place: int) -> list[torch.Tensor]:
    """Return the tokens [b, s] of every micro-batch, which the rank at `place` in the pipeline has noted.

    Collective over the pipeline.
    """
    source = dist.get_process_group_ranks(pipeline)[place]
    device = torch.device(torch.cuda.current_device())
    tokens = None if steps is None else torch.stack([step.tokens for step in steps]).to(device)
    shape = torch.tensor([0, 0, 0] if tokens is None else tokens.shape, dtype=torch.int64, device=device)
    dist.broadcast(shape, source, group=pipeline)
    if tokens is None:
        tokens = torch.empty(*shape.tolist(), dtype=torch.int64, device=device)
    dist.broadcast(tokens, source, group=pipeline)
    return list(tokens)
