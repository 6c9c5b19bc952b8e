"""Costs of stages."""

from __future__ import annotations

from dataclasses import replace

from bpipe.balance.budget import ActivationBudget
from bpipe.balance.config import BalanceConfig
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.model import PRESETS
from bpipe.predict.saved_tensors import stage_bytes
from bpipe.schedule.memory import memory_of


def test_stages_that_are_alike_move_what_leaves_of_each() -> None:
    """What alike stages cost is made once.

    Of two of them differing parts left, and both were charged for the first one's.
    """
    setup = Setup(PRESETS["gpt3-13b"], parse_cluster("h100-80g:8"), 1, 8, 4, 128, 2048, (5,) * 8, balance=EVENLY)
    saved = stage_bytes(setup)
    moved = [size // (stage + 1) for stage, size in enumerate(saved)]
    activation_budget = ActivationBudget((10**12,) * 8, memory_of(saved, moved))
    found = predict_costs(
        replace(setup, balance=BalanceConfig(activation_budget=activation_budget, parts=(1, 2, 3)))
    ).stages
    assert [cost.moved_bytes for cost in found] == [saved[0], *moved[1:4], *saved[4:]]
