"""The output layer and the embedding in shards train what stock Megatron trains, up to the order of sums.

Stock is Megatron without our patches. Initial weights are equal to the bit, and balancing alone changes no bit. The
weights of the vocabulary's layers are compared in one piece.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layers.ends import shard_bytes
from bpipe.predict.layout import Setup
from bpipe.predict.model import gpt
from bpipe.record.read import read_held
from bpipe.schedule.layout import Vocabulary
from tests.gloo.compare import as_predicted, distance, same
from tests.gloo.conftest import ROOT, Case, Outcome, Row, finish, free_ports, start
from tests.gloo.flags import (
    BPIPE,
    BUCKETS,
    CONTEXT,
    EVALUATED,
    FULL,
    ITERATIONS,
    LLAMA,
    MEASURED,
    OVERLAPS,
    PEER,
    SEQUENCE,
    TENSOR,
    TINY,
    TWO_STAGES,
    UNALIGNED,
    UNTIED,
    batch,
)
from tests.gloo.test_launch import iterations

pytestmark = pytest.mark.timeout(2460)
Trained = Callable[[Row], Outcome]

OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
SHARDS, INPUT = "--bpipe-vocabulary", "--bpipe-vocabulary-input --bpipe-vocabulary"
AHEAD = "--mtp-num-layers 1 --position-embedding-type rope"
OURS = {
    "one": f"{SHARDS} 1",
    "two": f"{SHARDS} 2",
    "interlaced": f"{SHARDS} interlaced",
    "balanced": f"{SHARDS} 1 {PEER}",
    "two_balanced": f"{SHARDS} 2 {PEER}",
    "zb_h1": f"{SHARDS} 1 --bpipe-schedule zb-h1",
    # With the embedding in shards, and with split backwards.
    "input": f"{INPUT} 1",
    "input_two": f"{INPUT} 2",
    "input_interlaced": f"{INPUT} interlaced",
    "input_balanced": f"{INPUT} 1 {PEER}",
    "input_zb_h1": f"{INPUT} 2 --bpipe-schedule zb-h1",
    "input_split_balanced": f"{INPUT} 1 --bpipe-schedule 1f1b-split {BPIPE}",
}


class Tolerance(NamedTuple):
    """Relative tolerances: first loss, later losses, first gradient norm, each gradient (L2), the whole gradient."""

    loss: float
    later: float
    norm: float
    gradient: float
    whole: float


FP32 = Tolerance(2.5e-7, 1e-6, 1e-6, 3e-6, 3e-6)
# A rank of the distributed optimizer has sums of only a part of its gradients, and not of stock's part.
PARTS = FP32._replace(gradient=math.inf, whole=math.inf)
HALF = Tolerance(1e-6, 1e-3, 1e-3, 3e-2, 1e-2)

SCALED = "--fp16 --initial-loss-scale 65536"
INPUTS = "input input_two input_interlaced input_balanced input_zb_h1 input_split_balanced"
# Flags of a feature, and which of ours are compared with stock: four stages and eight micro-batches unless a row
# differs.
ROWS: dict[str, tuple[str, str]] = {
    "m8": (UNTIED, f"one two interlaced balanced two_balanced {INPUTS}"),
    "tied": ("", f"one two balanced {INPUTS}"),
    "tied_bf16": ("--bf16", "one two input"),
    "m1": (f"{UNTIED} {batch(1)}", "one two interlaced input"),
    "m2": (f"{UNTIED} {batch(2)}", "one two input"),
    "m3": (f"{UNTIED} {batch(3)}", "one two input_two"),
    "m5": (f"{UNTIED} {batch(5)}", "one two"),
    "m16": (f"{UNTIED} {batch(16)}", "one"),
    "bf16": (f"{UNTIED} --bf16", "one two balanced two_balanced input"),
    "fp16": (f"{UNTIED} {SCALED}", "one two input"),
    "evaluation": (
        f"{UNTIED} --calculate-per-token-loss {EVALUATED}",
        "one two interlaced input input_two input_interlaced",
    ),
    "llama": (f"{LLAMA} {FULL}", "one two input"),
    "further": (f"{UNTIED} {AHEAD} {EVALUATED}", "one two interlaced balanced two_balanced zb_h1"),
    "two_further": (f"{UNTIED} {AHEAD} --mtp-num-layers 2 --calculate-per-token-loss", "one two"),
    "further_fp16": (f"{UNTIED} {AHEAD} {SCALED}", "one two"),
}
DIVISIBLE = "--make-vocab-size-divisible-by 64"
# Two stages, and two ranks in another dimension.
WIDE_ROWS: dict[str, tuple[str, str]] = {
    "tensor": (f"{UNTIED} {TENSOR} {DIVISIBLE}", "one two input"),
    "tied_tensor": (f"{TENSOR} {DIVISIBLE}", "one two input input_two"),
    "sequence": (f"{UNTIED} {SEQUENCE} {DIVISIBLE}", "one two input"),
    # Megatron's embedding transposes and scatters by itself.
    "sequence_llama": (f"{SEQUENCE} {DIVISIBLE} {LLAMA}", "one input input_two"),
    "further_sequence": (f"{UNTIED} {SEQUENCE} {DIVISIBLE} {AHEAD} --mtp-num-layers 2", "one two"),
    "data": (UNTIED, "one two input"),
    "tied_data": ("", "one input"),
    "tied_distributed": ("--use-distributed-optimizer", "one"),
    "overlaps": (f"{UNTIED} {OVERLAPS}", "one two interlaced input"),
    "tied_overlaps": (OVERLAPS, "one two input input_two"),
    "unaligned": (f"{UNTIED} {UNALIGNED} {BUCKETS}", "one two input"),
    "tied_unaligned": (f"{UNALIGNED} {BUCKETS}", "one two input"),
    "context": (f"{UNTIED} {CONTEXT}", "one two interlaced input"),
    "tied_context": (CONTEXT, "one two input"),
}
# The unbalanced run of each balanced one, and by how many micro-batches it may exceed a run without shards.
BALANCED = {"balanced": ("one", 2), "two_balanced": ("two", 1), "input_balanced": ("input", 2)}
# Every algorithm, one of them balanced, a tied weight, and further tokens.
ALWAYS = "m8-two m8-balanced tied-one further-one".split()


def rows_of(table: dict[str, tuple[str, str]], common: str, world: int = 4) -> dict[str, Row]:
    rows = {}
    for feature, (flags, which) in table.items():
        stock = Case(feature, f"--tensors {common} {flags}")
        cases = {ours: Case(f"{feature}-{ours}", f"{stock.flags} {OURS[ours]} {MEASURED}") for ours in which.split()}
        for ours, case in cases.items():
            plain = (cases[BALANCED[ours][0]],) if ours in BALANCED else ()
            rows[case.name] = Row(case.name, stock, case, world, case.name not in ALWAYS, plain)
    return rows


BY_NAME = rows_of(ROWS, batch(8))
WIDE = rows_of(WIDE_ROWS, f"{TWO_STAGES} {batch(8)}")


def tolerance_of(row: Row) -> Tolerance:
    if "--use-distributed-optimizer" in row.stock.flags:
        return PARTS
    return HALF if {"--bf16", "--fp16"} & set(row.stock.flags.split()) else FP32


def stages_of(row: Row) -> int:
    return 2 if TWO_STAGES in row.stock.flags else row.world


def tensors(outcome: Outcome, case: str, part: str, stages: int) -> dict[str, torch.Tensor]:
    """Return all ranks' tensors by rank and name; the vocabulary's rows in one piece per rank of another dimension."""
    by_name: dict[str, torch.Tensor] = {}
    rows: dict[str, list[torch.Tensor]] = {}
    world = len(outcome.codes)
    # The pipeline is the outermost dimension.
    others = world // stages
    for rank in range(world):
        for name, tensor in torch.load(outcome.folder / f"{case}.rank{rank}.pt")[part].items():
            if name in (OUTPUT, EMBEDDING):
                rows.setdefault(f"{rank % others} {name}", []).append(tensor.double())
            else:
                by_name[f"{rank} {name}"] = tensor.double()
    by_name |= {name: torch.cat(parts) for name, parts in rows.items()}
    # A tied weight is one shard.
    return by_name | {
        f"{rank} {OUTPUT}": by_name[f"{rank} {EMBEDDING}"]
        for rank in range(others)
        if f"{rank} {OUTPUT}" not in by_name
    }


def pairs_of(
    outcome: Outcome, case: str, stock: str, part: str, stages: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    actual, expected = tensors(outcome, case, part, stages), tensors(outcome, stock, part, stages)
    assert actual.keys() == expected.keys()
    return {name: (actual[name], expected[name]) for name in expected}


def near(actual: float, expected: float, tolerance: float) -> bool:
    return math.isclose(actual, expected, rel_tol=tolerance)


def as_stock(outcome: Outcome, stock: str, ours: str, tolerance: Tolerance, stages: int = 4) -> None:
    expected, actual = (outcome.record(case, len(outcome.codes) - 1) for case in (stock, ours))
    assert len(actual["iterations"]) == len(expected["iterations"]) == 3
    for number, steps in enumerate(zip(actual["iterations"], expected["iterations"], strict=True)):
        losses = [float.fromhex(step["lm loss"]) for step in steps]
        assert near(*losses, tolerance.later if number else tolerance.loss), f"iteration {number + 1}: {losses}"
    norms = [float.fromhex(record["iterations"][0]["grad_norm"]) for record in (actual, expected)]
    assert near(*norms, tolerance.norm), norms
    for evaluations in zip(actual["evaluations"], expected["evaluations"], strict=True):
        losses = [float.fromhex(evaluation["lm loss"]) for evaluation in evaluations]
        assert near(*losses, tolerance.later), f"evaluation: {losses}"
    pairs = pairs_of(outcome, ours, stock, "start", stages)
    assert all(torch.equal(*pair) for pair in pairs.values())
    if tolerance.whole == math.inf:
        return
    pairs = pairs_of(outcome, ours, stock, "gradients", stages)
    distances = {name: distance(*pair) for name, pair in pairs.items()}
    assert max(distances.values()) <= tolerance.gradient, distances
    whole = [torch.cat([pair[side].flatten() for pair in pairs.values()]) for side in (0, 1)]
    assert distance(*whole) <= tolerance.whole


def parameters(rows: Iterable[Row]) -> list[object]:
    return [row.parameter() for row in rows]


@pytest.mark.parametrize("row", parameters((*BY_NAME.values(), *WIDE.values())))
def test_shards_train_what_the_whole_layer_does(trained: Trained, row: Row) -> None:
    as_stock(trained(row), row.stock.name, row.ours.name, tolerance_of(row), stages_of(row))


@pytest.mark.parametrize("row", parameters(BY_NAME[name] for name in ("further-one", "two_further-two")))
def test_losses_of_further_tokens_are_logged(trained: Trained, row: Row) -> None:
    """The last stage's forward returns zeros for these losses; they are known and logged after the S of all ranks."""

    def logged(case: str) -> list[float]:
        printed = trained(row).said(case, -1)
        return [float(value) for value in re.findall(r"mtp_\d loss: ([0-9.E+-]+)", printed)]

    stock, sharded = logged(row.stock.name), logged(row.ours.name)
    assert len(stock) == len(sharded) >= 3
    for actual, expected in zip(sharded, stock, strict=True):
        assert expected > 1
        assert near(actual, expected, 1e-5)


# Peaks in micro-batches, by algorithm and balanced.
PEAKS = {"one": [6, 5, 4, 3], "balanced": [5, 5, 4, 4], "two": [5, 4, 3, 2], "two_balanced": [4, 4, 3, 4]}
PEAKS |= {"input": PEAKS["one"], "input_balanced": PEAKS["balanced"]}


@pytest.mark.parametrize(
    "row",
    parameters(
        BY_NAME[f"{feature}-{ours}"]
        for feature, runs in {
            "m8": "balanced two_balanced input_balanced",
            "tied": "balanced input_balanced",
            "bf16": "balanced two_balanced",
            "further": "balanced two_balanced",
        }.items()
        for ours in runs.split()
    ),
)
def test_balancing_shards_changes_no_bit(trained: Trained, row: Row) -> None:
    outcome, (feature, _, moved) = trained(row), row.name.partition("-")
    plain = BALANCED[moved][0]
    same(outcome, f"{feature}-{plain}", row.ours.name, 4)
    if feature == "further":
        assert outcome.reports(row.ours.name)[0]["evictions"] > 0
        return
    for ours in (plain, moved):
        case = f"{feature}-{ours}"
        modelled = shard_modelled("2" if "two" in ours else "1", "bf16" if feature == "bf16" else "fp32")
        assert [report["peak_microbatches"] for report in outcome.reports(case)] == PEAKS[ours]
        as_predicted(outcome, case, 4, moves=ours == moved)
        assert {shard_held(outcome, case, rank) for rank in range(4)} == {modelled}
        run = read_held(Path(outcome.report_folder(case)))
        assert run is not None
        # The record of a run that may run out of memory is written as it happens.
        assert {max(mark.shard_bytes for mark in rank.marks) for rank in run.ranks} == {modelled}


def shard_held(outcome: Outcome, case: str, rank: int) -> int:
    """Return the bytes of a micro-batch from S to T in the run's record."""
    path = Path(outcome.report_folder(case)) / f"record_{rank:05d}.jsonl"
    return int(json.loads(path.read_text().splitlines()[-1])["shard_bytes"])


def shard_modelled(algorithm: str, precision: str = "fp32", stages: int = 4, micro_batch: int = 2) -> int:
    """Return the same bytes as modelled for the tiny model."""
    tiny = replace(gpt("tiny", stages, 64, 4, 128, 64), tied_embedding=False)
    cut = (parse_cluster(f"a100-80g:1x{stages}"), 1, stages, micro_batch, 16, 64, (1,) * stages)
    choices = {"precision": precision, "kernels": "cpu", "attention": "unfused", "vocabulary": Vocabulary(algorithm)}
    return shard_bytes(Setup(tiny, *cut, **choices))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "peaks"),
    [
        BY_NAME[name].parameter(peaks)
        for name, peaks in {"m8-interlaced": [6, 5, 3, 2], "m1-interlaced": [1] * 4}.items()
    ],
)
def test_interlaced_holds_half_as_much_again_as_1f1b(trained: Trained, row: Row, peaks: list[int]) -> None:
    outcome = trained(row)
    assert [report["peak_microbatches"] for report in outcome.reports(row.ours.name)] == peaks
    as_predicted(outcome, row.ours.name, 4, moves=False)


@pytest.mark.parametrize("row", parameters((BY_NAME["tied-one"], WIDE["tied_data-one"], WIDE["tied_distributed-one"])))
def test_copies_of_a_tied_weight_stay_equal(trained: Trained, row: Row) -> None:
    """Also on several replicas, with a distributed optimizer that owns different parts of each copy."""
    outcome, stages = trained(row), stages_of(row)
    start, end = (tensors(outcome, row.ours.name, part, stages) for part in ("start", "end"))
    for replica in range(4 // stages):
        assert not torch.equal(start[f"{replica} {EMBEDDING}"], end[f"{replica} {EMBEDDING}"])
        assert torch.equal(end[f"{replica} {EMBEDDING}"], end[f"{replica} {OUTPUT}"])


LARGE = f"{UNTIED} --vocab-size 131071 --seq-length 512 --max-position-embeddings 512 {batch(2)} --train-iters 2"


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_the_last_rank_no_longer_holds_all_logits(
    run_cases: Callable[..., Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    """Measure 131072 rows: each process's bytes at the start of its second iteration, and how much they grow in it."""
    beyond, before = {}, {}
    kinds = {"stock": "", "shards": f"{SHARDS} 1", "early": f"{SHARDS} 2", "inputs": f"{INPUT} 1"}
    for name, ours in kinds.items():
        outcome = run_cases(4, [Case(name, f"--peak {LARGE} {ours}")], 170)
        memory = [outcome.record(name, number)["weights"] for number in range(4)]
        beyond[name] = [rank["peak"] - rank["held"] for rank in memory]
        before[name] = [rank["held"] for rank in memory]
        with capsys.disabled():
            peaks = ", ".join(f"{rank['peak'] / 2**20:.0f}" for rank in memory)
            print(f"\n{name}: MiB of each rank at its peak {peaks}")
    # Stock computes the gradient in place. Shards have their logits, and 32 MiB of them in 32 bits at a time for any p.
    logits = 2 * 512 * 131072 * 4
    assert beyond["stock"][-1] > logits
    assert all(max(beyond[name]) < beyond["stock"][-1] / 2 for name in kinds if name != "stock")
    # Weight, gradient and two moments of the embedding, whole or a quarter; a process does not return all freed memory.
    assert before["shards"][0] - before["inputs"][0] > 4 * (64 * 131072 * 4) * 3 / 4 * 0.8


def launched(tmp_path: Path, case: str, script: Path, flags: str) -> Outcome:
    """Train with the launcher and a report."""
    folder = tmp_path / case
    folder.mkdir()
    four = f"{TINY} --num-layers 4 --pipeline-model-parallel-size 4 {batch(8)} {ITERATIONS}"
    command = f"-m megatron.scheduling.launch {script} {four} --bpipe-report {folder} {flags}"
    return finish(start(4, command.split(), folder, free_ports(1)[0]), folder, 80)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "flags", "ours"),
    [
        pytest.param("plain_script.py", f"--label-shift 2 {UNTIED}", f"{SHARDS} 1", id="gpt"),
        pytest.param("plain_script.py", f"--label-shift 2 {UNTIED}", f"{INPUT} 1", id="inputs", marks=pytest.mark.slow),
        pytest.param("plain_script_hybrid.py", "--num-layers 12", f"{SHARDS} 1", id="hybrid", marks=pytest.mark.slow),
        pytest.param(
            "plain_script_hybrid.py", "--num-layers 12", f"{INPUT} 1", id="hybrid_inputs", marks=pytest.mark.slow
        ),
    ],
)
def test_a_script_of_ones_own_is_split(tmp_path: Path, name: str, flags: str, ours: str) -> None:
    """The script has its own model, labels and mean of the losses."""
    losses = []
    for case, added in (("stock", ""), ("shards", ours)):
        outcome = launched(tmp_path, case, ROOT / "tests/gloo" / name, f"{flags} {added}")
        assert outcome.codes == [0] * 4, outcome.logs[3][-3000:]
        losses.append([float.fromhex(step["lm loss"]) for step in iterations(tmp_path / case)])
    assert len(set(losses[0])) == 3
    for number, pair in enumerate(zip(*losses, strict=True)):
        assert near(*pair, FP32.later if number else FP32.loss), losses


@pytest.mark.timeout(120)
def test_a_loss_that_is_not_linear_in_the_tokens_is_refused(tmp_path: Path) -> None:
    """In a mean of squares, a token's weight depends on its loss."""
    squares = tmp_path / "squares.py"
    script = (ROOT / "tests/gloo/plain_script.py").read_text()
    squares.write_text(script.replace("losses.float().mean()", "losses.float().square().mean()"))
    outcome = launched(tmp_path, "squares", squares, f"{UNTIED} {SHARDS} 1")
    assert outcome.codes.count(0) == 0
    assert "the weight of each token depends on the losses" in outcome.logs[3]
