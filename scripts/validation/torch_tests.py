"""Run torch's own tests of pipeline schedules with `BalancedSchedule` in the place of its schedules.

    python scripts/validation/torch_tests.py CHECKOUT [-k WORD]

In: the folder of a checkout of torch, for its test/distributed/pipelining, which is not in torch's wheel; the nearer its
version to the installed torch, the better. Out: of every test whether it passes with torch's classes and with ours in
their place, and the reason where not. Ends with 0 where ours pass whatever torch's pass, but for what bpipe refuses.

torch's tests want four GPUs and NCCL. Here each runs on CPUs over gloo: the decorators that skip are taken away, and
`barrier` loses its device_ids. Nothing of the checkout is changed. Ours move activations in poisoned memory. They are
verified on their way, and a schedule that is level already moves to its own memory. Needs the package expecttest, as
torch's tests do.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULE = "test_schedule_multiproc"
FOLDER = "test/distributed/pipelining"
STOCK, BALANCED = "torch", "balanced"
# What a worker of torch's test reads.
MODE_VARIABLE = "TORCH_TESTS_MODE"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
POISON = "Previous test failed"
# What bpipe says of schedules that it does not take, by what of the message tells it. Anything else is a failure.
REFUSALS = {
    "every rank computes equally many": "ranks have different numbers of stages",
    "computes where bpipe cannot see it": "functions of one's own for computations",
    "lists its messages itself": "a list of messages of its own",
}


# -- in the processes that run torch's tests
# -----------------------------------------------------------------------------------------------------------------


def _anyway(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda test: test


def run_on_gloo() -> None:
    """Let torch's tests of four GPUs run on CPUs. Before they are imported."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    helpers: Any = importlib.import_module("torch.testing._internal.common_distributed")
    # A wheel for CUDA names its accelerator on machines without one, too.
    torch.accelerator.current_accelerator = lambda check_available=False: None
    for name in ("requires_accelerator_dist_backend", "skip_if_lt_x_gpu", "requires_nccl"):
        setattr(helpers, name, _anyway)
    torch.testing._internal.common_utils.TEST_MULTIACCELERATOR = True
    barrier = dist.barrier

    @functools.wraps(barrier)
    def without_devices(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)

    dist.barrier = without_devices
    ended = helpers.MultiProcContinuousTest.tearDownClass.__func__

    def end_workers(cls: Any) -> None:
        # Behind a failure a worker may wait for another for ever.
        for process in cls.processes if cls.poison_pill else ():
            process.kill()
        ended(cls)

    helpers.MultiProcContinuousTest.tearDownClass = classmethod(end_workers)


def balanced_in_place_of(schedule_class: type) -> type:
    """Return a class that is made as torch's is, and makes a BalancedSchedule of the same order."""
    from bpipe.ir.memory import moves_anything
    from bpipe.torch import BalancedSchedule

    class InPlace(BalancedSchedule):
        def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, **options: Any) -> None:
            # torch's schedule without backwards is any of ours without a loss.
            source = "1f1b" if schedule_class.__name__ == "_ScheduleForwardOnly" else schedule_class
            shown: dict[str, Any] = {"schedule": source, "minimum_bytes": 1, "poison": True, "verify": float("inf")}
            super().__init__(stages, n_microbatches, loss_fn, **shown, **options)
            if not moves_anything(self.schedule) and self._has_backward:
                own: dict[str, Any] = {**shown, "hosts": "host"}
                super().__init__(stages, n_microbatches, loss_fn, **own, **options)
            self.told = False

        def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
            made = super()._step_microbatches(*args, **kwargs)
            if not self.told and self.rank == 0:
                self.told = True
                print(f"{self.schedule.name}: shares {self.engine.shares}", flush=True)
            return made

    InPlace.__name__ = InPlace.__qualname__ = schedule_class.__name__
    for name in ("n_stages", "num_microbatches", "rank_stages"):
        if hasattr(schedule_class, name):
            setattr(InPlace, name, getattr(schedule_class, name))
    return InPlace


def put_in_place() -> None:
    """Put ours in the place of all schedules that torch's tests import."""
    from torch.distributed import pipelining

    for module in (pipelining, importlib.import_module("schedule_registry")):
        for name in [name for name in vars(module) if name.lstrip("_").startswith("Schedule")]:
            setattr(module, name, balanced_in_place_of(getattr(module, name)))


def prepare() -> None:
    """Make this process one that runs torch's tests, or a worker of one."""
    run_on_gloo()
    if os.environ[MODE_VARIABLE] == BALANCED:
        put_in_place()


class Outcomes(unittest.TestResult):
    """Outcomes of torch's tests, by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.outcomes: dict[str, tuple[str, str]] = {}

    def _tell(self, test: Any, outcome: str, reason: str = "") -> None:
        self.outcomes[test.id()] = outcome, reason

    def addSuccess(self, test: Any) -> None:
        self._tell(test, PASSED)

    def addFailure(self, test: Any, err: Any) -> None:
        self._tell(test, FAILED, str(err[1]))

    addError = addFailure

    def addSkip(self, test: Any, reason: str) -> None:
        self._tell(test, SKIPPED, reason)


def run_named(names: list[str], out: Path) -> None:
    """Run these tests, of one class, in this process and its workers."""
    prepare()
    result = Outcomes()
    unittest.defaultTestLoader.loadTestsFromNames(names).run(result)
    out.write_text(json.dumps(result.outcomes))


def names_of(word: str) -> list[str]:
    """Return the names of torch's tests that hold this word."""
    prepare()
    suite = unittest.defaultTestLoader.loadTestsFromName(MODULE)
    return [name for name in _ids(suite) if word in name]


def _ids(suite: Any) -> Iterator[str]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _ids(each)
        else:
            yield each.id()


# -- in the process that tells
# -----------------------------------------------------------------------------------------------------------------


def _child(checkout: Path, mode: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [checkout / FOLDER, Path(__file__).resolve().parents[2], *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {MODE_VARIABLE: mode, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            told, complained = child.communicate(timeout=3600)
        finally:
            # torch's workers, which wait for tests for ever where nobody ended them.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, child.returncode, told, complained)


def outcomes_of(checkout: Path, mode: str, names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, outcome and reason of each test. Behind a failure torch skips what is left of a class: that is run
    again in fresh processes."""
    for owner in sorted({name.rpartition(".")[0] for name in names}):
        left = [name for name in names if name.startswith(f"{owner}.")]
        while left:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "outcomes.json"
                ran = _child(checkout, mode, "--run", str(out), *left)
                told = json.loads(out.read_text()) if out.exists() else {}
            ended = {name: each for name, each in told.items() if not each[1].startswith(POISON)}
            if not ended:
                raise SystemExit(f"torch's tests did not run: {ran.stderr[-2000:]}")
            for name, (outcome, reason) in ended.items():
                yield name, outcome, reason
            left = [name for name in left if name not in ended]


def why(reason: str) -> str:
    """Return the line of a traceback that says what is wrong."""
    lines = [line for line in reason.strip().splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or [""])[-1].strip()


def refusal(reason: str) -> str | None:
    """Return what bpipe refuses where a test ended with that, None where it is a failure."""
    return next((what for part, what in REFUSALS.items() if part in reason), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of a checkout of torch")
    parser.add_argument("-k", dest="word", default="", help="only tests whose name holds this word")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    if not (checkout / FOLDER / f"{MODULE}.py").is_file():
        parser.error(f"{checkout} holds no {FOLDER}/{MODULE}.py: give the folder of a checkout of torch")
    listed = _child(checkout, STOCK, "--list", arguments.word)
    if listed.returncode:
        raise SystemExit(f"torch's tests cannot be read: {listed.stderr[-2000:]}")
    names = json.loads(listed.stdout.splitlines()[-1])
    told = {mode: _told(checkout, mode, names) for mode in (STOCK, BALANCED)}
    passed = {mode: {name for name, (outcome, _) in of.items() if outcome == PASSED} for mode, of in told.items()}
    short = passed[STOCK] - passed[BALANCED]
    refused = {name for name in short if refusal(told[BALANCED][name][1])}
    # What fails with torch's own, too, is a matter of gloo, or of a checkout of another version.
    print(
        f"{len(names)} tests: torch's schedules pass {len(passed[STOCK])}, balanced in their place "
        f"{len(passed[STOCK] & passed[BALANCED])} of these; {len(refused)} refused, {len(short - refused)} failed"
    )
    return 1 if short - refused else 0


def _told(checkout: Path, mode: str, names: list[str]) -> dict[str, tuple[str, str]]:
    """Run the tests, print how each ended, and return that with its reason."""
    told: dict[str, tuple[str, str]] = {}
    for name, outcome, reason in outcomes_of(checkout, mode, names):
        told[name] = outcome, reason
        what = refusal(reason) if mode == BALANCED else None
        verdict = f"refused: {what}" if what else outcome if outcome == PASSED else f"{outcome}: {why(reason)}"
        print(f"{mode:<9} {name.partition('.')[2]:<90} {verdict}", flush=True)
    return told


if __name__ == "__mp_main__":
    # A worker of torch's, before it imports the test.
    prepare()
elif __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_named(sys.argv[3:], Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--list"]:
        print(json.dumps(names_of(sys.argv[2])))
    else:
        sys.exit(main())
