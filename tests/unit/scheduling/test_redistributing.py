"""A layout for the sizes of a run: what is set, what is said, and what is refused with the way out."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.scheduling.hooks import upstream
from megatron.scheduling.options.derived_flags import complete


def parsed(**more: Any) -> SimpleNamespace:
    """What Megatron's parser leaves: the published model, on 8 stages."""
    names = dict.fromkeys((*upstream.REQUIRED["redistribution"], *upstream.REQUIRED["derived_flags"]))
    sizes = {
        "num_layers": 32,
        "hidden_size": 3072,
        "seq_length": 2048,
        "vocab_size": 255999,
        "pipeline_model_parallel_size": 8,
    }
    ours = {
        "bpipe_vocabulary": "redistribute",
        "bpipe_schedule": None,
        "tensor_model_parallel_size": 1,
        "make_vocab_size_divisible_by": 128,
    }
    return SimpleNamespace(**{**names, **sizes, **ours, **more})


def test_the_last_stage_has_fewer_layers_and_it_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    upstream.remark.cache_clear()
    args, again = parsed(), parsed()
    for one in (args, again):
        complete(one)
    assert args.pipeline_model_parallel_layout == "Et*4|t*4|t*4|(t*5|)*4L"
    assert capsys.readouterr().out == (
        "bpipe: --bpipe-vocabulary redistribute: the output layer takes as long as 6.2 layers, so stages have 4, 4, "
        "4, 5, 5, 5, 5, 0: "
        "--pipeline-model-parallel-layout Et*4|t*4|t*4|(t*5|)*4L\n"
    )
    complete(args)
    assert args.pipeline_model_parallel_layout == "Et*4|t*4|t*4|(t*5|)*4L", "as a checkpoint of this run says"


def test_a_small_vocabulary_moves_nothing() -> None:
    args = parsed(vocab_size=1000)
    complete(args)
    assert args.pipeline_model_parallel_layout is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline_model_parallel_size": 1}, "a pipeline of one rank has no other"),
        ({"decoder_last_pipeline_num_layers": 2}, "--decoder-last-pipeline-num-layers also sets how many layers"),
        ({"account_for_loss_in_pipeline_split": True}, "--account-for-loss-in-pipeline-split also sets"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "--num-virtual-stages-per-pipeline-rank: it does not work"),
        ({"bpipe_schedule": "v-half"}, "--bpipe-schedule v-half has several stages per rank"),
        ({"mtp_num_layers": 1}, "drop --mtp-num-layers, or give a layout"),
        ({"hybrid_layer_pattern": "M*M-"}, r"--hybrid-layer-pattern itself says where stages begin: move its \|"),
        ({"pipeline_model_parallel_layout": "Et*4|(t*4|)*6t*4L"}, "already places every layer: drop one of them"),
        ({"vocab_size": None}, "depends on --vocab-size, which is not given"),
        ({"num_layers": None}, "depends on --num-layers, which"),
        ({"num_layers": 6}, "6 layers are fewer than the 7 stages that would share them"),
    ],
)
def test_what_no_layout_can_say_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"--bpipe-vocabulary redistribute: .*{message}"):
        complete(parsed(**given))
