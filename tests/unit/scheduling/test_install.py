"""What `install` cannot do in a loop of one's own it refuses by name, before Megatron is imported; what it takes,
somebody acts on."""

from __future__ import annotations

from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.config.flags.budgets import MemoryBudget
from bpipe.simulate.cost import Costs
from megatron.scheduling import install
from megatron.scheduling.options.arguments import BY_TRAINER, SchedulingConfig

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
