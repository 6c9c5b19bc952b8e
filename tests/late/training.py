"""Launch Megatron's trainer on late devices, one process per rank, and on the CPU for the expected results.

Each case has the draw of its devices; the results are those of tests/gloo/conftest.py.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.gloo.conftest import PARENTS, ROOT, Outcome, Parents, finish, start
from tests.gloo.flags import ITERATIONS, TINY
from tests.gloo.ports import free_ports
from tests.late.devices import Draw

LATE_PARENTS = Parents("tests.late.stand_in")


def close_parents() -> None:
    LATE_PARENTS.close()
    PARENTS.close()


@dataclass(frozen=True)
class LateCase:
    """One training run. `flags` come after those of the tiny model and override them. `memory`: print the allocator's
    counters."""

    name: str
    flags: str = ""
    draw: Draw = field(default_factory=lambda: Draw(1))
    memory: bool = False


def train(
    device: str,
    world: int,
    cases: Sequence[LateCase],
    folder: Path,
    timeout_s: float = 240.0,
    environment: dict[str, str] | None = None,
) -> Outcome:
    """Run all cases on `world` ranks: one pipeline of as many stages, unless a case says otherwise."""
    common = f"{TINY} {ITERATIONS} --num-layers {world} --pipeline-model-parallel-size {world}"
    described = [
        {
            "name": case.name,
            "arguments": shlex.split(f"{common} {case.flags}"),
            "draw": asdict(case.draw),
            "memory": case.memory,
        }
        for case in cases
    ]
    (folder / "cases.json").write_text(json.dumps(described))
    script = [str(ROOT / "tests/late/worker.py"), device, str(folder / "cases.json"), str(folder)]
    parents = LATE_PARENTS if device == "late" else PARENTS
    return finish(start(world, script, folder, free_ports(1)[0], environment, parents=parents), folder, timeout_s)
