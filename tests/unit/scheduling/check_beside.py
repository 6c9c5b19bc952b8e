"""What the hooks and their driver do around a loop, with Megatron's own timers and configuration."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.transformer.transformer_config import TransformerConfig

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig
from bpipe.runtime import RuntimeFault
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.one_f_one_b import ONE_F_ONE_B
from bpipe.schedule.schedule import Schedule
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import MeasuredLink
from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.log import FirstIterations
from megatron.scheduling.loop.megatron_loops import Hooks, Recapture
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.placement.positions import Positions
from tests.unit.runtime.loop import new_weight, run_iteration, schedule
from tests.unit.runtime.test_engine import LateTransport
from tests.unit.scheduling.test_waiting import STILL

STAGES, MICROBATCHES = 6, 12


def with_a_late_return(plan: Schedule) -> Schedule:
    """The plan, with the last RETURN of stage 5 as late as stage 0 can take it: after stage 5's last backward."""
    rows = [list(row) for row in plan.ranks]
    *_, late = (action for slot in rows[-1] for action in slot.transfers if action.kind is Kind.RETURN)
    backward = next(
        index
        for index, slot in enumerate(rows[0])
        for action in slot.computations
        if action.kind is Kind.BACKWARD and action.microbatch == late.microbatch
    )
    for row in (rows[0], rows[-1]):
        ends = {late, Action(late.stage, Kind.LOAD, late.microbatch)}
        (moved,) = (action for slot in row for action in slot.transfers if action in ends)
        for index, slot in enumerate(row):
            row[index] = replace(slot, transfers=tuple(action for action in slot.transfers if action != moved))
        row[backward - 1] = replace(row[backward - 1], transfers=(*row[backward - 1].transfers, moved))
    return replace(plan, ranks=tuple(map(tuple, rows)))


PLAN = with_a_late_return(schedule(STAGES, MICROBATCHES))


class Told(LateTransport):
    """Logs when the acceptor's RETURNs start."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        # The sizes that the partner would have announced.
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
def driver_of(rank: int, transport: LateTransport) -> Iterator[Driver]:
    """The driver of one rank, with the transport given."""
    config = SchedulingConfig(
        num_ranks=STAGES,
        num_chunks=1,
        balance=BalanceConfig(),
        transfers=TransferConfig(minimum_bytes=1),
    )
    with (
        mock.patch.object(Driver, "rank", mock.PropertyMock(return_value=rank)),
        mock.patch.object(Driver, "device", mock.PropertyMock(return_value=torch.device("cpu"))),
        mock.patch.object(Driver, "_transports", return_value={STAGES - 1 - rank: transport}),
        mock.patch.object(FirstIterations, "ended"),
        mock.patch("megatron.scheduling.loop.driver.built", return_value=PLAN),
        mock.patch("torch.distributed.get_rank", return_value=rank),
    ):
        yield Driver(config)


def wrapped(driver: Driver, loop: Callable[..., Any]) -> Callable[..., Any]:
    """A loop that takes the place of Megatron's 1F1B."""
    return Hooks(driver, STAGES).wraps()[patches.ONE_F_ONE_B](loop)


def computing(driver: Driver, rank: int) -> None:
    """All computations of a loop: the hooks themselves begin and end."""
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    calls: Any = SimpleNamespace(
        begin=nothing, before=driver.before, after=driver.after, sent=driver.sent, communicated=nothing, end=nothing
    )
    run_iteration(calls, PLAN, new_weight(), rank=rank)


def check_last_transfers_start_before_gradients_are_finalised() -> None:
    """The acceptor's last RETURN once started before its last message; after finalising is too late."""
    log: list[str] = []
    model = Stage(finalize_model_grads_func=lambda *_, **__: log.append("finalised"))
    finalize = model.config.finalize_model_grads_func

    def loop(model: list[Stage], num_microbatches: int) -> str:
        computing(driver, 5)
        log.append("last message")
        finalize = model[0].config.finalize_model_grads_func
        assert finalize is not None
        finalize(model, None, pg_collection=None)
        return "what the loop returns"

    with driver_of(5, Told(log)) as driver:
        run = wrapped(driver, loop)
        for _ in range(2):
            log.clear()
            assert run(model=[model], num_microbatches=MICROBATCHES) == "what the loop returns"
            assert log == [*["RETURN"] * 4, "last message", "RETURN", "finalised"]
            assert model.config.finalize_model_grads_func is finalize


def check_a_loop_that_finalises_in_the_middle_is_refused_and_its_function_put_back() -> None:
    log: list[str] = []
    model = Stage(finalize_model_grads_func=lambda *_: log.append("finalised"))
    finalize = model.config.finalize_model_grads_func

    def loop(model: Stage, num_microbatches: int) -> None:
        assert model.config.finalize_model_grads_func is not None
        model.config.finalize_model_grads_func([model], None)

    over = r"the pipeline loop ended before 5F0 \(stage 5, after the start, at 5F0\)"
    with driver_of(5, Told(log)) as driver, pytest.raises(RuntimeFault, match=over):
        wrapped(driver, loop)(model=model, num_microbatches=MICROBATCHES)
    assert log == []
    assert model.config.finalize_model_grads_func is finalize


def check_a_run_that_would_deadlock_is_refused() -> None:
    """test_waiting.py tests which runs do; here, that the driver checks for it once it knows the links."""
    config = SchedulingConfig(
        num_ranks=10, num_chunks=2, balance=BalanceConfig(), transfers=TransferConfig(synchronous=True)
    )
    connected: Any = {}, [MeasuredLink((0, 9), "gloo", {})], "a table"
    with (
        mock.patch("megatron.scheduling.loop.driver.connect_pairs", return_value=connected),
        mock.patch.object(Positions, "pipelines", return_value=[range(10)]),
        mock.patch("megatron.scheduling.loop.driver.built", return_value=STILL),
        mock.patch("torch.distributed.get_rank", return_value=0),
        pytest.raises(ValueError, match=r"with --bpipe-sync-transfers, ranks can wait for each other for ever: drop"),
    ):
        Driver(config)._engine(
            ScheduleConfig(STILL.name, STILL.num_ranks, STILL.num_microbatches, num_chunks=2), Stage()
        )


def check_a_loop_of_ones_own_drives_the_same_iteration() -> None:
    """Such a loop names its operations itself, and calls the driver as it would call an engine."""
    log: list[str] = []
    with driver_of(5, Told(log)) as driver:
        assert not driver.running
        for changed_over in (True, False):
            with driver.iteration(driver.program(ONE_F_ONE_B, MICROBATCHES), Stage().config) as plan:
                assert (driver.running, driver.changed_over) == (True, changed_over)
                calls: Any = driver
                run_iteration(calls, plan, new_weight(), rank=5)
        assert not driver.running
    assert log == ["RETURN"] * 5 * 2


def check_all_programs_share_their_streams() -> None:
    """torch has 32 streams per priority: with 16 batch sizes transfers queued behind NCCL's kernels."""
    with (
        driver_of(5, Told([])) as driver,
        mock.patch("bpipe.transport.streams.Streams.__init__", autospec=True, return_value=None) as constructor,
    ):
        for num_microbatches in range(8, 16):
            driver._engine(driver.program(ONE_F_ONE_B, num_microbatches), Stage().config)
    assert (len(driver._engines), constructor.call_count) == (8, 1)


def check_a_graph_is_dropped_when_its_iteration_changes_and_when_it_is_of_another_training() -> None:
    """A replay would read memory that the earlier training has released, or train on a part of the batch."""
    dropped: list[str] = []
    wrapper: Any = SimpleNamespace(reset_cuda_graph=dropped.append)
    recapture = Recapture(SimpleNamespace(balance=None))  # type: ignore[arg-type]
    with (
        mock.patch("megatron.scheduling.loop.megatron_loops.say"),
        mock.patch.dict(FullCudaGraphWrapper.cuda_graph, training=object()),
    ):
        for number, evaluates, num_dropped in ((4, 0, 1), (4, 0, 1), (2, 1, 1), (8, 0, 2), (8, 0, 2)):
            recapture.call(lambda wrapper, **_: None, wrapper, num_microbatches=number, forward_only=evaluates)
            assert dropped == ["training"] * num_dropped


def check_the_loop_that_is_called_says_which_schedule_it_runs() -> None:
    """Not the number of chunks: a configuration that another loop would need is refused before anything runs."""
    called: list[str] = []
    with driver_of(0, LateTransport()) as driver:
        loops = Hooks(driver, STAGES).wraps()
        with pytest.raises(ValueError, match="schedule interleaved-1f1b needs at least 2 chunks per rank, not 1"):
            loops[patches.INTERLEAVED](lambda **_: called.append("interleaved"))(
                model=Stage(), num_microbatches=MICROBATCHES
            )
        driver._config = replace(driver._config, num_chunks=2)
        with pytest.raises(ValueError, match="schedule 1f1b takes at most 1 chunk per rank, not 2"):
            wrapped(driver, lambda **_: called.append("1F1B"))(model=Stage(), num_microbatches=MICROBATCHES)
    assert not called
