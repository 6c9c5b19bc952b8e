"""Compare the trainings of one launch by rank, or by the names of weights if stages are placed differently."""

from __future__ import annotations

import shlex
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from bpipe.plan.budget import Devices, predicted_devices
from bpipe.plan.options import setup_from
from bpipe.predict.layout import Setup
from bpipe.record.report.report import report_of
from megatron.scheduling.cpu import ARGUMENTS
from tests.gloo.conftest import Outcome, Row
from tests.gloo.flags import FOUR, TINY

STAGES = f"--num-layers 4 {FOUR}"


def same(outcome: Outcome, stock: str, case: str, world: int = 4, last: int | None = None) -> None:
    """Check that every rank recorded the same iterations (or the same `last` ones), and ended with the same weights."""
    for rank in range(world):
        expected, actual = outcome.record(stock, rank), outcome.record(case, rank)
        iterations = expected["iterations"][-last:] if last else expected["iterations"]
        assert iterations, f"{stock} trained nothing"
        assert actual["iterations"] == iterations
        assert last or actual["evaluations"] == expected["evaluations"]
        assert actual["weights"] == expected["weights"]
    _trains(outcome.record(stock, world - 1)["iterations"])


def alike(outcome: Outcome, stock: str, ours: str, world: int = 4, last: int | None = None) -> None:
    """Check that losses, evaluations and named weights are equal; gradient norms are summed in another order."""
    expected, actual = (outcome.record(case, world - 1) for case in (stock, ours))
    assert without_norms(actual)[-(last or 0) :] == without_norms(expected)[-(last or 0) :]
    assert last or actual["evaluations"] == expected["evaluations"]
    _trains(expected["iterations"])
    assert weights(outcome, ours, world) == weights(outcome, stock, world)


def without_norms(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in step.items() if name != "grad_norm"} for step in record["iterations"]]


def _trains(iterations: list[dict[str, Any]]) -> None:
    losses = [step["lm loss"] for step in iterations]
    assert len(set(losses)) == len(losses) > 0, "a loss that does not change would make any two runs equal"
    assert not all(step["skipped"] for step in iterations), "weights that never change would make any two runs equal"


def weights(outcome: Outcome, case: str, world: int) -> dict[str, str]:
    """Return hashes of the model's weights by name; weights that several ranks have must be equal."""
    digests: dict[str, str] = {}
    for rank in range(world):
        for name, digest in outcome.record(case, rank)["weights"].items():
            assert digests.setdefault(name, digest) == digest, f"{case}: copies of {name} differ"
    return digests


def losses_of(outcome: Outcome, case: str) -> list[float]:
    """Return the losses of every iteration, from the rank that has them."""
    for rank in range(len(outcome.codes)):
        iterations = outcome.record(case, rank)["iterations"]
        if "lm loss" in iterations[0]:
            return [float.fromhex(step["lm loss"]) for step in iterations]
    raise AssertionError(f"no rank has a loss of {case}")


def gradients(outcome: Outcome, case: str, world: int) -> dict[str, torch.Tensor]:
    """Return the model's gradients of the first iteration, with the vocabulary's rows in one piece."""
    by_name: dict[str, torch.Tensor] = {}
    for rank in range(world):
        by_name |= torch.load(outcome.folder / f"{case}.rank{rank}.gradients")
    rows: dict[str, dict[int, torch.Tensor]] = {}
    for name in [name for name in by_name if " from " in name]:
        layer, _, first, tensor_rank = name.rsplit(" ", 3)
        rows.setdefault(f"{layer} {tensor_rank}", {})[int(first)] = by_name.pop(name)
    return by_name | {name: torch.cat([parts[first] for first in sorted(parts)]) for name, parts in rows.items()}


def same_gradients(outcome: Outcome, stock: str, ours: str, world: int) -> None:
    expected, actual = gradients(outcome, stock, world), gradients(outcome, ours, world)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items())


def furthest(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest relative L2 distance between the gradients of a weight."""
    assert actual.keys() == expected.keys()
    return max(distance(actual[name].double(), gradient.double()) for name, gradient in expected.items())


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def as_predicted(outcome: Outcome, case: str, world: int, moves: bool, slack_bytes: int = 0) -> None:
    """Check that each rank held what its schedule predicted, to the byte, in its own report and in the run's report."""
    reports = outcome.reports(case)
    assert len(reports) == world
    for report in reports:
        assert report["peak_microbatches"] == report["predicted_microbatches"], f"rank {report['rank']}"
        assert abs(report["peak_bytes"] - report["predicted_bytes"]) <= slack_bytes, f"rank {report['rank']}"
        assert report["predicted_bytes"] > 0
    if not slack_bytes:
        run = report_of(outcome.report_folder(case))
        assert [stage.measured_bytes for stage in run.stages] == [stage.predicted_bytes for stage in run.stages]
    assert any(report["evictions"] for report in reports) is moves, "something moved that should not, or nothing did"


def row_is_same(outcome: Outcome, row: Row) -> None:
    """Check that the ranks' records are equal, and that each held what was predicted."""
    same(outcome, row.stock.name, row.ours.name, row.world)
    if row.moves is not None:
        as_predicted(outcome, row.ours.name, row.world, row.moves, row.slack_bytes)


def row_is_alike(outcome: Outcome, row: Row) -> None:
    """Check named weights, first gradients if they were saved, and that ranks held what was predicted."""
    stock, ours = row.stock.name, row.ours.name
    alike(outcome, stock, ours, row.world)
    if "--gradients" in row.stock.flags:
        same_gradients(outcome, stock, ours, row.world)
    evaluates = any(flag in row.stock.flags for flag in ("--eval-interval", "--eval-iters"))
    assert bool(outcome.record(ours, row.world - 1)["evaluations"]) is evaluates
    if row.moves is not None:
        as_predicted(outcome, ours, row.world, row.moves, row.slack_bytes)


def checkpointed(outcome: Outcome, case: str, iteration: int = 2) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of a checkpoint's tensors by key; None for other values."""
    reader = FileSystemReader(str(outcome.folder / case / f"iter_{iteration:07d}"))
    entries = reader.read_metadata().state_dict_metadata
    return {name: tuple(entry.size) if hasattr(entry, "size") else None for name, entry in entries.items()}


def setup_of(flags: str, vocabulary: int = 128) -> Setup:
    """Return the setup that a planner sees for the tiny model with these flags, on four ranks."""
    words = [*ARGUMENTS, *shlex.split(f"{TINY} {STAGES} {flags}")]
    return setup_from(words, "h100-80g:1x4", vocabulary, "cpu")


def devices_of(flags: str, vocabulary: int = 128) -> Devices:
    """Return what the trainer predicts for a run, with budgets that are never exceeded."""
    return predicted_devices(setup_of(f"{flags} --bpipe-min-bytes 1024 --bpipe", vocabulary), [2**40], 1024)
