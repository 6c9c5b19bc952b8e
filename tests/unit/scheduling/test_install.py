"""What `install` cannot do in a loop of one's own it refuses by name, before Megatron is imported; what it takes,
somebody acts on."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.config.flags.budgets import MemoryBudget
from bpipe.simulate.cost import Costs
from megatron.scheduling import install
from megatron.scheduling.options.arguments import BY_TRAINER, SchedulingConfig

FOLDER = Path(__file__).resolve().parents[3] / "megatron/scheduling"
ASKED: dict[str, Any] = {
    "report": "runs/mine",
    "report_iterations": (3, 5),
    "peak_tflops": 989.0,
    "metrics_interval": 10,
    "memory": MemoryBudget((None,), True),
    "costs": Costs(()),
    "audit": 2,
}


@pytest.mark.parametrize("name", BY_TRAINER)
def test_what_needs_megatrons_trainer_is_refused_by_its_name(name: str) -> None:
    """It was ignored: a run ended without its report."""
    with pytest.raises(
        ValueError, match=rf"\n  {name} in the configuration: .* python -m megatron.scheduling.launch"
    ) as refused:
        install(SchedulingConfig(num_ranks=4, num_chunks=1, balance=BalanceConfig(), **{name: ASKED[name]}))
    assert str(refused.value).count("in the configuration") == 1


def test_all_of_it_is_said_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"^this run cannot start:\n  report in (?s:.*)\n  memory in (?s:.*)\n  audit in "
    ):
        install(SchedulingConfig(num_ranks=4, num_chunks=1, balance=BalanceConfig(), **ASKED))


# Of the training, for who writes a report: they ask for nothing.
FACTS = ("last_iteration", "flops_per_microbatch", "micro_batch_size", "logits_per_microbatch")
# Parts that both have, launched or installed.
PARTS = (
    *("loop/driver", "loop/executor", "loop/links", "loop/transfer_waits"),
    *("hooks/loops", "placement/chunks", "composing"),
)


def test_what_is_not_refused_is_read_by_a_part_that_installs() -> None:
    """A field that only the trainer's parts read would be ignored in a loop of one's own, and nobody would say so."""
    read_there = "".join((FOLDER / f"{part}.py").read_text() for part in PARTS)
    for field in fields(SchedulingConfig):
        if field.name not in (*BY_TRAINER, *FACTS):
            assert re.search(rf"\b_?config\.{field.name}\b", read_there), field.name


def test_parts_are_put_together_in_one_place() -> None:
    """Two places had two lists of parts: what one of them lacked was ignored there."""
    for part in ("Driver", "Loop", "Hooks", "Reporter", "Learner"):
        made = [
            path.name for path in sorted(FOLDER.glob("*.py")) if re.search(rf"(?<!class ){part}\(", path.read_text())
        ]
        assert made == ["composing.py"], part
