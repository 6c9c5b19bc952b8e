"""Train any torchtitan configuration with a balanced schedule, by torchtitan's own extension points.

    torchrun ... -m torchtitan.train --module bpipe.torch.titan --config llama3.llama3_debugmodel --balance.schedule 1f1b

`--config` names a model and one of its configurations as `MODEL.CONFIG`, or `package.module.CONFIG` of your own. The
configuration gets one more section, `balance`, and its trainer replaces the pipeline's schedule. Nothing of torchtitan
is patched: `--module` takes any module, a `Trainer.Config` may have more sections, and `ModelSpec.pipelining_fn` makes
the schedule. Written for torchtitan 0.3.0, and run with it.
"""

import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.trainer import Trainer

from bpipe.balance.config import BALANCES, named_balance
from bpipe.schedule.hosts import PAIR
from bpipe.torch.schedule import BalancedSchedule
from bpipe.transport.config import TransferConfig

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Balance:
    """The section `balance` of a configuration."""

    schedule: str = ""
    """A schedule of bpipe or torch, or a file; by default that of --parallelism.pipeline_parallel_schedule."""

    balance: str = "bpipe"
    """Whether activations move: bpipe or none."""

    bounds: list[int] = field(default_factory=list)
    """Most micro-batches of a chunk that a rank may hold: one number, or one per rank. By default the smallest found."""

    hosts: str = PAIR
    """Who keeps what leaves a rank: pair, pool, host (the node's own memory) or all."""

    memory: str = ""
    """Instead of bounds: GiB that each rank's micro-batches and host buffers may take, one number or one per rank."""

    group_size: int = 0
    """Micro-batches in a group of grouped-interleaved; 0: as the schedule has it."""

    transfers: TransferConfig = TransferConfig()
    """How activations travel, and how that is checked."""

    report: str = ""
    """A folder for `bpipe report`, where steps 3 to 5 are recorded."""


def pipelining_with(
    pipelining_fn: Callable[..., Any], balance: Balance, schedule: str
) -> Callable[..., tuple[Any, Sequence[Any], bool, bool]]:
    """Return a model's `pipelining_fn` that makes a balanced schedule.

    `schedule` is torchtitan's own, used if the section names none.
    """

    @functools.wraps(pipelining_fn)
    def pipelined(model: Any, **settings: Any) -> tuple[Any, Sequence[Any], bool, bool]:
        original, parts, has_first_stage, has_last_stage = pipelining_fn(model, **settings)
        moves = balance.balance != BALANCES[0]
        balanced = BalancedSchedule.of(
            original,
            schedule=balance.schedule or schedule,
            balance=named_balance(balance.balance, balance.bounds or None, hosts=balance.hosts if moves else None),
            memory=balance.memory or None,
            group_size=balance.group_size or None,
            transfers=balance.transfers,
            report=balance.report or None,
        )
        logger.info("bpipe: %s of %d micro-batches", balanced.schedule.name, balanced.schedule.num_microbatches)
        return balanced, parts, has_first_stage, has_last_stage

    return pipelined


def balanced_config(base: Any) -> Any:
    """Return a torchtitan configuration with the section `balance`, of a trainer that balances its pipeline.

    `base` is the `Trainer.Config` of any trainer. Raises TypeError for anything else.
    """
    if not isinstance(base, Trainer.Config):
        raise TypeError(f"only a configuration of torchtitan's Trainer can be balanced, not a {type(base).__name__}")
    owner: Any = type(base)._owner

    @dataclass(kw_only=True, slots=True)
    class Config(type(base)):  # type: ignore[misc]
        balance: Balance = field(default_factory=Balance)

    class BalancedTrainer(owner):  # type: ignore[misc]
        """A trainer whose pipeline is balanced."""

        def __init__(self, config: Any) -> None:
            if config.parallelism.pipeline_parallel_degree > 1:
                spec, named = config.model_spec, config.parallelism.pipeline_parallel_schedule
                pipelining_fn = pipelining_with(spec.pipelining_fn, config.balance, named)
                config.model_spec = dataclasses.replace(spec, pipelining_fn=pipelining_fn)
            super().__init__(config)

        def close(self) -> None:
            schedule = getattr(self, "pp_schedule", None)
            if isinstance(schedule, BalancedSchedule):
                # torchtitan's main closes its trainer in its error handler, too.
                schedule.close(failed=sys.exception() is not None)
            super().close()

    # torchtitan's Configurable connects the two by a nested class.
    Config._owner = BalancedTrainer
    BalancedTrainer.Config = Config
    return Config(**{setting.name: getattr(base, setting.name) for setting in dataclasses.fields(base)})


def _registry(module: str) -> Any:
    """Return the module of configurations that torchtitan uses for this name."""
    full = module if "." in module else f"torchtitan.models.{module}"
    try:
        return importlib.import_module(f"{full}.config_registry")
    except ModuleNotFoundError as error:
        if error.name != f"{full}.config_registry":
            raise
        return importlib.import_module(full)


def __getattr__(name: str) -> Callable[[], Any]:
    """Return a function that makes the balanced configuration of a name such as `llama3.llama3_debugmodel`."""
    module, dot, config = name.rpartition(".")
    if not dot:
        raise AttributeError(name)
    make_config = getattr(_registry(module), config)
    return lambda: balanced_config(make_config())
