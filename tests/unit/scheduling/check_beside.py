"""What the hooks do to a loop's configuration, with Megatron's own timers and configuration, in a process of its own: importing takes
seconds. The loop is not Megatron's and its neighbours are not there; which engine's calls it makes when, is. Ends with 0 when all is well.
"""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron.scheduling import startup

startup.prepare()

# isort: split
import pytest
import torch
from megatron.core import timers as megatron_timers
from megatron.core.transformer.transformer_config import TransformerConfig

from bpipe.runtime.errors import RuntimeFault
from bpipe.transport.connect import MeasuredLink
from megatron.scheduling import beside
from megatron.scheduling.arguments import SchedulingConfig
from megatron.scheduling.hooks import Hooks
from tests.unit.runtime.loop import new_weight, run_iteration, schedule
from tests.unit.runtime.test_engine import LateTransport
from tests.unit.scheduling.test_waiting import STILL

# Stage 5's last RETURN stands behind its last backward.
STAGES, MICROBATCHES = 6, 12
PLAN = schedule(STAGES, MICROBATCHES)


class Told(LateTransport):
    """Says when the acceptor's ends start."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        # What the partner would have said of its storages.
        self.sizes = {0: (64,)}
        self._log = log

    def give_back(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Any:
        self._log.append("RETURN")
        return self.host(host_buffer, tensors)


class Stage(torch.nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **settings)


@contextlib.contextmanager
def hooks_of(rank: int, transport: LateTransport) -> Iterator[Hooks]:
    """The hooks of one rank, with the transport given."""
    hooks = Hooks(SchedulingConfig(balance=True, num_ranks=STAGES, num_chunks=1, minimum_bytes=1, timers_interval=1))
    device = mock.PropertyMock(return_value=torch.device("cpu"))
    with (
        mock.patch.object(Hooks, "_rank", mock.PropertyMock(return_value=rank)),
        mock.patch.object(Hooks, "_device", device),
        mock.patch.object(Hooks, "_transport", return_value=transport),
        mock.patch.object(Hooks, "_measured"),
        mock.patch("torch.distributed.get_rank", return_value=rank),
    ):
        yield hooks


def computing(hooks: Hooks, rank: int) -> None:
    """All computations of a loop: the hooks themselves begin and end."""
    engine = hooks._active
    assert engine is not None
    calls: Any = SimpleNamespace(begin=lambda: None, end=lambda: None, before=engine.before, after=engine.after)
    run_iteration(calls, PLAN, new_weight(), rank=rank)


def last_transfers_start_before_gradients_are_finalised() -> None:
    """The acceptor's last RETURN used to start in front of its last message to a neighbour; after finalising it would be too late."""
    log: list[str] = []
    model = Stage(finalize_model_grads_func=lambda *_, **__: log.append("finalised"))
    finalize = model.config.finalize_model_grads_func

    def loop(model: list[Stage], num_microbatches: int) -> str:
        computing(hooks, 5)
        log.append("last message")
        finalize = model[0].config.finalize_model_grads_func
        assert finalize is not None
        finalize(model, None, pg_collection=None)
        return "what the loop returns"

    with hooks_of(5, Told(log)) as hooks:
        wrapped = hooks._wrap_loop(loop)
        for _ in range(2):
            log.clear()
            assert wrapped(model=[model], num_microbatches=MICROBATCHES) == "what the loop returns"
            assert log == [*["RETURN"] * 4, "last message", "RETURN", "finalised"]
            assert model.config.finalize_model_grads_func is finalize


def a_loop_that_finalises_nothing_starts_them_at_its_end() -> None:
    log: list[str] = []
    model = Stage()
    assert model.config.finalize_model_grads_func is None

    def loop(model: Stage, num_microbatches: int) -> None:
        computing(hooks, 5)
        log.append("last message")

    with hooks_of(5, Told(log)) as hooks:
        hooks._wrap_loop(loop)(model=model, num_microbatches=MICROBATCHES)
    assert log == [*["RETURN"] * 4, "last message", "RETURN"]
    assert model.config.finalize_model_grads_func is None


def a_loop_that_finalises_in_the_middle_is_refused_and_its_function_put_back() -> None:
    log: list[str] = []
    model = Stage(finalize_model_grads_func=lambda *_: log.append("finalised"))
    finalize = model.config.finalize_model_grads_func

    def loop(model: Stage, num_microbatches: int) -> None:
        assert model.config.finalize_model_grads_func is not None
        model.config.finalize_model_grads_func([model], None)

    over = "the pipeline loop is over stage 5, after the start, at 5F0"
    with hooks_of(5, Told(log)) as hooks, pytest.raises(RuntimeFault, match=over):
        hooks._wrap_loop(loop)(model=model, num_microbatches=MICROBATCHES)
    assert log == []
    assert model.config.finalize_model_grads_func is finalize


def megatrons_timers_never_run_around_a_transfer() -> None:
    """Starting and stopping one synchronises the device: every transfer would be waited for where it starts, and ranks for each other."""
    timers = megatron_timers.Timers(2, "minmax")
    model = Stage(timers=timers)
    logged: dict[str, float] = {}

    def log(names: list[str], normalizer: float) -> None:
        logged.update({name: timers(name).elapsed() / normalizer for name in names if name in timers._timers})

    timers.log = log

    def refuse_to_start(timer: object, barrier: bool = False) -> None:
        raise AssertionError("a timer of Megatron's runs around a transfer")

    # Each look at the clock is a second later than the one before, so what is timed once takes a second.
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    with (
        hooks_of(0, LateTransport()) as hooks,
        mock.patch.object(megatron_timers.Timer, "start", refuse_to_start),
        mock.patch.object(beside, "time", clock),
    ):
        wrapped = hooks._wrap_loop(lambda model, num_microbatches: computing(hooks, 0))
        wrapped(model=model, num_microbatches=MICROBATCHES)
        assert logged == {"bpipe-evict": 5, "bpipe-load": 5, "bpipe-wait": 5 + 5 + 1}, "in the first iteration the sizes too"
        wrapped(model=model, num_microbatches=MICROBATCHES)
        assert logged == {"bpipe-evict": 5, "bpipe-load": 5, "bpipe-wait": 5 + 5}


def below_their_level_timers_are_told_nothing() -> None:
    timers = megatron_timers.Timers(1, "max")
    timers.log = lambda names, normalizer: None
    model = Stage(timers=timers)
    with hooks_of(0, LateTransport()) as hooks:
        hooks._wrap_loop(lambda model, num_microbatches: computing(hooks, 0))(model=model, num_microbatches=MICROBATCHES)
    assert not timers._timers


def a_run_that_would_stand_still_is_refused() -> None:
    """test_waiting.py says which; here that the hooks ask, once they know the links."""
    config = SchedulingConfig(balance=True, num_ranks=10, num_chunks=2, synchronous=True)
    connected = None, [MeasuredLink((0, 9), "gloo", {})], "a table"
    with (
        mock.patch("megatron.scheduling.links.connect_pairs", return_value=connected),
        mock.patch("torch.distributed.get_rank", return_value=0),
        pytest.raises(ValueError, match="with --bpipe-sync-transfers the ranks would wait for each other"),
    ):
        Hooks(config)._transport(STILL, torch.device("cpu"), Stage())


if __name__ == "__main__":
    a_run_that_would_stand_still_is_refused()
    last_transfers_start_before_gradients_are_finalised()
    a_loop_that_finalises_nothing_starts_them_at_its_end()
    a_loop_that_finalises_in_the_middle_is_refused_and_its_function_put_back()
    megatrons_timers_never_run_around_a_transfer()
    below_their_level_timers_are_told_nothing()
