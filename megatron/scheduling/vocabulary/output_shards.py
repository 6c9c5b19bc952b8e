"""Split the output layer of a model over all ranks of its pipeline, as soon as Megatron has built it.

A shard has the name of the whole layer. On the last rank the model's forward notes the inputs of logits and losses, and
computes neither. Megatron's constructor runs to its end first, so that all weights are those of a run without shards: each
rank draws by a seed of its own. Then the last rank deals its rows out.

If the embedding shares the weight, one rank embeds with the whole of it. The gradients of the copies are summed row by row,
as in Megatron's all-reduce between the first rank and the last: a sum of two numbers has the same bits either way. A
checkpoint has one weight, under the embedding's key.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.utils import unwrap_model

from bpipe.config.features.queries import reasons_of
from bpipe.config.features.table import SHARDED, Settings
from bpipe.runtime.shards import Rows
from bpipe.transport.distributed import gather_into
from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.halves import backward_of_weight
from megatron.scheduling.options.arguments import end_where
from megatron.scheduling.placement import chunks
from megatron.scheduling.placement.positions import Positions
from megatron.scheduling.vocabulary import input_shards
from megatron.scheduling.vocabulary.input_shards import piece


class LossInputs(NamedTuple):
    """Inputs of a micro-batch's loss."""

    hidden: torch.Tensor
    """The last layer's output [s, b, h], of this rank's part of s."""

    labels: torch.Tensor
    """Labels [b, s]."""

    losses: torch.Tensor
    """Zeros [b, s] in place of the tokens' losses."""


_OUTPUT, _EMBEDDING = "output_layer.", "embedding.word_embeddings."
# In a checkpoint rows on other ranks than the first are copies of its own.
_COPY = 1
# Gets the losses [b, s] of each further token, and whether its label had the largest logit.
Log = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Noted(NamedTuple):
    """Inputs of all losses of a micro-batch."""

    tokens: tuple[LossInputs, ...]
    """Those of the next token, then those of each further one."""

    log: Log | None
    """Logs the losses of further tokens."""


class OutputLayerShard(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's own layer with fewer rows. Only `logits` computes; a model's call returns its input."""

    def __init__(self, model: Any) -> None:
        """Make rows without values. Raises ValueError if the vocabulary does not make equal shards."""
        config, pipeline = model.config, model.pg_collection.pp
        self.rows = Rows(model.vocab_size, model.pg_collection.tp.size(), pipeline.size())
        self.number = self.rows.shard(model.pg_collection.tp.rank(), pipeline.rank())
        super().__init__(
            config.hidden_size,
            self.rows.each * self.rows.tensor,
            config=input_shards.undrawn(config),
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=model.pg_collection.tp,
        )
        self.config = config
        self.tied = model.share_embeddings_and_output_weights
        # Whether the weight is that of the embedding's shard.
        self.shared = False
        self._scaled = model._scale_logits
        self._computes = False
        self._hidden: torch.Tensor | None = None
        self._noted: list[LossInputs] = []
        # Set by what logs the losses of further tokens once they are known.
        self.log: Log | None = None

    @property
    def first_row(self) -> int:
        return self.rows.of(self.number).start

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [s, b, r] of the last layer's output, as Megatron makes them."""
        self._computes = True
        try:
            # Through the module, whose hooks may gather its weight.
            return self._scaled(self(x)[0])  # type: ignore[no-any-return]
        finally:
            self._computes = False

    def of_input(self, part: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the last layer's output from this tensor-parallel rank's part [s, b, h] of it.

        It is the sum over these ranks, of this rank's part of s, as in Megatron's own backward. It may share memory with
        the part.
        """
        return input_shards.reduce(self._scaled(part), self.sequence_parallel, self.tp_group)

    def backward_weight(self, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the weight's gradient from that of logits [s, b, r], as in Megatron's own backward; `x` is the input of
        `logits`."""
        if self.weight.requires_grad:
            gathers = self.tp_group if self.sequence_parallel else None
            backward_of_weight(self.weight, x, self._scaled(gradient), gathers, self.gradient_accumulation_fusion)

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Any:
        if self._computes:
            return super().forward(input_, weight, runtime_gather_output)
        self._hidden = input_
        return input_, None

    def note(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return zeros for the tokens' losses, in place of the model's `compute_language_model_loss`."""
        assert self._hidden is not None, "a model computes its losses after its output layer"
        losses = torch.zeros(
            labels.shape, dtype=torch.float32, device=labels.device, requires_grad=torch.is_grad_enabled()
        )
        self._noted.append(LossInputs(self._hidden, labels, losses))
        self._hidden = None
        return losses

    def noted(self) -> Noted:
        """Return what the model's forward noted. Raises ValueError if it computed no losses."""
        tokens, log = self._noted, self.log
        self._noted, self._hidden, self.log = [], None, None
        if len(tokens) != 1 + (self.config.mtp_num_layers or 0):
            raise ValueError(
                "with --bpipe-vocabulary no rank has all logits of a micro-batch, but this script requests them "
                "from its model: call the model with labels, or train without --bpipe-vocabulary"
            )
        # Megatron computes the losses of further tokens first.
        return Noted((tokens[-1], *tokens[:-1]), log)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the rows of the whole layer's weight, under its key and of its shape."""
        assert metadata is not None, "Megatron says which ranks have replicas"
        assert not sharded_offsets, "an output layer is in no layer of a stage"
        key, replica = f"{prefix}weight", metadata["dp_cp_group"].rank()
        if self.shared:
            return {}
        if self.tied:
            return {key: tied_entry(self.weight, self.number, self.rows, prefix, replica)}
        return {key: piece(key, self.weight, self.number, self.rows, (0, 0, replica))}


class Splitting:
    """Wrappers that deal rows out to the last chunk of every rank; `inputs`: rows of the embedding, too."""

    def __init__(self, positions: Positions, inputs: bool = False) -> None:
        self._positions, self._inputs = positions, inputs
        # This rank's first chunk of the model that is being built.
        self._first: Any = None

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """Return the patches, which are needed before any model is built."""
        return {
            patches.GPT_MODEL: patches.replaced_by(self._construct),
            patches.HYBRID_MODEL: patches.replaced_by(self._construct),
            patches.TIED_GRADIENTS: patches.replaced_by(self._sum_tied_gradients),
            **chunks.BY_LAYER,
            **chunks.ONCE,
        }

    def _construct(self, construct: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
        construct(model, *args, **kwargs)
        chunk = model.vp_stage or 0
        if chunk == 0:
            self._first = model
        if chunk == len(self._positions.mirrored) - 1:
            split(self._first, model, self._positions.rank_at(0) if self._inputs else None)
            self._first = None

    def _sum_tied_gradients(
        self, all_reduce: Callable[..., None], model: list[torch.nn.Module], *args: Any, **kwargs: Any
    ) -> None:
        """Run where Megatron sums the copies' gradients: after their reduction, before they are scaled."""
        layer = output_shard(model[-1])
        if layer.shared:
            # One weight has both gradients already.
            return
        if layer.tied:
            sum_tied_gradients(model, layer.weight, self._positions.rank_at(0))
            return
        all_reduce(model, *args, **kwargs)
        if self._positions.folded:
            # Layers that predict further tokens have a copy of the embedding.
            chunks.sum_gradients(model[0], model[-1])


def output_shard(model: Any) -> OutputLayerShard:
    """Return the shard of a model, which may be wrapped. Raises ValueError for a model without one."""
    inner = unwrap_model(model)
    layer = getattr(inner, "output_layer", None)
    if not isinstance(layer, OutputLayerShard):
        raise ValueError(
            "--bpipe-vocabulary splits the output layer of a GPTModel or HybridModel when it is built, but this is "
            f"a {type(inner).__name__}: train without --bpipe-vocabulary"
        )
    return layer


def split(first: Any, model: Any, embeds: int | None = None) -> None:
    """Deal the output layer's rows out to the last chunks of all ranks. Collective over the model's pipeline.

    Args:
        first: This rank's first chunk.
        model: This rank's last chunk.
        embeds: Rank in the pipeline with the embedding, which is then split, too; a tied weight becomes one on every
            rank.

    Raises:
        ValueError: The model cannot be split.
    """
    end_where([*reasons_of(SHARDED, model.config, "--bpipe-vocabulary"), *_of_model(model, embeds is not None)])
    shard = OutputLayerShard(model)
    whole = model.output_layer.weight if model.post_process else None
    if whole is not None and shard.tied and first.pre_process:
        # The copy on the embedding's own rank is still empty: only between two ranks does Megatron's constructor fill it.
        whole = first.embedding.word_embeddings.weight
    with torch.no_grad():
        _deal(None if whole is None else whole.data, shard.weight.data, model.pg_collection.pp, -1)
    input_shards.mark(shard.weight, model.config)
    if embeds is not None:
        _split_embedding(first, model, shard, embeds)
    elif shard.tied:
        tie(first, model, shard.weight, shard.rows)
    if embeds is not None and model.post_process:
        # After the embedding on every rank: a weight that both share has one name.
        del model.output_layer
    model.output_layer = shard
    if model.post_process:
        model.compute_language_model_loss = shard.note


def _split_embedding(first: Any, model: Any, output: OutputLayerShard, embeds: int) -> None:
    """Add a rank's shard of the embedding to its last chunk, which has that of the output layer."""
    shard = input_shards.EmbeddingShard(model, output.rows, output.number)
    whole = first.embedding.word_embeddings.weight.data if first.pre_process else None
    with torch.no_grad():
        _deal(whole, shard.weight.data, model.pg_collection.pp, embeds)
    input_shards.place(first, model, shard)
    if output.tied:
        output.weight, output.shared = shard.weight, True
        for chunk in (first, model):
            # Megatron would look for a copy, and keep two copies on one rank equal.
            chunk.tie_embeddings_and_output_weights_state_dict = lambda *args, **kwargs: None
            chunk.shared_embedding_or_output_weight = lambda: None


def _of_model(model: Any, inputs: bool) -> Iterator[str]:
    """Yield the reasons that only a model shows; if it was built from flags, they were checked before."""
    if not model.parallel_output:
        yield "--bpipe-vocabulary: this model gathers its logits, but shards never do; build it with parallel_output"
    ahead = Settings(model.config).mtp_num_layers
    if ahead:
        settings = SimpleNamespace(
            mtp_num_layers=ahead,
            untie_embeddings_and_output_weights=not model.share_embeddings_and_output_weights,
            bpipe_vocabulary_input=inputs,
        )
        yield from reasons_of(SHARDED, settings, "--bpipe-vocabulary")


def _deal(whole: torch.Tensor | None, rows: torch.Tensor, pipeline: Any, place: int) -> None:
    """Copy this rank's rows of `whole`, which the rank at `place` in the pipeline has, into `rows`."""
    source = dist.get_process_group_ranks(pipeline)[place]
    # Models may be built on the CPU, from which the group may be unable to send.
    parts = None if whole is None else [part.contiguous().cuda() for part in whole.chunk(pipeline.size())]
    received = rows.cuda()
    dist.scatter(received, parts, src=source, group=pipeline)
    rows.copy_(received)


def tie(first: Any, last: Any, weight: torch.nn.Parameter, rows: Rows) -> None:
    """Mark a rank's rows as Megatron marks the last rank's copy, so that the norm counts each number once, and save the
    embedding's weight in as many pieces as there are shards. The chunks `first` and `last` may be one."""
    weight.shared = weight.shared_embedding = True  # type: ignore[attr-defined]
    # Megatron would take the output layer's entry for the whole weight.
    last.tie_embeddings_and_output_weights_state_dict = lambda *args, **kwargs: None
    if last.post_process:
        # There is no whole copy any more that must be kept equal on one rank.
        last.shared_embedding_or_output_weight = lambda: None
    if first.pre_process:
        _file_in_pieces(first.embedding.word_embeddings, first.pg_collection.tp.rank(), rows)


def tied_entry(weight: torch.nn.Parameter, shard: int, rows: Rows, prefix: str, replica: int) -> ShardedTensor:
    """Return the sharded tensor of a rank's rows, a copy of the embedding's; `replica` is the rank among equal ones."""
    key = f"{prefix.removesuffix(_OUTPUT)}{_EMBEDDING}weight"
    return piece(key, weight, shard, rows, (_COPY, 0, replica))


def sum_tied_gradients(chunks: Sequence[torch.nn.Module], weight: torch.nn.Parameter, embeds: int) -> None:
    """Give all copies of a row the sum of both layers' gradients, which are already reduced over replicas.

    `weight` is in the last of the rank's chunks, and `embeds` is the rank in the pipeline with the embedding. A frozen
    weight has no gradients. Collective over the model's pipeline.
    """
    first: Any = unwrap_model(chunks[0])
    pipeline = first.pg_collection.pp
    root = dist.get_process_group_ranks(pipeline)[embeds]
    gradient = _gradient(chunks[-1], weight)
    if gradient is None:
        return
    whole = _gradient(chunks[0], first.embedding.word_embeddings.weight) if first.pre_process else None
    parts = None if whole is None else list(whole.chunk(pipeline.size()))
    others = torch.empty_like(gradient)
    dist.scatter(others, parts, src=root, group=pipeline)
    gradient.add_(others)
    # Rows of a matrix are contiguous, so the parts are views: the sums are written in place.
    dist.gather(gradient, parts, dst=root, group=pipeline)


def _gradient(chunk: Any, weight: Any) -> torch.Tensor | None:
    """Return a weight's whole gradient.

    With the distributed optimizer a replica has only a part of it, and other parts for the two layers.
    """
    gradient: torch.Tensor | None = weight.main_grad if hasattr(weight, "main_grad") else weight.grad
    ddp = getattr(chunk, "ddp_config", None)
    if gradient is None or ddp is None or not ddp.use_distributed_optimizer:
        return gradient
    group = chunk.param_to_bucket_group[weight]
    (bucket,) = (bucket for bucket in group.buckets if weight in bucket.params)
    replicas = group.intra_distributed_optimizer_instance_group
    part = bucket.grad_data.view(replicas.size(), -1)[replicas.rank()]
    # The part is in the memory that is written.
    gather_into(bucket.grad_data, part.clone(), group=replicas)
    begin, end = bucket.param_to_index[weight]
    # The gradient may have memory of its own.
    gradient.copy_(bucket.grad_data[begin:end].view_as(gradient))
    return gradient


def _file_in_pieces(embedding: Any, tensor_rank: int, rows: Rows) -> None:
    """A checkpoint has all pieces of one weight in one size, whichever rank saves them."""
    state_of_whole = embedding.sharded_state_dict

    def build(key: str, whole: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        parts = whole.chunk(rows.pipeline)
        return [piece(key, part, rows.shard(tensor_rank, place), rows, replica_id) for place, part in enumerate(parts)]

    def in_pieces(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {
            name: ShardedTensorFactory(
                whole.key, whole.data, build, lambda parts: torch.cat(list(parts)), whole.replica_id
            )
            if name.endswith("weight")
            else whole
            for name, whole in state_of_whole(*args, **kwargs).items()
        }

    embedding.sharded_state_dict = types.MethodType(in_pieces, embedding)
