"""Split the word embedding of a model over all ranks of its pipeline, beside its output layer, and get the tokens that
all ranks look up.

In: a rank's chunks as Megatron's constructor leaves them; a call of the pipelined loop. Out: the same with a shard of
the embedding in the last chunk of every rank, under the name of the whole one; and the tokens of all micro-batches.
Positions, dropout and whatever else Megatron's embedding does stay in the first stage: there its word embeddings are
what the ranks have looked up together. Knows no schedule.

The first rank alone reads data, and all ranks need its tokens before it computes: so the script's step is called for
all micro-batches when an iteration begins, with a model that only notes what it is called with. It is not called again:
the forward repeats what was noted.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule

from bpipe.runtime.vocabulary.embedding import embedded, rows_gradient
from bpipe.runtime.vocabulary.rows import Rows
from megatron.scheduling.loop.chunks import Call

_DROP = "train without --bpipe-vocabulary-input"


class GivenEmbeddings(torch.nn.Module):
    """Stands for the word embeddings of a first stage: it looks nothing up, but hands on what all shards made."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._tensor_group = model.pg_collection.tp
        self._scatters = model.embedding.word_embeddings.reduce_scatter_embeddings
        self._given: torch.Tensor | None = None

    def give(self, embeddings: torch.Tensor) -> None:
        """Give the model's next forward its word embeddings [b, s, h], of this tensor-parallel rank's rows."""
        self._given = embeddings

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        given, self._given = self._given, None
        if given is None:
            raise ValueError(
                "with --bpipe-vocabulary-input a model can embed only what its pipeline's ranks have looked up: "
                f"{_DROP}"
            )
        if self._scatters:
            return reduce_scatter_to_sequence_parallel_region(  # type: ignore[no-any-return]
                given.transpose(0, 1).contiguous(), group=self._tensor_group
            )
        return reduce_from_tensor_model_parallel_region(given, group=self._tensor_group)  # type: ignore[no-any-return]


class EmbeddingShard(VocabParallelEmbedding):  # type: ignore[misc]
    """Megatron's own layer with fewer rows.

    A model that calls it in its forward gets what was given: only `part` computes.
    """

    def __init__(self, model: Any, rows: Rows, number: int) -> None:
        """New rows, with nothing in them yet."""
        self.rows, self.number = rows, number
        # To draw numbers here would change all that are drawn afterwards, dropout among them.
        undrawn = copy.copy(model.config)
        undrawn.perform_initialization = False
        super().__init__(
            num_embeddings=rows.each * rows.tensor,
            embedding_dim=model.config.hidden_size,
            init_method=model.config.init_method,
            config=undrawn,
            tp_group=model.pg_collection.tp,
        )
        self.config = model.config
        # Where the rank's last chunk is the first stage, too.
        self.given: GivenEmbeddings | None = None
        self._computes = False

    @property
    def first_row(self) -> int:
        return self.rows.of(self.number).start

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings [b, s, h] of tokens [b, s]. Called through the module, so that its hooks see to its
        weight."""
        self._computes = True
        try:
            return self(tokens)  # type: ignore[no-any-return]
        finally:
            self._computes = False

    def add_gradient(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add what a gradient [b, s, h] of the embeddings of tokens [b, s] brings, as autograd would."""
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
        offsets = (0, self.number, self.rows.num_shards)
        return {
            key: ShardedTensor.from_rank_offsets(
                key, self.weight, offsets, replica_id=(0, 0, replica), allow_shape_mismatch=True
            )
        }


def place(first: Any, last: Any, shard: EmbeddingShard) -> None:
    """Put a shard into a rank's last chunk, where the whole one was or would be, and into the first stage what
    stands for it."""
    # As Megatron marks the whole one's.
    shard.weight.is_embedding_or_output_parameter = True
    if last.config.use_mup:
        shard.weight.is_embedding_parameter = True
    if first.pre_process:
        given = GivenEmbeddings(first)
        if first is last:
            shard.given = given
        else:
            first.embedding.word_embeddings = given
    if not last.pre_process:
        last.embedding = MegatronModule(last.config)
    last.embedding.word_embeddings = shard


class Inputs(NamedTuple):
    """A rank's part of the embedding: its shard, and `given`, which stands for all shards where the first stage is.

    That is at this `place` of the pipeline; other ranks have none.
    """

    shard: EmbeddingShard
    given: GivenEmbeddings | None
    place: int

    @classmethod
    def of(cls, first: Any, last: Any, place: int) -> Inputs:
        """Return the inputs of a rank's chunks, in which they have been placed."""
        shard = last.embedding.word_embeddings
        assert isinstance(shard, EmbeddingShard), "it is split beside the output layer"
        if first is last or not first.pre_process:
            return cls(shard, shard.given, place)
        return cls(shard, first.embedding.word_embeddings, place)


@dataclass
class NotedStep:
    """Record of a script's step on a micro-batch: the arguments of its model, and the loss function that it
    returned."""

    given: tuple[Any, ...]
    named: dict[str, Any]
    loss_function: Callable[..., Any]

    @property
    def tokens(self) -> torch.Tensor:
        """Tokens [b, s]. Raises ValueError where the model was given none."""
        tokens = self.named.get("input_ids", self.given[0] if self.given else None)
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or self.named.get("decoder_input") is not None:
            raise ValueError(
                "--bpipe-vocabulary-input: this script calls its model without tokens [b, s], which all ranks must "
                f"look up: {_DROP}"
            )
        return tokens

    def step(self, data: Any, model: torch.nn.Module, *rest: Any) -> tuple[Any, Callable[..., Any]]:
        """Run in place of the script's step."""
        return model(*self.given, **self.named), self.loss_function


def noted_steps(call: Call, chunk: int) -> list[NotedStep]:
    """Return every micro-batch of a call, in order; nothing is computed.

    Raises ValueError for a step that computes with what its model makes.
    """
    return [_noted_step(call, chunk) for _ in range(call.num_microbatches)]


def _noted_step(call: Call, chunk: int) -> NotedStep:
    model = call.models[chunk]
    nothing = torch.zeros((), requires_grad=True)
    with _not_computing(model, nothing) as seen:
        output, loss_function = call.forward_step_func(call.data[chunk], model)
    if output is not nothing or len(seen) != 1:
        raise ValueError(
            "--bpipe-vocabulary-input: this script's step must call its model exactly once and return the model's "
            f"output unchanged, because it is called before there is an output: {_DROP}"
        )
    ((given, named),) = seen
    return NotedStep(given, named, loss_function)


@contextlib.contextmanager
def _not_computing(
    model: torch.nn.Module, nothing: torch.Tensor
) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Note the arguments of a model, whatever is wrapped around it, and return them without computing."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def noting(*given: Any, **named: Any) -> torch.Tensor:
        seen.append((given, named))
        return nothing

    # In front of the class's own.
    model.forward = noting
    try:
        yield seen
    finally:
        del model.forward


def gather_tokens(mine: list[NotedStep] | None, pipeline: Any, place: int) -> list[torch.Tensor]:
    """Return the tokens [b, s] of every micro-batch, which the rank at this place of the pipeline has noted.

    Collective over the pipeline.
    """
    source = dist.get_process_group_ranks(pipeline)[place]
    device = torch.device(torch.cuda.current_device())
    tokens = None if mine is None else torch.stack([one.tokens for one in mine]).to(device)
    shape = torch.tensor([0, 0, 0] if tokens is None else tokens.shape, dtype=torch.int64, device=device)
    dist.broadcast(shape, source, group=pipeline)
    if tokens is None:
        tokens = torch.empty(*shape.tolist(), dtype=torch.int64, device=device)
    dist.broadcast(tokens, source, group=pipeline)
    return list(tokens)
