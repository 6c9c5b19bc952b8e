"""Shards of the vocabulary that go wrong on purpose. In: nothing. Out: by name, what makes this process do it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from bpipe.build import ScheduleConfig
from bpipe.runtime.shards import EarlyShard, InputShard, OutputShard
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.schedule import Schedule
from bpipe.transport import collectives
from bpipe.transport.collectives import Collectives
from megatron.scheduling.loop import driver
from megatron.scheduling.vocabulary.output_shards import OutputLayerShard

# One rank comes later than the others to what all have a part in, or a wait would be over before anybody could miss
# it.
LATE = os.environ["RANK"] == "1"


def come_late() -> None:
    for shard in (OutputShard, EarlyShard):
        for name in ("forward", "backward"):
            setattr(shard, name, lately(getattr(shard, name)))


def lately(compute: Callable[..., Any]) -> Callable[..., Any]:
    def late(*given: Any) -> Any:
        if LATE:
            time.sleep(0.05)
        return compute(*given)

    return late


def wait_for_no(kind: Kind) -> None:
    """What all ranks make a part of in this pass is taken as it is."""
    wait = Collectives.wait

    def hasty(self: Collectives, message: Any) -> tuple[torch.Tensor, ...]:
        passing = self._passing.get(message.value)
        if message.made_by[0].kind is not kind or passing is None:
            return wait(self, message)
        return *passing.result, *passing.later_result

    Collectives.wait = hasty  # type: ignore[method-assign]
    come_late()


def change(changed: Callable[[Action], Action | None]) -> None:
    """What one rank computes, behind the check of the schedule."""
    built = driver.built

    def with_one_wrong(program: ScheduleConfig) -> Schedule:
        schedule, ranks = built(program), []
        for rank, row in enumerate(schedule.ranks):
            wrong = (replace(slot, compute=None if slot.compute is None else changed(slot.compute)) for slot in row)
            ranks.append(tuple(wrong) if rank == 1 else row)
        return replace(schedule, ranks=tuple(ranks))

    driver.built = with_one_wrong  # type: ignore[attr-defined]


def exchange(*kinds: Kind) -> None:
    """One rank computes its shard of the second and the third micro-batch in the other's place."""

    def exchanged(action: Action) -> Action:
        if action.kind not in kinds or action.microbatch not in (1, 2):
            return action
        return Action(action.stage, action.kind, 3 - action.microbatch)

    change(exchanged)


def add_to_others_rows() -> None:
    """One rank has the gradients of the second and the third micro-batch with the tokens of the other.

    IB themselves exchanged would do no harm: whoever runs a program waits for the gradients in the order in which
    they are made.
    """
    backward = InputShard.backward

    def of_another(self: InputShard, action: Action, received: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        number = 3 - action.microbatch if LATE and action.microbatch in (1, 2) else action.microbatch
        return backward(self, Action(action.stage, action.kind, number), received)

    InputShard.backward = of_another  # type: ignore[method-assign]


def leave_out(kind: Kind) -> None:
    """One rank never computes its shard of the second micro-batch."""
    change(lambda action: None if (action.kind, action.microbatch) == (kind, 1) else action)


def take_the_weight_as_it_is() -> None:
    """Around the module, whose hooks wait for the weight that the distributed optimizer gathers."""

    def logits(self: OutputLayerShard, x: torch.Tensor) -> torch.Tensor:
        return self._scaled(ColumnParallelLinear.forward(self, x)[0])  # type: ignore[no-any-return]

    OutputLayerShard.logits = logits  # type: ignore[method-assign]


def reduce_early() -> None:
    """What a lane adds up is the early part, as if every shard had all tokens' maximum and sum."""
    second = collectives.SecondStep.__init__

    def made(self: Any, late: Any, lane: Any) -> None:
        second(self, lambda microbatch, gathered: (late.__self__._early.pop(microbatch).part,), lane)

    collectives.SecondStep.__init__ = made  # type: ignore[method-assign]


WRONG: dict[str, Callable[[], None]] = {
    "nothing": come_late,
    "statistics": lambda: wait_for_no(Kind.SHARD_FORWARD),
    "sum": lambda: wait_for_no(Kind.SHARD_BACKWARD),
    "second_step": lambda: wait_for_no(Kind.SHARD_FORWARD),
    "early": reduce_early,
    "order": lambda: exchange(Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD),
    "lookups": lambda: exchange(Kind.INPUT_FORWARD),
    "gradients": add_to_others_rows,
    "no_lookup": lambda: leave_out(Kind.INPUT_FORWARD),
    "no_gradient": lambda: leave_out(Kind.INPUT_BACKWARD),
    "weight": take_the_weight_as_it_is,
}
