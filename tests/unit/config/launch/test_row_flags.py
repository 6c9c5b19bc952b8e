"""What a row prints launches that row: a launch with the difference is read as the row's setup, and all other flags
are in every row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bpipe.cli import main
from bpipe.config.launch.megatron_command import read_command
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.config.launch.row_flags import chosen_flags, common_flags, difference, groups
from bpipe.plan.options import setup_from
from bpipe.plan.search import search
from bpipe.plan.space import Space
from bpipe.predict.cluster import GIB, parse_cluster
from bpipe.predict.layout import Setup

CLUSTER = "a100-80g:8"
SIZES = ["--num-layers", "16", "--hidden-size", "8192", "--num-attention-heads", "32"]
LAUNCH = [*SIZES, "--seq-length", "8192", "--vocab-size", "51200", "--max-position-embeddings", "8192", "--bf16"]
LAUNCH += ["--use-distributed-optimizer", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
LAUNCH += ["--pipeline-model-parallel-size", "4", "--micro-batch-size", "1", "--global-batch-size", "32"]
# With which some rows are balanced.
MEMORY_GIB = 70
# Two ways to say the same, what a row leaves out, and what it has anyway.
LAUNCHES = {
    "as it is": [],
    "in chunks": ["--num-virtual-stages-per-pipeline-rank", "2", "--recompute-activations"],
    "ours": [
        "--bpipe",
        "--bpipe-schedule",
        "v-half",
        "--bpipe-vocabulary",
        "1",
        "--bpipe-vocabulary-input",
        "--bpipe-min-bytes",
        "4096",
    ],
    "overlapping": [
        "--tp-comm-overlap",
        "--overlap-grad-reduce",
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
    ],
}
LAUNCHES["overlapping"] += ["--recompute-num-layers", "1"]


def changed(words: list[str], setup: Setup) -> list[str]:
    """The launch as its difference to the row says."""
    change = difference(setup, read_command(words))
    gone = {*change.left_out, *(flag for flag, _ in groups(change.given))}
    return [word for flag, values in groups(words) if flag not in gone for word in (flag, *values)] + list(change.given)


def as_run(setup: Setup) -> Setup:
    """Over one tensor-parallel rank there is nothing to spread and nothing to overlap, whatever a search says of it."""
    if setup.tensor > 1:
        return setup
    return replace(setup, sequence_parallel=False, switches=replace(setup.switches, tp_comm_overlap=False))


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_with_its_difference_is_the_row(name: str) -> None:
    """Rows that said "balanced" printed no --bpipe, and none of them how the model is cut."""
    words = [*LAUNCH, *LAUNCHES[name]]
    given = setup_from(words, CLUSTER, 51200, "gpu")
    space = Space(
        given.model,
        parse_cluster(CLUSTER),
        32,
        8192,
        recompute=("none", "selective", "full"),
        schedules=("1f1b", "interleaved-1f1b", "grouped-interleaved", "v-half", "1f1b-split"),
        max_micro_batch=2,
        max_chunks=2,
        switches=replace(given.switches),
        vocabulary_parallel=("none", "1"),
        attention=given.attention,
    )
    device = replace(space.cluster.device, memory_bytes=MEMORY_GIB * GIB)
    rows = search(replace(space, cluster=replace(space.cluster, device=device)), 400).rows
    # What a budget plans the trainer plans anew.
    setups = [row.prediction.setup for row in rows if row.prediction.setup.activation_budget is None]
    assert any(setup.balance is not None for setup in setups)
    for setup in setups:
        again = setup_from(changed(words, setup), setup.cluster, 51200, "gpu")
        assert again == as_run(setup)
        assert set(groups(chosen_flags(setup))) | set(groups(common_flags(setup))) == set(groups(megatron_flags(setup)))
    assert len({common_flags(setup) for setup in setups}) == 1
    assert difference(given, read_command(words)).text == "the launch as it is"


def test_what_cannot_differ_is_left_alone() -> None:
    words = [*LAUNCH, "--bpipe-min-bytes", "4096", "--make-vocab-size-divisible-by", "64", "--save", "here"]
    change = difference(setup_from(LAUNCH, CLUSTER, 51200, "gpu"), read_command(words))
    assert change == ((), ())


def test_a_balanced_row_says_its_flag_and_how_it_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    plan = [
        "plan",
        "--cluster",
        CLUSTER,
        "--memory",
        "60",
        "--schedule",
        "interleaved-1f1b",
        "--balance",
        "bpipe",
        "--rows",
        "1",
    ]
    plan += ["--vocabulary", "none", "--recompute", "none"]
    assert main([*plan, *SIZES, "--seq", "8192", "--vocab-size", "51200", "--gbs", "32"]) == 0
    alone = capsys.readouterr().out.splitlines()
    (row,) = [line for line in alone if line.startswith("   --tensor-model-parallel-size")]
    assert " --bpipe " in f"{row} "
    assert "--pipeline-model-parallel-size" in row
    assert "--micro-batch-size" in row
    assert any(line.startswith("all rows: --num-layers 16 ") for line in alone)
    assert main([*plan, "--", *LAUNCH]) == 0
    beside = capsys.readouterr().out.splitlines()
    assert any(line.startswith("   the launch with ") and "--bpipe" in line for line in beside)
    assert not any(line.startswith("all rows") for line in beside)
