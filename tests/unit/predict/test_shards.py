"""A vocabulary in shards: what ranks hold and how long they take, part by part and in a published run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import build
from bpipe.predict.activations import stage_bytes
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.layers.ends import shard_bytes, shard_saved
from bpipe.predict.layout import Setup
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import Model, gpt
from bpipe.predict.profile import Entry, Profile
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import memory_of, peak_bytes

UNTIED = replace(gpt("published", 32, 3072, 24, 256000), tied_embedding=False)
SPLIT = ("1", "2", "interlaced")


def setup(model: Model = UNTIED, t: int = 1, p: int = 8, **changes: Any) -> Setup:
    choices = {"recompute": "none", "precision": "fp16", "vocabulary": Vocabulary.ONE, "input_shards": True, **changes}
    layers = choices.pop("layers", (model.num_layers // p,) * p)
    return Setup(model, parse_cluster(f"a100-80g:1x{t * p}"), t, p, 1, 16 * p, 2048, layers, **choices)


@pytest.mark.parametrize("vocabulary", SPLIT)
def test_logits_are_on_all_ranks_and_on_the_last_no_loss(vocabulary: str) -> None:
    """Each rank holds 2 n V / p bytes; the last stage alone held 4 n V of softmax, besides 6 n V for a moment."""
    whole, ours = setup(vocabulary=Vocabulary.WHOLE, input_shards=False), setup(vocabulary=Vocabulary(vocabulary))
    tokens = 2048
    assert stage_bytes(whole)[-1] - stage_bytes(ours)[-1] == 4 * tokens * 256000
    names = {row.name: row.nbytes * row.num for row in shard_saved(ours)}
    assert names["logits of the shard"] == 2 * tokens * 256000 // 8
    assert ("statistics of the shard" in names) == (vocabulary == "2")
    assert ("part of the input's gradient" in names) == (vocabulary == "2")
    assert shard_bytes(whole) == 0


@pytest.mark.parametrize("vocabulary", SPLIT)
@pytest.mark.parametrize("balance", ["none", "bpipe"])
def test_activations_are_the_schedules_own_peak(vocabulary: str, balance: str) -> None:
    ours = setup(vocabulary=Vocabulary(vocabulary), balance=named_balance(balance))
    exact = peak_bytes(build(ours.program()), memory_of(stage_bytes(ours), shard_bytes=shard_bytes(ours)))
    predicted = [rank.activations_bytes + rank.hosted_bytes + shard_bytes(ours) for rank in predict_memory(ours)]
    assert all(rank_bytes >= exact_bytes for rank_bytes, exact_bytes in zip(predicted, exact, strict=True))
    if balance == "none":
        # On the last rank, and on all if interlaced, the fullest moment need not be between S and T.
        assert vocabulary == "interlaced" or tuple(predicted[:-1]) == exact[:-1]


def test_a_measured_output_layer_is_shared_out() -> None:
    ours = setup()
    predicted = predict_costs(ours)
    measured = Profile("profile.json", (Entry(forward_s=1.0, backward_s=2.0, output_s=16.0, embedding_s=3.0),)).apply(
        ours, predicted
    )
    (shard,), (before,) = measured.shards, predicted.shards
    assert float(shard.forward_s + shard.backward_s) == pytest.approx(16 / 8)
    assert shard.forward_s / shard.backward_s == pytest.approx(before.forward_s / before.backward_s)
    assert (shard.input_forward_s, shard.input_backward_s) == (1.0, 2.0)
    assert measured.stages[-1].output_forward_s == measured.stages[0].embedding_forward_s == 0


def test_the_published_redistribution() -> None:
    """With 256000 tokens the last rank has no layer: pass times show 4,4,4,5,5,5,5,0."""
    assert setup(layers=(4, 4, 4, 5, 5, 5, 5, 0)).layers[-1] == 0
    with pytest.raises(ValueError, match="must give 8 stages 32 layers"):
        setup(layers=(4, 0, 8, 5, 5, 5, 5, 0))
