"""Every line of the runtime and its transports that waits, what it is without its wait, and which tests must notice.

In: nothing. Out: the table, and the lines that ought to be in it, read from the source. Of lines that only a device
needs, late devices notice. As a program: `python -m
tests.unit.runtime.mutations FILE` runs each mutation's tests against a copy of its module in memory, in a process of
its own, and writes what they said. The checkout is never touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[3]
TRANSPORTS = ("one_sided", "lanes", "distributed", "headed", "edges", "collectives")
MODULES = (
    *(f"bpipe/runtime/{name}.py" for name in ("evictor", "acceptor", "engine", "streams", "executor")),
    *(f"bpipe/transport/{name}.py" for name in TRANSPORTS),
)
# What waits, or says what waits for what. Definitions and comments do not.
WAITING = re.compile(
    r"\.wait\(|_messages\.wait\b|wait_event\(|self\._wait\(|\b_settle\(|\b_finish\(|finish_\w+\(|\bafter=\[|_behind_compute\("
)
DEFINITION = re.compile(r"^\s*(def |#|\"\"\")")
# Takes them out by itself, see `tests.late.every_wait`.
LATE = "tests/late/test_every_wait.py"
DELAYED = "tests/unit/runtime/test_delayed.py"
ENGINE = "tests/unit/runtime/test_engine.py"
LANES = "tests/unit/transport/test_lanes.py"
ONE_SIDED = "tests/unit/transport/test_one_sided.py"
DISTRIBUTED = "tests/unit/transport/test_distributed.py"
HEADED = "tests/unit/transport/test_headed.py"
EXECUTOR = "tests/unit/runtime/test_executor.py"
EDGES = "tests/unit/transport/test_edges.py"
COLLECTIVES = "tests/unit/transport/test_collectives.py"
LIMIT_S = 100.0


@dataclass(frozen=True)
class Mutation:
    """The `nth` line of a file that reads `line`, and what stands there instead. `tests` are those that must fail."""

    file: str
    line: str
    instead: str
    tests: tuple[str, ...]
    nth: int = 0

    @property
    def name(self) -> str:
        return f"{Path(self.file).stem}: {self.line.split('  #')[0]}{f' ({self.nth + 1})' if self.nth else ''}"

    def apply(self) -> str:
        """The mutated source. Raises LookupError where the line is no longer there."""
        lines = (ROOT / self.file).read_text().splitlines()
        places = [place for place, text in enumerate(lines) if text.strip() == self.line]
        if self.nth >= len(places):
            raise LookupError(
                f"{self.file} has no line {self.nth + 1} that reads {self.line!r}: bring the table of mutations up to "
                f"date"
            )
        place = places[self.nth]
        indentation = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        lines[place] = indentation + self.instead
        return "\n".join(lines) + "\n"


def mutate(file: str, line: str, instead: str, *tests: str, nth: int = 0) -> Mutation:
    folder = "transport" if file in TRANSPORTS else "runtime"
    return Mutation(f"bpipe/{folder}/{file}.py", line, instead, tests, nth)


ON_STREAM = "with current(self.{}) if self._beside else contextlib.nullcontext():"

TABLE = (
    # [1] and [5]: transfers behind the computation. Seen only where a device runs ahead of its host.
    mutate(
        "streams",
        "with self._behind_compute(self._outbound if self._beside else None):",
        ON_STREAM.format("_outbound"),
        LATE,
    ),
    mutate(
        "streams",
        "with self._behind_compute(self._inbound if self._beside else None):",
        ON_STREAM.format("_inbound"),
        LATE,
    ),
    mutate("streams", "stream.wait_event(_here().record_event())", "pass", LATE),
    mutate("streams", "self._stream.wait_event(_here().record_event())", "pass", LATE),
    mutate("streams", "_here().wait_event(self.end)", "pass", LATE),
    mutate("streams", "pending.wait()", "pass", LATE),
    # [3] and [7]: memory and backwards behind the transfers.
    mutate(
        "evictor",
        "self._finish(activations, ActivationsState.AWAY)  # [3]",
        "activations.move(ActivationsState.AWAY, activations.action)",
        DELAYED,
    ),
    mutate("evictor", "self._finish(activations, ActivationsState.HERE)  # [7]", "pass", DELAYED),
    mutate("evictor", "self._wait(activations.pending, activations.action, activations.state.value)", "pass", DELAYED),
    mutate("evictor", 'self._wait(announcement, forward, "telling its sizes")', "pass", ENGINE),
    # Synchronous transfers.
    mutate("evictor", "self.finish_evictions()", "pass", ENGINE),
    mutate("evictor", "self._finish(activations, ActivationsState.HERE)", "pass", ENGINE),
    mutate("engine", "self._evictor.finish_all()", "pass", ENGINE),
    # Where the engine lets the two roles wait.
    mutate("engine", "self._evictor.finish_evictions()", "pass", ENGINE),
    mutate("engine", "self._evictor.finish_evictions()", "pass", ENGINE, nth=1),
    mutate("engine", "self._finish_loads(self._evictor, step)", "pass", DELAYED),
    mutate("engine", "evictor.finish_load(each)", "pass", DELAYED),
    mutate("engine", "pending.wait()", "pass", DELAYED),
    # [8]: host buffers.
    mutate("acceptor", "self._settle(buffer)  # [8]", "pass", DELAYED),
    mutate("acceptor", "self._settle(buffer)", "pass", DELAYED),
    mutate("acceptor", "self._settle(buffer)", "pass", DELAYED, nth=1),
    mutate("acceptor", "self._wait(pending, action, buffer.state.value)", "pass", DELAYED),
    mutate(
        "one_sided",
        "self._last[host_buffer] = lane.run(copy, after=[*after, *([last] if last is not None else [])])  # [8]",
        "self._last[host_buffer] = lane.run(copy, after)",
        DELAYED,
    ),
    mutate("one_sided", "pending.wait()", "pass", ONE_SIDED),
    # Messages between the two ends.
    mutate(
        "one_sided",
        'self._control.send(Subject.MEMORY, {"error": f"{type(error).__name__}: {error}"}).wait()',
        'self._control.send(Subject.MEMORY, {"error": f"{type(error).__name__}: {error}"})',
        ONE_SIDED,
    ),
    mutate("one_sided", "message.wait()", "pass", ONE_SIDED),
    # The threads, and the process groups.
    mutate("lanes", "if not self._ended.wait(self._timeout_s):", "if False:", LANES),
    mutate("lanes", "pending.wait()", "pass", LANES),
    mutate("distributed", "work.wait()", "pass", DISTRIBUTED),
    mutate(
        "distributed",
        "batched(operation, [tensor], groups.partner, group).wait()",
        "batched(operation, [tensor], groups.partner, group)",
        DISTRIBUTED,
    ),
    # Lengths in front.
    mutate("headed", "part.wait()", "pass", HEADED),
    # Messages between stages.
    mutate(
        "executor",
        'arrived = self._pass("did not pass", operand, lambda: self._messages.wait(operand))',
        "arrived = ()",
        EXECUTOR,
    ),
    mutate("edges", "works.wait()", "pass", EDGES),
    mutate("edges", "sent.wait()", "pass", EDGES),
    mutate("collectives", "passing.works.wait()", "pass", COLLECTIVES),
    mutate("collectives", "sent.wait()", "pass", COLLECTIVES),
    mutate("collectives", "passing.later.wait()", "pass", COLLECTIVES),
    mutate(
        "collectives",
        "self._reduce(message, made, taker, Kind.SHARD_BACKWARD).wait()",
        "self._reduce(message, made, taker, Kind.SHARD_BACKWARD)",
        COLLECTIVES,
    ),
    mutate("collectives", "return self._by(message).wait(message)", "return ()", COLLECTIVES),
)


def waiting_lines() -> Iterator[tuple[str, str, int]]:
    """Every line of the modules that waits: its file, its text, and the how many-th of that text it is."""
    for file in MODULES:
        seen: dict[str, int] = {}
        for text in (ROOT / file).read_text().splitlines():
            line = text.strip()
            # Of a definition only its body waits; what a comment or docstring says waits for nobody.
            if WAITING.search(line.split("  #")[0]) and not DEFINITION.match(line) and "`" not in line:
                yield file, line, seen.get(line, 0)
                seen[line] = seen.get(line, 0) + 1


# -- running them
# ----------------------------------------------------------------------------------------------------------------------


class Mutated(importlib.abc.MetaPathFinder):
    """Imports one module from a mutated copy of its source."""

    def __init__(self, mutation: Mutation) -> None:
        self._module = mutation.file.removesuffix(".py").replace("/", ".")
        self._source = mutation.apply()

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        file = str(ROOT / (name.replace(".", "/") + ".py"))
        source = self._source

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                return compile(source, file, "exec")

        return importlib.util.spec_from_file_location(name, file, loader=Loader(name, file))


def run_tests(mutation: Mutation | None, tests: tuple[str, ...]) -> int | None:
    """pytest's exit code in a fork of this process, or None where it had to be ended."""
    child = os.fork()
    if child == 0:
        import pytest

        os.setpgid(0, 0)
        if mutation is not None:
            sys.meta_path.insert(0, Mutated(mutation))
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *tests])))
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run_table(table: Sequence[Mutation], path: str) -> None:
    """Write, by a mutation's place in the table, the exit code of its tests; under "" that of all without any."""
    # Once, before the forks: most of the time a test process takes. Nothing of ours may be imported here, or it could
    # not be replaced.
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    assert not [name for name in sys.modules if name.split(".")[0] == "bpipe"]
    here = {str(place): mutation for place, mutation in enumerate(table) if LATE not in mutation.tests}
    every = tuple(sorted({test for mutation in here.values() for test in mutation.tests}))
    codes = {
        "": run_tests(None, every),
        **{place: run_tests(mutation, mutation.tests) for place, mutation in here.items()},
    }
    Path(path).write_text(json.dumps(codes))


if __name__ == "__main__":
    run_table(TABLE, sys.argv[1])
