"""The output layer of a real Megatron model as one shard: Megatron's results, except for the order of sums."""

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._C._distributed_c10d import HashStore

from bpipe.runtime.shards import EarlyShard, Rows
from bpipe.schedule.action import Action, Kind
from megatron.scheduling.loop.chunks import Call, ChunkStages, RankPart
from megatron.scheduling.loop.halves import Halves
from megatron.scheduling.placement.chunks import first_replicas
from megatron.scheduling.vocabulary import output_shards
from megatron.scheduling.vocabulary.input_shards import Inputs, gather_tokens, noted_steps
from megatron.scheduling.vocabulary.output_shards import OutputLayerShard, output_shard, split
from megatron.scheduling.vocabulary.sharded_stages import ShardedStages

HIDDEN, LENGTH, BATCH, VOCABULARY = 64, 16, 2, 96
MICROBATCHES = 3
Loss = Callable[[torch.Tensor], Any]


def config(**settings: Any) -> TransformerConfig:
    fields = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
    }
    return TransformerConfig(**{**fields, "attention_dropout": 0.0, "calculate_per_token_loss": False, **settings})


def model(**settings: Any) -> GPTModel:
    torch.manual_seed(1)
    shared = settings.pop("share_embeddings_and_output_weights", False)
    keywords = {
        name: settings.pop(name) for name in ("parallel_output", "pre_process", "post_process") if name in settings
    }
    spec = get_gpt_layer_local_spec()
    return GPTModel(
        config(**settings), spec, VOCABULARY, LENGTH, share_embeddings_and_output_weights=shared, **keywords
    )


def mean(losses: torch.Tensor) -> Any:
    return losses.mean(), {"lm loss": losses.mean().detach()}


def summed(losses: torch.Tensor) -> Any:
    """A loss that reports the number of tokens, some of which are masked."""
    counted = torch.arange(losses.numel()).view_as(losses) % 3 > 0
    return (losses * counted).sum(), counted.sum().int(), {"lm loss": losses.sum().detach()}


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    while True:
        yield torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def called(inner: GPTModel, loss: Loss, labelled: bool = True, **more: Any) -> Call:
    def step(data: Any, module: GPTModel) -> Any:
        tokens = next(data)
        places = torch.arange(LENGTH).expand(BATCH, LENGTH)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        labels = tokens.roll(-1, 1) if labelled else None
        return module(tokens, places, mask, labels=labels), loss

    fields: dict[str, Any] = {
        "config": inner.config,
        "models": [inner],
        "data": [batches()],
        "forward_step_func": step,
        "num_microbatches": MICROBATCHES,
        "cp_size": 1,
        **more,
    }
    return Call(**fields)


def action(kind: Kind, microbatch: int) -> Action:
    return Action(0, kind, microbatch)


def whole(loss: Loss, **settings: Any) -> tuple[GPTModel, Call]:
    """Train with Megatron's own output layer."""
    inner = model(**settings)
    call, stages = called(inner, loss), ChunkStages(RankPart({0: 0}, 0, set(), Halves()))
    stages.begin(call)
    for microbatch in range(MICROBATCHES):
        stages.forward(action(Kind.FORWARD, microbatch), ())
        stages.backward(action(Kind.BACKWARD, microbatch), ())
    return inner, call


def sharded(inner: GPTModel, call: Call, early: bool = False) -> ShardedStages:
    stages = ShardedStages(RankPart({0: 0}, 0, set(), Halves()), output_shard(inner), early)
    stages.begin(call)
    for microbatch in range(MICROBATCHES):
        output = stages.forward(action(Kind.FORWARD, microbatch), ())
        sent = tuple(tensor.detach().clone() for tensor in output)
        stages.let_go(output)
        (own,) = stages.shard.forward(action(Kind.SHARD_FORWARD, microbatch), sent)
        if isinstance(stages.shard, EarlyShard) and not call.forward_only:
            # A thread may run this before or after T.
            parts = stages.shard.late(microbatch, (own[None],))
            stages.shard.backward(action(Kind.SHARD_BACKWARD, microbatch), (own[None],))
        else:
            parts = stages.shard.backward(action(Kind.SHARD_BACKWARD, microbatch), (own[None],))
        if not call.forward_only:
            stages.backward(action(Kind.BACKWARD, microbatch), parts)
    stages.check()
    return stages


def check_one_shard_trains_what_the_whole_layer_does() -> None:
    scaled = {"use_mup": True, "mup_output_mult": 0.25}
    for loss, settings, early in product(
        (mean, summed), ({}, {"calculate_per_token_loss": True}, scaled), (False, True)
    ):
        if settings.get("calculate_per_token_loss") and loss is mean:
            continue
        expected, stock = whole(loss, **settings)
        inner = model(**settings)
        split(inner, inner)
        assert isinstance(inner.output_layer, OutputLayerShard)
        call = called(inner, loss)
        sharded(inner, call, early)
        for call_loss, stock_loss in zip(call.losses, stock.losses, strict=True):
            torch.testing.assert_close(call_loss["lm loss"].float(), stock_loss["lm loss"].float(), rtol=1e-6, atol=0)
        assert int(call.num_tokens) == int(stock.num_tokens)
        others = dict(expected.named_parameters())
        for name, weight in inner.named_parameters():
            assert weight.grad is not None
            assert others[name].grad is not None
            distance = (weight.grad.double() - others[name].grad.double()).norm() / others[name].grad.double().norm()
            assert distance < 3e-6, f"{name}: {distance}"


def check_splitting_changes_no_weight_and_draws_nothing() -> None:
    plain, after = model(), torch.rand(1)
    inner = model()
    split(inner, inner)
    assert torch.equal(torch.rand(1), after)
    assert all(
        torch.equal(parameter, plain_parameter)
        for parameter, plain_parameter in zip(inner.parameters(), plain.parameters(), strict=True)
    )
    weight = inner.output_layer.weight
    assert weight.is_embedding_or_output_parameter
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride, weight.allreduce) == (
        True,
        0,
        1,
        True,
    )
    assert list(inner.state_dict()) == list(plain.state_dict())


def check_logits_are_computed_through_the_module() -> None:
    """Its hooks gather its weight if the distributed optimizer overlaps that; otherwise the weight would be stale."""
    inner = model()
    split(inner, inner)
    called_for: list[torch.Size] = []
    inner.output_layer.register_forward_pre_hook(lambda layer, inputs: called_for.append(inputs[0].shape))
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    assert torch.equal(inner.output_layer.logits(x), x @ inner.output_layer.weight.t())
    assert called_for == [x.shape]


def check_evaluation_calls_the_loss_function_once() -> None:
    seen: list[torch.Tensor] = []

    def watched(losses: torch.Tensor, non_loss_data: bool = False) -> Any:
        seen.append(losses.clone())
        return losses if non_loss_data else mean(losses)

    inner = model()
    split(inner, inner)
    with torch.no_grad():
        sharded(inner, called(inner, watched, forward_only=True))
        assert len(seen) == MICROBATCHES
        assert all(losses.shape == (BATCH, LENGTH) and bool((losses > 0).all()) for losses in seen)
        call = called(inner, watched, forward_only=True, collect_non_loss_data=True)
        sharded(inner, call)
        assert all(map(torch.equal, call.losses, seen))
        plain = model()
        tokens = next(batches())
        places, mask = (
            torch.arange(LENGTH).expand(BATCH, LENGTH),
            torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
        )
        torch.testing.assert_close(
            seen[0], plain(tokens, places, mask, labels=tokens.roll(-1, 1)), rtol=1e-6, atol=1e-6
        )


def check_what_shards_cannot_compute_is_refused() -> None:
    inner = model()
    split(inner, inner)
    with pytest.raises(ValueError, match="the weight of each token depends on the losses"):
        sharded(inner, called(inner, lambda losses: (losses.square().mean(), {})))
    with pytest.raises(ValueError, match="call the model with labels"):
        sharded(inner, called(inner, lambda output: (output.mean(), {}), labelled=False))
    with pytest.raises(ValueError, match="does not depend on what its model returned"):
        sharded(inner, called(inner, lambda losses: (torch.ones(1, requires_grad=True) * 1, {})))
    for settings, reason in (
        ({"parallel_output": False}, "gathers its logits"),
        (
            {"defer_embedding_wgrad_compute": True, "gradient_accumulation_fusion": True},
            "drop --defer-embedding-wgrad-compute",
        ),
    ):
        refused = SimpleNamespace(
            config=SimpleNamespace(**settings), parallel_output=settings.get("parallel_output", True), vp_stage=None
        )
        with pytest.raises(ValueError, match=reason):
            split(refused, refused)
    with pytest.raises(ValueError, match="but this is a Linear: train without --bpipe-vocabulary"):
        output_shard(torch.nn.Linear(1, 1))


def check_a_tied_weight_is_filed_in_pieces_of_one_size() -> None:
    """The first rank files all of it, and every rank the rows that it has a copy of."""
    rows, whole = Rows(12, 1, 3), torch.arange(24.0).view(12, 2)
    key = "embedding.word_embeddings.weight"

    class Embedding(torch.nn.Module):
        def sharded_state_dict(self, prefix: str) -> dict[str, Any]:
            return {f"{prefix}weight": ShardedTensor.from_rank_offsets(f"{prefix}weight", whole, replica_id=(0, 0, 2))}

    first = SimpleNamespace(
        pre_process=True, post_process=False, embedding=SimpleNamespace(word_embeddings=Embedding())
    )
    first.pg_collection = SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0))
    weight = torch.nn.Parameter(whole[4:8].clone())
    output_shards.tie(first, first, weight, rows)
    assert weight.shared
    assert weight.shared_embedding
    entry = first.embedding.word_embeddings.sharded_state_dict(prefix="embedding.word_embeddings.")[key]
    assert entry.data is whole
    pieces = entry.build()
    assert torch.equal(entry.merge_fn([piece.data for piece in pieces]), whole)
    copy = output_shards.tied_entry(weight, 1, rows, "output_layer.", 2)
    for piece in (*pieces, copy):
        assert (piece.key, piece.global_shape, piece.local_shape, piece.axis_fragmentations) == (
            key,
            (12, 2),
            (4, 2),
            (3, 1),
        )
    assert [piece.global_offset for piece in pieces] == [(0, 0), (4, 0), (8, 0)]
    assert {piece.replica_id for piece in pieces} == {(0, 0, 2)}
    assert (copy.global_offset, copy.replica_id) == ((4, 0), (1, 0, 2))
    assert torch.equal(copy.data, pieces[1].data)
    # The rank's own rows are saved by the embedding only: a fully parallel save would write both.
    whole_and_part = {"embedding": entry, "output": output_shards.tied_entry(weight, 1, rows, "output_layer.", 0)}
    saved = first_replicas(whole_and_part)
    assert saved["embedding"] is entry
    assert isinstance(saved["output"], LocalNonpersistentObject)
    alone = {"output": copy}
    assert first_replicas(alone) == alone


def check_an_embedding_in_shards_is_looked_up_before_the_model_asks() -> None:
    inner, tokens = model(), next(batches())
    table = inner.embedding.word_embeddings.weight.detach().clone()
    split(inner, inner, 0)
    shard, placeholder, _ = Inputs.of([inner], 0)
    assert placeholder is not None
    assert inner.embedding.word_embeddings is shard
    assert torch.equal(shard.weight, table)
    rows = shard.part(tokens)
    assert torch.equal(rows, table[tokens])
    with pytest.raises(ValueError, match="can embed only what its pipeline's ranks have looked up"):
        shard(tokens)
    placeholder.give(rows.requires_grad_())
    shard(tokens).square().sum().backward()
    shard.add_gradient(tokens, rows.grad)
    again = table.requires_grad_()
    again[tokens].square().sum().backward()
    torch.testing.assert_close(shard.weight.grad, again.grad, rtol=1e-6, atol=0)


def check_an_embedding_of_another_chunk_leaves_the_first_stage_no_rows() -> None:
    """Both shards are in the last chunk; if tied, they are one parameter there."""
    for tied in (False, True):
        first, last = (
            model(share_embeddings_and_output_weights=tied, **{without: False})
            for without in ("post_process", "pre_process")
        )
        table = first.embedding.word_embeddings.weight.detach().clone()
        split(first, last, 0)
        shard, placeholder, _ = Inputs.of([first, last], 0)
        assert first.embedding.word_embeddings is placeholder
        assert not list(placeholder.parameters())
        assert torch.equal(shard.weight, table)
        assert (last.output_layer.weight is shard.weight) is tied
        names = [name for name, _ in last.named_parameters() if not name.startswith("decoder")]
        assert names == ["embedding.word_embeddings.weight", *(["output_layer.weight"] * (not tied))]
        if tied:
            assert first.shared_embedding_or_output_weight() is None


def check_steps_are_noted_before_anything_is_computed() -> None:
    inner = model()
    steps, expected = noted_steps(called(inner, mean), 0), batches()
    assert len(steps) == MICROBATCHES
    tokens = gather_tokens(steps, inner.pg_collection.pp, 0)
    assert all(torch.equal(part, next(expected)) for part in tokens)
    assert "forward" not in vars(inner)
    for message, wrong in {
        "doubles what the model returns": lambda data, module: (2 * module(next(data), None, None), mean),
        "never calls it": lambda data, module: (torch.zeros(()), mean),
    }.items():
        with pytest.raises(ValueError, match=r"must call its model exactly once and return the model's output"):
            noted_steps(called(inner, mean, forward_step_func=wrong), 0)
        assert "forward" not in vars(inner), message
    untold = noted_steps(
        called(inner, mean, forward_step_func=lambda data, module: (module(None, None, None), mean)), 0
    )
    with pytest.raises(ValueError, match="calls its model without tokens"):
        gather_tokens(untold, inner.pg_collection.pp, 0)


def setup() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
