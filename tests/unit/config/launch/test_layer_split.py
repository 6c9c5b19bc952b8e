"""Layers on stages and Megatron's flags for them: round trips, and what Megatron would refuse is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.config.flags.flag import Options
from bpipe.config.flags.trainer import READ
from bpipe.config.launch.layer_flags import layout_text, read_split, split_flags
from bpipe.config.launch.megatron_command import read_command
from bpipe.predict.layout import split_layers

SIZES = "--hidden-size 64 --num-attention-heads 4 --seq-length 128 --position-embedding-type rope".split()


NAMES = {
    "layers_of_a_chunk": "num_layers_per_virtual_pipeline_stage",
    "chunks": "num_virtual_stages_per_pipeline_rank",
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "count_embedding": "account_for_embedding_in_pipeline_split",
    "count_loss": "account_for_loss_in_pipeline_split",
    "layout": "pipeline_model_parallel_layout",
    "further": "mtp_num_layers",
}


def split(num_layers: int, pipeline: int, **given: object) -> Options:
    """Return arguments with these numbers of layers and ranks, and with these flags that place layers."""
    named = {NAMES[name]: value for name, value in given.items()}
    sizes = {"num_layers": num_layers, "pipeline_model_parallel_size": pipeline}
    return Options(**{flag.field: flag.default for flag in READ.values()} | sizes | named)


def placed(flags: list[str], layers: tuple[int, ...], pipeline: int, further: int = 0) -> tuple[object, object]:
    """Return each stage's layers and the stage of further tokens, as in a launch with these flags."""
    sizes = ["--num-layers", str(sum(layers)), "--pipeline-model-parallel-size", str(pipeline)]
    more = ["--mtp-num-layers", str(further)] if further else []
    options = read_command([*SIZES, *sizes, *flags, *more]).options
    return options["layers"], options.get("mtp_stage")


@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_there_and_back(pipeline: int, chunks: int, data: st.DataObject) -> None:
    """The last of several stages may have the output layer alone."""
    layers = tuple(data.draw(st.lists(st.integers(1, 3), min_size=pipeline * chunks, max_size=pipeline * chunks)))
    if len(layers) > 1 and data.draw(st.booleans()):
        layers = (*layers[:-1], 0)
    assert placed(split_flags(layers, pipeline), layers, pipeline) == (layers, None)
    assert read_split(split(sum(layers), pipeline, layout=layout_text(layers))) == layers


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_further_tokens_there_and_back(pipeline: int, chunks: int, further: int, apart: bool) -> None:
    """Further tokens are on the last stage, or alone on the one before."""
    layers = (1,) * (pipeline * chunks - 2) + ((0, 0) if apart else (1, 1))
    mtp_stage = len(layers) - 2 if apart else None
    if not sum(layers):
        layers = (1, *layers[1:])
        mtp_stage = None if len(layers) == 2 else mtp_stage
    for flags in (
        split_flags(layers, pipeline, further, mtp_stage),
        ["--pipeline-model-parallel-layout", layout_text(layers, further, mtp_stage)],
    ):
        assert placed(flags, layers, pipeline, further) == (layers, mtp_stage)


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_split_gives_every_layer_once(num_layers: int, num_stages: int) -> None:
    layers = split_layers(num_layers, num_stages, allow_uneven=True)
    # Two stages can do without layers.
    if num_stages > num_layers + 2:
        assert layers is None
        return
    assert layers is not None
    assert (len(layers), sum(layers)) == (num_stages, num_layers)
    assert max(layers) - min(layers) <= 1
    assert layers[-1] == min(layers), "the last stage has the output layer besides"
    assert list(layers[:-1]) == sorted(layers[:-1]), "early stages hold most micro-batches"


def test_llama_405b_as_its_authors_laid_it() -> None:
    """One layer fewer on the first and on the last stage."""
    layers = split_layers(126, 64, allow_uneven=True)
    assert layers == (1, *(2,) * 62, 1)
    account_flags = ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    assert split_flags(layers, 16) == ["--num-layers-per-virtual-pipeline-stage", "2", *account_flags]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers_of_a_chunk": 2, "chunks": 2}, "exclude each other"),
        ({"first": 3, "count_loss": True}, "exclude each other"),
        ({"layout": "Et|tL", "first": 1}, "says where every layer is"),
        ({"first": 3, "layers_of_a_chunk": 1}, "Megatron needs --num-virtual-stages-per-pipeline-rank"),
        ({}, r"--num-layers 10 cannot be divided evenly over --pipeline-model-parallel-size 4: say how with"),
        ({"first": 2}, "with --decoder-first-pipeline-num-layers 2"),
        ({"first": 1, "chunks": 2}, "does not divide the 1 layers of rank 0"),
        ({"count_embedding": True, "count_loss": True, "layers_of_a_chunk": 2}, "does not divide the 3 layers of a"),
        ({"layout": "Et|t|t|t*3L"}, "has 6 layers, but --num-layers is 10"),
        ({"layout": "Et*5|t*5L|"}, "one E first"),
        ({"layout": "Et*5|t|t*4|mL"}, r"has 1 layers for further tokens \(m\), but --mtp-num-layers is not given"),
        ({"layout": "Et*5|t|t*4|L", "further": 2}, "has 0 layers for further tokens .m., but --mtp-num-layers is 2"),
        ({"layout": "Et*5|m|t*5|mL", "further": 2}, "m for every further token"),
        ({"layout": "Et*5|t*5|m|mL", "further": 2}, "m for every further token"),
        ({"layout": "Et*5|t*5L"}, "has 2 stages, not a multiple of"),
        ({"layout": "Et*5||t*4|tL"}, "stage 1 has no layer"),
    ],
)
def test_what_megatron_would_refuse_or_nobody_models(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_split(split(10, 4, **given))
