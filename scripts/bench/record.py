"""Measure what the record of a run costs: iterations of one stage with and without it, taking turns in one process.

In: sizes. Out: a table, and JSON with --json, with medians and quartiles: what the engine's own calls take of this
thread's processor time a computation, where a few microseconds show because the computation itself is left out; and the
iteration by the clock against the engine alone's, where they have to show in the end. The stage is the first of a
pipeline, its activations go to host memory, so that everything a record notes takes place; its neighbours are not
there, so an iteration is computation and transfers alone, and a cost shows as large as it can be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.turns import spread
from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.ir.action import Action
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.executor import Executor
from bpipe.runtime.meter import Meter
from bpipe.runtime.recorder import Recorder
from bpipe.runtime.streams import Clock, copying_on, lanes, synchronize
from bpipe.transport.one_sided import HostMemory, OneSidedCopies
from tests.gpu.one_stage import loop_of

VARIANTS = {"engine alone": (False, False), "with peaks": (True, False), "with peaks and record": (True, True)}


@dataclass(frozen=True)
class Spent:
    """One iteration: by the clock, and this thread's processor time in the engine's calls for each computation."""

    iteration_s: float
    calls_s: float


def against(mine: Sequence[Spent], alone: Sequence[Spent]) -> dict[str, list[float]]:
    """What was measured of one variant, its iterations beside those of the engine alone in the same round."""
    return {
        "iteration_s": [spent.iteration_s for spent in mine],
        "calls_us": [1e6 * spent.calls_s for spent in mine],
        "ratio": [a.iteration_s / b.iteration_s for a, b in zip(mine, alone, strict=True)],
    }


class Timed:
    """An engine's calls, and the processor time that they take of the thread which makes them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.worked_s = 0.0

    def begin(self) -> None:
        with self.timed():
            self._engine.begin()

    def before(self, op: Action) -> None:
        with self.timed():
            self._engine.before(op)

    def after(
        self, op: Action, outputs: Sequence[torch.Tensor | None] = (), inputs: Sequence[torch.Tensor | None] = ()
    ) -> None:
        with self.timed():
            self._engine.after(op, outputs, inputs)

    def sent(self, op: Action) -> None:
        with self.timed():
            self._engine.sent(op)

    def communicated(self) -> None:
        with self.timed():
            self._engine.communicated()

    def end(self) -> None:
        with self.timed():
            self._engine.end()

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        begin_s = time.thread_time()
        yield
        self.worked_s += time.thread_time() - begin_s


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    arguments = _options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    schedule = build(ScheduleConfig("1f1b", arguments.stages, arguments.microbatches, balance=BalanceConfig()))
    layer = torch.nn.TransformerEncoderLayer(arguments.hidden, 8, 4 * arguments.hidden, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False).to(device)
    inputs = torch.randn(1, arguments.sequence, arguments.hidden, device=device)
    loop = loop_of(
        schedule, 0, lambda received: model(received).sum(), lambda microbatch: inputs.clone().requires_grad_()
    )
    out, home = lanes(device, 60.0)
    config = EngineConfig("rank 0", device, minimum_bytes=65536, timeout_s=60.0)

    def engine(metered: bool) -> Engine:
        return Engine(
            schedule, 0, OneSidedCopies(HostMemory(copying_on(device)), out, home), config, Meter() if metered else None
        )

    engines = {name: engine(metered) for name, (metered, _) in VARIANTS.items()}
    # The first round allocates.
    rounds = [
        {name: _iteration(loop, engine, device, VARIANTS[name][1]) for name, engine in engines.items()}
        for _ in range(arguments.rounds + 1)
    ]
    spent = {name: [of_all[name] for of_all in rounds[1:]] for name in VARIANTS}
    for lane in (out, home):
        lane.close()
    found = {name: against(mine, spent["engine alone"]) for name, mine in spent.items()}
    _report(found, device, arguments.rounds)
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({name: _quartiles(row) for name, row in found.items()}, indent=1) + "\n"
        )


def _quartiles(row: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {key: statistics.quantiles(values, n=4) for key, values in row.items()}


def _iteration(loop: Executor, engine: Engine, device: torch.device, records: bool) -> Spent:
    """One iteration, recorded or not."""
    recorder = engine.recorder = Recorder(Clock(device)) if records else None
    calls, begin_s = Timed(engine), time.perf_counter()
    loop.run(calls)
    if recorder is not None:
        with calls.timed():
            recorder.rows({}, {})
    synchronize(device)
    return Spent(time.perf_counter() - begin_s, calls.worked_s / (2 * engine.schedule.num_microbatches))


def _report(found: Mapping[str, Mapping[str, list[float]]], device: torch.device, rounds: int) -> None:
    print(
        f"{device}, torch {torch.__version__}, {platform.processor() or platform.machine()}; {rounds} rounds, medians "
        f"(quartiles)"
    )
    print(f"{'':<22} {'iteration, ms':>13} {'calls, us per computation':>28} {'iteration to the engine alone':>32}")
    for name, row in found.items():
        iteration_ms = 1e3 * statistics.median(row["iteration_s"])
        print(
            f"{name:<22} {iteration_ms:>13.1f} {spread(row['calls_us'], '.0f'):>28} {spread(row['ratio'], '.4f'):>32}"
        )


if __name__ == "__main__":
    main()
