"""A schedule's stages set Megatron's flags by themselves; what cannot be is said before Megatron runs into it."""

from types import SimpleNamespace
from typing import Any

import pytest

from bpipe.config.features.queries import reasons_of
from bpipe.config.features.table import PLACED, SHARDED
from megatron.scheduling.hooks import upstream
from megatron.scheduling.options.derived_flags import complete, follow
from megatron.scheduling.placement.positions import Positions

V = Positions(4, backwards=True, mirrored=(True, False))
WANTED = "--bpipe-schedule v-half"

# Settings that a placement of its own refuses, by feature.
REFUSED: dict[str, list[dict[str, Any]]] = {
    "checkpoints by rank": [{"save": "here", "ckpt_format": "torch"}, {"load": "here", "ckpt_format": "torch_dcp"}],
    "local checkpoints": [{"non_persistent_ckpt_type": "local"}],
    "further tokens apart from the loss": [{"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|tm|L"}],
    "skipped iterations": [{"iterations_to_skip": [3]}],
}
ALLOWED: list[dict[str, Any]] = [
    {"save": "here", "load": "there", "ckpt_format": "torch_dist", "non_persistent_ckpt_type": "global"},
    {"ckpt_format": "torch"},
    {"mtp_num_layers": 1},
    {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et*3|(tt|)*6mL"},
    {"pipeline_model_parallel_layout": "Et|tL", "iterations_to_skip": []},
]


def parsed(**more: Any) -> SimpleNamespace:
    """What Megatron's parser leaves."""
    names = dict.fromkeys(upstream.REQUIRED["derived_flags"])
    return SimpleNamespace(
        **{**names, "pipeline_model_parallel_size": 4, "num_layers": 16, "overlap_p2p_comm": False, **more}
    )


def test_a_pattern_of_layers_says_the_stages_itself() -> None:
    args = parsed(hybrid_layer_pattern="M|*|-|M|*|-|M|*/M")
    follow(args, V)
    assert args.num_virtual_stages_per_pipeline_rank is None
    with pytest.raises(ValueError, match=r"--hybrid-layer-pattern M\*M- has 1 stages, .* has 8: separate .* with 7 \|"):
        follow(parsed(hybrid_layer_pattern="M*M-"), V)


def test_a_checkpoints_chunks_do_not_count() -> None:
    """Its run may have been interleaved otherwise; Megatron takes both flags together for a contradiction."""
    args = parsed(num_layers_per_virtual_pipeline_stage=1, use_mp_args_from_checkpoint_args=True)
    follow(args, V)
    assert (args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank) == (None, 2)


def of_two_pipes(**more: Any) -> SimpleNamespace:
    """Of 4 ranks and 2 replicas."""
    sizes = {
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "world_size": 8,
        "micro_batch_size": 2,
        "global_batch_size": 16,
    }
    return parsed(**{**dict.fromkeys(upstream.REQUIRED["pipes"]), **sizes, "pipeline_model_parallel_size": 4, **more})


@pytest.mark.parametrize(
    ("schedule", "given", "chunks"),
    [
        ("chimera", {}, 2),
        ("chimera", {"num_virtual_stages_per_pipeline_rank": 1}, 2),
        ("bitpipe", {"num_virtual_stages_per_pipeline_rank": 2}, 4),
        # Where nobody says how many, it takes the fewest, as a V does.
        ("bitpipe", {}, 4),
        ("bitpipe-early", {}, 4),
        ("bitpipe", {"num_virtual_stages_per_pipeline_rank": 3, "num_layers": 24}, 6),
        # What says how many layers a stage has says the same of twice as many stages on half as many ranks.
        ("bitpipe", {"num_layers_per_virtual_pipeline_stage": 2}, None),
        ("bitpipe", {"pipeline_model_parallel_layout": "Et|t|t|t|t|t|t|tL"}, None),
    ],
)
def test_two_pipes_halve_the_pipeline_once(
    schedule: str,
    given: dict[str, Any],
    chunks: int | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    upstream.remark.cache_clear()
    args = of_two_pipes(bpipe_schedule=schedule, **given)
    complete(args)
    first = dict(vars(args))
    complete(args)
    assert vars(args) == first
    assert (args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank) == (2, chunks)
    assert args.overlap_p2p_comm, "Megatron needs it of two ranks"
    assert capsys.readouterr().out == (
        "bpipe: Megatron counts 2 pipes over the same 4 ranks as pipelines of 2 ranks, with 2 times as many virtual "
        "stages per rank and 2 times as many data-parallel replicas; its lines below use these numbers\n"
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"pipeline_model_parallel_size": 2}, "2 pipes need 4 ranks or more, not 2: use .*size 4"),
        ({"pipeline_model_parallel_size": 5, "world_size": 10}, "even number of ranks, not 5: .*size 4 or 6"),
        ({"world_size": 6}, "6 processes are not a multiple of 4 \\(tensor 1 times context 1 times pipeline 4\\)"),
        ({"global_batch_size": 20}, "20 samples are not a multiple of 8 .*-size 16 or 24"),
        ({"global_batch_size": 4}, "use --global-batch-size 8$"),
        ({"use_tp_pp_dp_mapping": True}, "drop --use-tp-pp-dp-mapping"),
        ({"use_mp_args_from_checkpoint_args": True}, "drop --use-mp-args-from-checkpoint-args and give"),
        ({"num_layers": 6}, "6 layers cannot be divided into 4 equal stages: use --num-layers 4 or 8"),
    ],
)
def test_what_two_pipes_cannot_be_is_refused_before_megatron_judges(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"--bpipe-schedule chimera: (?s:.*){reason}"):
        complete(of_two_pipes(bpipe_schedule="chimera", **given))


def test_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="use --pipeline-model-parallel-size 2 or more"):
        follow(parsed(pipeline_model_parallel_size=1), Positions(1, mirrored=(False, False)))


@pytest.mark.parametrize(
    ("feature", "settings"), [(feature, each) for feature, tried in REFUSED.items() for each in tried]
)
def test_what_cannot_be_placed_is_refused_for_its_own_reason(feature: str, settings: dict[str, Any]) -> None:
    (refusal,) = (refusal for refusal in PLACED if refusal.name == feature)
    assert reasons_of(PLACED, SimpleNamespace(**settings), WANTED) == [f"{WANTED}: {refusal.reason}; {refusal.remedy}"]


@pytest.mark.parametrize("settings", ALLOWED)
def test_nothing_else_is_refused(settings: dict[str, Any]) -> None:
    assert reasons_of(PLACED, SimpleNamespace(**settings), WANTED) == []


SPLIT: dict[str, dict[str, Any]] = {
    "further tokens without a whole embedding": {"mtp_num_layers": 1, "bpipe_vocabulary_input": True},
    "heads of further tokens that train alone": {"mtp_num_layers": 1, "mtp_detach_heads": True},
    "further tokens in slices and shards": {"mtp_num_layers": 1, "bpipe_slices": 2},
    "variable lengths in shards": {"variable_seq_lengths": True},
    "deferred gradients of the output layer": {"defer_embedding_wgrad_compute": True},
    "models without weights at first": {"init_model_with_meta_device": True},
    "checkpoints by rank of shards": {"load": "here", "ckpt_format": "torch"},
    "local checkpoints of shards": {"non_persistent_ckpt_type": "local"},
}


def test_what_cannot_be_split_is_refused_for_its_own_reason() -> None:
    assert {refusal.name for refusal in SHARDED} == SPLIT.keys()
    for refusal in SHARDED:
        settings = SimpleNamespace(**SPLIT[refusal.name])
        assert reasons_of(SHARDED, settings, "--x") == [f"--x: {refusal.reason}; {refusal.remedy}"]
    fine = SimpleNamespace(
        untie_embeddings_and_output_weights=False, save="here", ckpt_format="torch_dist", mtp_num_layers=None
    )
    assert reasons_of(SHARDED, fine, "--x") == []
    fine.mtp_num_layers = 1
    assert reasons_of(SHARDED, fine, "--x") != []
    fine.untie_embeddings_and_output_weights = True
    assert reasons_of(SHARDED, fine, "--x") == []


def test_shards_file_the_optimizers_state_by_layer() -> None:
    args = parsed(bpipe_vocabulary="1", bpipe_schedule=None, use_distributed_optimizer=True)
    complete(args)
    assert args.dist_ckpt_optim_fully_reshardable
