"""The lines of the runtime and its transports that wait, what each is without its wait, and how to import a module
from a copy that lacks one.

In: nothing. Out: the table. The checkout is never touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[2]
TRANSPORTS = ("one_sided", "lanes", "control", "distributed", "edges", "collectives")


@dataclass(frozen=True)
class Mutation:
    """The `nth` line of a file that reads `line`, and what stands there instead."""

    file: str
    line: str
    instead: str
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


def mutate(file: str, line: str, instead: str, nth: int = 0) -> Mutation:
    folder = "transport" if file in TRANSPORTS else "runtime"
    return Mutation(f"bpipe/{folder}/{file}.py", line, instead, nth)


ON_STREAM = "with current(self.{}) if self._beside else contextlib.nullcontext():"

TABLE = (
    # [1] and [5]: transfers behind the computation. Seen only where a device runs ahead of its host.
    mutate(
        "streams",
        "with self._behind_compute(self._outbound if self._beside else None):",
        ON_STREAM.format("_outbound"),
    ),
    mutate(
        "streams",
        "with self._behind_compute(self._inbound if self._beside else None):",
        ON_STREAM.format("_inbound"),
    ),
    mutate("streams", "stream.wait_event(_here().record_event())", "pass"),
    mutate("streams", "self._stream.wait_event(_here().record_event())", "pass"),
    mutate("streams", "_here().wait_event(self.end)", "pass"),
    mutate("streams", "pending.wait()", "pass"),
    # [3] and [7]: memory and backwards behind the transfers.
    mutate(
        "evictor",
        "self._finish(activations, ActivationsState.AWAY)  # [3]",
        "activations.move(ActivationsState.AWAY, activations.action)",
    ),
    mutate("evictor", "self._finish(activations, ActivationsState.HERE)  # [7]", "pass"),
    mutate("evictor", "self._wait(activations.pending, activations.action, activations.state.value)", "pass"),
    mutate("evictor", 'self._wait(announcement, forward, "telling its sizes")', "pass"),
    # Synchronous transfers.
    mutate("evictor", "self.finish_evictions()", "pass"),
    mutate("evictor", "self._finish(activations, ActivationsState.HERE)", "pass"),
    mutate("engine", "self._partners.finish_all()", "pass"),
    # Where the engine lets the two roles wait.
    mutate("engine", "self._partners.finish_evictions()", "pass"),
    mutate("engine", "self._partners.finish_evictions()", "pass", nth=1),
    mutate("engine", "self._partners.finish_load(computation)", "pass"),
    mutate("engine", "pending.wait()", "pass"),
    # [8]: host buffers.
    mutate("acceptor", "self._settle(buffer)  # [8]", "pass"),
    mutate("acceptor", "self._settle(buffer)", "pass"),
    mutate("acceptor", "self._settle(buffer)", "pass", nth=1),
    mutate("acceptor", "self._wait(pending, action, buffer.state.value)", "pass"),
    mutate(
        "one_sided",
        "self._last[host_buffer] = lane.run(copy, after=[] if last is None else [last])  # [8]",
        "self._last[host_buffer] = lane.run(copy)",
    ),
    mutate("one_sided", "pending.wait()", "pass"),
    # Messages between the two ends.
    mutate(
        "one_sided",
        'self._control.send(Subject.MEMORY, {"error": f"{type(error).__name__}: {error}"}).wait()',
        'self._control.send(Subject.MEMORY, {"error": f"{type(error).__name__}: {error}"})',
    ),
    mutate("one_sided", "message.wait()", "pass"),
    # The threads, and the process groups.
    mutate("lanes", "if not self._ended.wait(self._timeout_s):", "if False:"),
    mutate("lanes", "pending.wait()", "pass"),
    mutate("control", "work.wait()", "pass"),
    mutate(
        "distributed",
        "batched(operation, [tensor], groups.partner, group).wait()",
        "batched(operation, [tensor], groups.partner, group)",
    ),
    # Messages between stages.
    mutate(
        "executor",
        'arrived = self._pass("did not pass", operand, lambda: self._messages.wait(operand))',
        "arrived = ()",
    ),
    mutate("edges", "works.wait()", "pass"),
    mutate("edges", "sent.wait()", "pass"),
    mutate("collectives", "passing.works.wait()", "pass"),
    mutate("collectives", "sent.wait()", "pass"),
    mutate("collectives", "passing.later.wait()", "pass"),
    mutate(
        "collectives",
        "self._reduce(message, made, taker, Kind.SHARD_BACKWARD).wait()",
        "self._reduce(message, made, taker, Kind.SHARD_BACKWARD)",
    ),
    mutate("collectives", "return self._carrier(message).wait(message)", "return ()"),
)


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
