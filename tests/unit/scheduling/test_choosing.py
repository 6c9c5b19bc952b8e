"""A run's flags determine its schedule and layout, and its stages Megatron's flags, before anything runs."""

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bpipe import cli
from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.config.features.queries import reasons_of
from bpipe.config.features.table import PLACED, SHARDED
from bpipe.config.flags.values import MemoryBudget
from bpipe.schedule.families.family import ALIKE
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.files.document import write_json
from bpipe.schedule.files.text import write_csv
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from megatron.scheduling.hooks import upstream
from megatron.scheduling.options.flags import add_arguments, complete, follow
from megatron.scheduling.options.schedule_choice import requested, unplaced
from megatron.scheduling.placement.positions import Positions

# A valid order that adds up gradients in another order.
LATE_FIRST = "0F0,0F1,,,,,,,0B1,0B0\n,1F0,1F1,,,,,1B1,1B0,\n,,2F0,2F1,,,2B1,2B0,,\n,,,3F0,3F1,3B1,3B0,,,\n"
GROUPED = {"bpipe": True, "bpipe_schedule": "grouped-interleaved", "virtual_pipeline_model_parallel_size": 2}
INTERLEAVED = build(ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2))


# Two pipes over 4 ranks, as Megatron counts them.
TWO_PIPES = {
    "bpipe_schedule": "chimera",
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "data_parallel_size": 6,
}


# What Megatron's parser leaves unset.
UNSET = """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split decoder_first_pipeline_num_layers
    decoder_last_pipeline_num_layers dist_ckpt_optim_fully_reshardable num_layers
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank overlap_p2p_comm
    pipeline_model_parallel_layout use_distributed_optimizer use_mp_args_from_checkpoint_args
""".split()


def args(**more: Any) -> SimpleNamespace:
    """Megatron's arguments for 4 ranks with one stage each, and 8 micro-batches of 2 on 3 replicas."""
    return SimpleNamespace(
        **{
            **dict.fromkeys(UNSET),
            **vars(add_arguments(argparse.ArgumentParser()).parse_args([])),
            "padded_vocab_size": 1024,
            "seq_length": 64,
            "sequence_parallel": False,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": None,
            "num_virtual_stages_per_pipeline_rank": None,
            "num_layers_per_virtual_pipeline_stage": None,
            "pipeline_model_parallel_layout": None,
            "global_batch_size": 48,
            "micro_batch_size": 2,
            "data_parallel_size": 3,
            "step_batch_size_schedule": None,
            **more,
        }
    )


def own_schedule(args: Any) -> ScheduleConfig | None:
    return requested(args).own


def test_two_pipes_are_counted_as_the_schedule_counts_them(tmp_path: Path) -> None:
    """Megatron counts half as many ranks with twice as many virtual stages, in twice as many replicas."""
    assert own_schedule(args(**TWO_PIPES)) == ScheduleConfig("chimera", 4, 8, exchange=Exchange.POSTED)
    more = {"bpipe_schedule": "bitpipe", "virtual_pipeline_model_parallel_size": 6, "bpipe": True}
    assert own_schedule(args(**TWO_PIPES | more)) == ScheduleConfig(
        "bitpipe", 4, 8, num_chunks=3, balance=BalanceConfig(), exchange=Exchange.POSTED
    )
    unknown = {"global_batch_size": None, "step_batch_size_schedule": "0:12 600:24"}
    assert own_schedule(args(**TWO_PIPES | unknown)) == ScheduleConfig("chimera", 4, 2, exchange=Exchange.POSTED)
    file = tmp_path / "mine.csv"
    chimera = build(ScheduleConfig("chimera", 4, 8))
    file.write_text(write_csv(chimera))
    config = own_schedule(args(**TWO_PIPES | {"bpipe_schedule": str(file)}))
    assert config is not None
    assert build(config) == chimera
    assert unplaced(args(), config) == []


COSTS = (Fraction(1), Fraction(6, 5), Fraction(4, 5))


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ({}, []),
        ({"bpipe_costs": COSTS, "bpipe_hop": Fraction(1, 20)}, ["--costs", "1,1.2,0.8", "--hop", "0.05"]),
    ],
)
def test_an_order_is_chosen_for_a_bound_as_the_command_chooses_it(
    flags: dict[str, Any], asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With host buffers that stay, as in training."""
    config = own_schedule(args(**GROUPED, bpipe_bound=(8,), **flags))
    assert config is not None
    sizes = ["--pp", "4", "--microbatches", "8", "--vp", "2", "--balance", "bpipe", "--bound", "8", "--buffers-stay"]
    assert cli.main(["schedule", "--schedule", "grouped-interleaved", *sizes, *asked, "--format", "csv"]) == 0
    assert write_csv(build(config)) == capsys.readouterr().out
    usual = own_schedule(args(**GROUPED))
    assert usual is not None
    assert iteration_time(build(config), ALIKE).makespan < iteration_time(build(usual), ALIKE).makespan


def test_every_process_chooses_the_same() -> None:
    """Each rank computes the order by itself, so the order must not depend on the process's hash seed."""
    program = (
        "from bpipe.build import *; import hashlib; from bpipe.schedule.files.text import write_csv;"
        "print(hashlib.sha256(write_csv(build(ScheduleConfig('grouped-interleaved', 4, 8, num_chunks=2, balance="
        "BalanceConfig((6,))))).encode()).hexdigest())"
    )
    run = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in "12"
    ]
    assert run[0].stdout == run[1].stdout


@pytest.mark.parametrize("write", [write_csv, write_json])
def test_a_file_is_read_and_says_how_many_stages_a_rank_has(write: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(write(INTERLEAVED))
    arguments = args(bpipe_schedule=str(file))
    complete(arguments)
    assert arguments.num_virtual_stages_per_pipeline_rank == 2
    config = own_schedule(args(bpipe_schedule=str(file), virtual_pipeline_model_parallel_size=2))
    assert config is not None
    assert config.schedule == ("mine" if write is write_csv else "interleaved-1f1b")
    assert build(config).ranks == INTERLEAVED.ranks
    assert config.layout == INTERLEAVED.layout
    assert not config.splits


def listing(schedule: Schedule) -> str:
    """Every rank's order, without bubbles."""
    return "".join(",".join(str(slot.compute) for slot in row if slot.compute) + "\n" for row in schedule.ranks)


def test_orders_alone_are_placed_on_the_grid(tmp_path: Path) -> None:
    """As torch prints DualPipeV: as a grid it would be invalid, because all ranks would begin in the first slot."""
    file = tmp_path / "orders.csv"
    file.write_text(listing(INTERLEAVED))
    config = own_schedule(args(bpipe_schedule=str(file), virtual_pipeline_model_parallel_size=2, bpipe=True))
    assert config is not None
    assert (
        build(config).ranks
        == build(ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2, balance=BalanceConfig())).ranks
    )


def test_a_file_that_moves_activations_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "balanced.csv"
    balanced = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    file.write_text(write_csv(balanced))
    config = own_schedule(args(bpipe_schedule=str(file), bpipe=True))
    assert config is not None
    assert build(config) == balanced
    with pytest.raises(ValueError, match="it moves activations: give --bpipe too"):
        own_schedule(args(bpipe_schedule=str(file)))


def test_stages_that_somebody_asked_for_are_left() -> None:
    for flag in (
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
        "pipeline_model_parallel_layout",
    ):
        arguments = args(bpipe_schedule="gpipe", **{flag: 3})
        complete(arguments)
        assert {**vars(arguments)} == vars(args(bpipe_schedule="gpipe", **{flag: 3}))


def test_a_file_of_slices_has_the_micro_batches_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "sliced.csv"
    file.write_text(write_csv(build(ScheduleConfig("1f1b", 4, 8, slices=4))))
    for slices in (None, 4):
        config = own_schedule(args(bpipe_schedule=str(file), bpipe_slices=slices))
        assert config is not None
        assert (config.num_microbatches, config.slices) == (8, 4)
    with pytest.raises(ValueError, match="it has 8 micro-batches, but an iteration has 16: use --global-batch-size 48"):
        own_schedule(args(bpipe_schedule=str(file), global_batch_size=96))


def test_what_slices_refuse_is_said_beside_what_others_do() -> None:
    arguments = args(bpipe_slices=4, context_parallel_size=2, transformer_impl="transformer_engine", bpipe_strict=True)
    config = own_schedule(arguments)
    assert config is not None
    assert [problem.partition(": ")[0] for problem in unplaced(arguments, config)] == [
        "--bpipe-slices 4",
        "--bpipe-strict",
    ]
    arguments.bpipe_strict = False
    assert [problem.partition(": ")[0] for problem in unplaced(arguments, config)] == ["--bpipe-slices 4"]


TWO = {"virtual_pipeline_model_parallel_size": 2}
FILE = {"bpipe_schedule": "FILE", **TWO}
SLICED = {"bpipe_slices": 2}
BYTES = MemoryBudget((2**30,), False)
REFUSED = [
    ({"bpipe_schedule": "1f1b", **TWO}, "1f1b takes at most 1 chunk per rank, not 2"),
    ({"bpipe_schedule": "interleaved-1f1b"}, "needs at least 2 chunks per rank, not 1\n  .* virtual stages, --num-"),
    ({"bpipe_schedule": "gpipe", "bpipe_group": 2}, "--bpipe-group 2: gpipe has no groups of micro-batches: choose"),
    ({"bpipe_schedule": "interleaved-1f1b", **TWO, "bpipe_group": 2}, "use --microbatch-group-size-per-virtual"),
    ({"bpipe_schedule": "gpipe", "bpipe_delay": 2}, "--bpipe-delay 2: gpipe does not delay weight gradients: choose"),
    ({**TWO_PIPES, "bpipe_slices": 2}, "--bpipe-slices 2: chimera does not cut micro-batches into slices: choose from"),
    (
        {**SLICED, "bpipe_vocabulary": "1", "bpipe": True, "bpipe_memory": BYTES},
        "--bpipe-memory: .* 2 slices together with vocab",
    ),
    ({**SLICED, "bpipe_vocabulary": "interlaced"}, "slices 2 and vocabulary interlaced: all ranks compute"),
    ({**FILE, "bpipe_slices": 2}, "it has 1 slices per micro-batch, not 2: leave --bpipe-slices out"),
    ({"bpipe_bound": (3,)}, "--bpipe-bound 3 says how to balance: give --bpipe too"),
    ({"bpipe_bound": (2,), "bpipe": True}, "--bpipe-schedule 1f1b: .* ranks 0 and 3 can both keep is 3 micro-batches"),
    ({**GROUPED, "bpipe_bound": (1,)}, "no order of grouped-interleaved .* within 1 .* its groups of 2 keep 5"),
    (
        {**GROUPED, "bpipe_bound": (1,), "bpipe_vocabulary": "1"},
        "no order of grouped-interleaved .* within 1 .* its groups of 2 keep 6",
    ),
    ({"bpipe_schedule": "gpipe", "bpipe_costs": COSTS}, "--bpipe-costs: gpipe has the same order at any costs: leave"),
    ({"bpipe_schedule": "zb-h1", "bpipe_hop": Fraction(1, 20)}, "--bpipe-hop 0.05 is in .* give --bpipe-costs too"),
    ({**TWO_PIPES, "bpipe_schedule": "bitpipe"}, "bitpipe needs at least 2 chunks per rank, not 1\n"),
    ({**TWO_PIPES, "virtual_pipeline_model_parallel_size": 4}, "chimera takes at most 1 chunk per rank, not 2"),
    (
        {**TWO_PIPES, "bpipe_schedule": "MIRROR", "global_batch_size": 24},
        "8 micro-batches, but an iteration has 4: use --global-batch-size 48",
    ),
    (
        {**TWO_PIPES, "bpipe_schedule": "MIRROR", "pipeline_model_parallel_size": 4},
        "4 ranks, but the pipeline has 8: use .*-parallel-size 4",
    ),
    ({"bpipe_schedule": "gpip"}, "did you mean .gpipe..*nor is there a file of that name"),
    ({"bpipe_schedule": "FILE"}, "it has 2 stages per rank, but this run has 1: a rank's chunks are its virtual"),
    (
        {"bpipe_schedule": "FILE", "pipeline_model_parallel_size": 8},
        "4 ranks, .* has 8: use --pipeline-model-parallel-size 4",
    ),
    ({**FILE, "global_batch_size": 96}, "it has 8 micro-batches, but an iteration has 16: use --global-batch-size 48"),
    ({**FILE, "bpipe_group": 4}, "--bpipe-group applies only to generated schedules"),
    ({**FILE, "bpipe_costs": COSTS}, "--bpipe-costs applies only to generated schedules"),
    ({"bpipe_schedule": "BALANCED", "bpipe": True, "bpipe_bound": (3,)}, "it moves .* leave --bpipe-bound out"),
    ({"bpipe_schedule": "BALANCED", "bpipe": True, "bpipe_memory": BYTES}, "it moves .* leave --bpipe-memory out"),
    ({"bpipe_memory": BYTES}, "--bpipe-memory says how to balance: give --bpipe too"),
    ({"bpipe_schedule": "BROKEN", **TWO}, "rank 0, slot 37, a bubble: stage 0 has no B or I of micro-batch 0 in any"),
    ({"bpipe_schedule": "DISORDERED", "global_batch_size": 12}, "micro-batches: rank 0, slot 9, 0B0: comes after 0B1"),
    ({"bpipe_schedule": "WAITING", "pipeline_model_parallel_size": 2}, "waiting.csv: .* rank 0 at 0B0, rank 1 at 1B0"),
    ({"bpipe_schedule": "GARBLED"}, "garbled.csv: line 1, cell 1: 'what' is not an action"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_does_not_fit_is_refused_with_the_way_out(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    texts = {
        "FILE": write_csv(INTERLEAVED),
        "BROKEN": write_csv(INTERLEAVED).replace("0B0", ""),
        "WAITING": "0F0,0B0\n1B0,1F0\n",
        "GARBLED": "what,0F0\n",
        "DISORDERED": LATE_FIRST,
        "MIRROR": write_csv(build(ScheduleConfig("chimera", 4, 8))),
        "BALANCED": write_csv(build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))),
    }
    for name, text in texts.items():
        (tmp_path / f"{name.lower()}.csv").write_text(text)
        if flags.get("bpipe_schedule") == name:
            flags = flags | {"bpipe_schedule": str(tmp_path / f"{name.lower()}.csv")}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        own_schedule(args(**flags))


def test_an_output_layer_in_shards_is_run_by_our_own_loop() -> None:
    config = own_schedule(args(bpipe_vocabulary="1"))
    assert config == ScheduleConfig("1f1b", 4, 8, vocabulary=Vocabulary.ONE, exchange=Exchange.POSTED)
    assert unplaced(args(bpipe_vocabulary="1"), config) == []
    chunks = args(bpipe_vocabulary="1", virtual_pipeline_model_parallel_size=2)
    assert own_schedule(chunks) == replace(config, schedule="interleaved-1f1b", num_chunks=2)


def test_an_embedding_in_shards_joins_the_output_layer() -> None:
    config = own_schedule(args(bpipe_vocabulary="2", bpipe_vocabulary_input=True))
    assert config == ScheduleConfig(
        "1f1b", 4, 8, vocabulary=Vocabulary.TWO, input_shards=True, exchange=Exchange.POSTED
    )
    with pytest.raises(ValueError, match=r"--bpipe-vocabulary-input splits .* give --bpipe-vocabulary 1, 2"):
        own_schedule(args(bpipe_vocabulary_input=True))
    chunks = own_schedule(
        args(bpipe_vocabulary_input=True, bpipe_vocabulary="1", virtual_pipeline_model_parallel_size=2)
    )
    assert (chunks.schedule, chunks.num_chunks, chunks.input_shards) == ("interleaved-1f1b", 2, True)


def test_shards_that_cannot_be_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"gpipe has no place for shards of the vocabulary: .* choose from 1f1b"):
        own_schedule(args(bpipe_vocabulary="1", bpipe_schedule="gpipe"))
    with pytest.raises(ValueError, match=r"interleaved-1f1b has no place where all ranks compute shards at the same"):
        own_schedule(args(bpipe_vocabulary="interlaced", virtual_pipeline_model_parallel_size=2))
    with pytest.raises(ValueError, match=r"--bpipe-vocabulary interlaced: --bpipe-schedule mine.csv is a file; choose"):
        own_schedule(args(bpipe_vocabulary="interlaced", bpipe_schedule="mine.csv"))
    uneven = args(bpipe_vocabulary="1", padded_vocab_size=1028)
    (problem,) = unplaced(uneven, own_schedule(uneven))  # type: ignore[arg-type]
    assert problem.startswith("--bpipe-vocabulary 1: a vocabulary of 1028 rows cannot be split into 8 equal shards")
    assert problem.endswith("--make-vocab-size-divisible-by 128")


V = Positions(4, backwards=True, mirrored=(True, False))
WANTED = "--bpipe-schedule v-half"

# Settings that are refused for schedules with their own placement, by feature.
NOT_FOLLOWED: dict[str, list[dict[str, Any]]] = {
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
    """Arguments as Megatron's parser returns them."""
    sizes = {"pipeline_model_parallel_size": 4, "num_layers": 16, "overlap_p2p_comm": False}
    return SimpleNamespace(**{**dict.fromkeys(UNSET), **sizes, **more})


def test_a_pattern_of_layers_says_the_stages_itself() -> None:
    args = parsed(hybrid_layer_pattern="M|*|-|M|*|-|M|*/M")
    follow(args, V)
    assert args.num_virtual_stages_per_pipeline_rank is None
    with pytest.raises(ValueError, match=r"--hybrid-layer-pattern M\*M- has 1 stages, .* has 8: separate .* with 7 \|"):
        follow(parsed(hybrid_layer_pattern="M*M-"), V)


def test_a_checkpoints_chunks_do_not_count() -> None:
    """The checkpoint's run may have been interleaved differently; Megatron would refuse both flags together."""
    args = parsed(num_layers_per_virtual_pipeline_stage=1, use_mp_args_from_checkpoint_args=True)
    follow(args, V)
    assert (args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank) == (None, 2)


def of_two_pipes(**more: Any) -> SimpleNamespace:
    """Arguments for 4 ranks and 2 replicas."""
    sizes = {
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "world_size": 8,
        "micro_batch_size": 2,
        "global_batch_size": 16,
    }
    return parsed(**{**sizes, "use_tp_pp_dp_mapping": False, **more})


@pytest.mark.parametrize(
    ("schedule", "flags", "chunks"),
    [
        ("chimera", {}, 2),
        ("chimera", {"num_virtual_stages_per_pipeline_rank": 1}, 2),
        ("bitpipe", {"num_virtual_stages_per_pipeline_rank": 2}, 4),
        # Without a number of chunks it takes the fewest, as a V does.
        ("bitpipe", {}, 4),
        ("bitpipe-early", {}, 4),
        ("bitpipe", {"num_virtual_stages_per_pipeline_rank": 3, "num_layers": 24}, 6),
        # A flag that sets the layers per stage applies as well to twice as many stages on half as many ranks.
        ("bitpipe", {"num_layers_per_virtual_pipeline_stage": 2}, None),
        ("bitpipe", {"pipeline_model_parallel_layout": "Et|t|t|t|t|t|t|tL"}, None),
    ],
)
def test_two_pipes_halve_the_pipeline_once(
    schedule: str,
    flags: dict[str, Any],
    chunks: int | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    upstream.remark.cache_clear()
    args = of_two_pipes(bpipe_schedule=schedule, **flags)
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
    ("flags", "reason"),
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
def test_what_two_pipes_cannot_be_is_refused_before_megatron_judges(flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"--bpipe-schedule chimera: (?s:.*){reason}"):
        complete(of_two_pipes(bpipe_schedule="chimera", **flags))


def test_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="use --pipeline-model-parallel-size 2 or more"):
        follow(parsed(pipeline_model_parallel_size=1), Positions(1, mirrored=(False, False)))


@pytest.mark.parametrize(
    ("feature", "settings"), [(feature, settings) for feature, tried in NOT_FOLLOWED.items() for settings in tried]
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
    "checkpoints by rank": {"load": "here", "ckpt_format": "torch"},
    "local checkpoints": {"non_persistent_ckpt_type": "local"},
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


def test_lengths_that_are_not_the_sequences_are_refused_at_the_start() -> None:
    """They used to be refused only in the first iteration."""
    for lengths, sequence_parallel, reason in (
        ((40, 25), False, "40,25: the lengths add up to 65 tokens, but a sequence has 64"),
        ((31, 33), True, "31,33: a slice of 31 tokens is not a multiple of 2"),
        ((40, 24), True, ""),
    ):
        cut = args(bpipe_slices=2, bpipe_slice_lengths=lengths, sequence_parallel=sequence_parallel)
        problems = unplaced(cut, own_schedule(cut))  # type: ignore[arg-type]
        assert [problem.split(" --bpipe-slice-lengths ")[1][: len(reason)] for problem in problems] == [reason] * bool(
            reason
        )
