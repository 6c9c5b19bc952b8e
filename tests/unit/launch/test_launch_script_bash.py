"""Drawn launch scripts, read and run: what is read is what bash hands to the training, or it is refused.

Nothing differs silently.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from bpipe.launch.launch_script import Launch, read_launch
from tests.support.bash_scripts import BASH, CONDITIONAL, ODD, Script, calls_of, stubs

pytestmark = pytest.mark.skipif(not BASH.exists(), reason="bash is the oracle")


def read(script: str) -> Launch | None:
    """None where it is refused, which has to name the line."""
    try:
        return read_launch(script)
    except ValueError as error:
        message = str(error)
    assert re.match("line [0-9]+: |it starts [0-9]+ training runs, on lines|no command with a script", message), (
        f"{script}\n{message}"
    )
    return None


def outcome(script: str, environment: dict[str, str], folder: Path) -> str:
    """`equal`, `refused`, `unknown` or `not run`; a silent difference is a failure."""
    launch = read(script)
    if launch is None:
        return "refused"
    reasons = [reason for reason in map(launch.unknown, launch.words) if reason is not None]
    if reasons:
        assert all(re.search("line [0-9]+", reason) for reason in reasons), f"{script}\n{reasons}"
        return "unknown"
    calls = calls_of(script, environment, folder)
    words = list(launch.words)
    while words[0] in ("srun", "exec"):
        words = words[1:]
    assert all(call == words for call in calls), f"{script}\nread {words}\nbash {calls}"
    return "equal" if calls else "not run"


def outcomes(number: int, seed: int, folder: Path) -> Counter[str]:
    environment, found = stubs(folder / "bin"), Counter[str]()
    for count in range(number):
        rng = random.Random(f"{seed} {count}")
        found[outcome(Script(rng, rng.choice((0.02, 0.2))).draw(), environment, folder)] += 1
    return found


def test_no_drawn_script_is_read_otherwise_than_bash_runs_it(tmp_path: Path) -> None:
    found = outcomes(500, 1, tmp_path)
    assert found["equal"] > 150, f"many of them are read: {found}"
    # Behind `exit`, or after an error that ends bash.
    assert found["not run"] < 15, found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 6))
def test_none_of_thousands_is(seed: int, tmp_path: Path) -> None:
    assert outcomes(3000, seed, tmp_path)["equal"] > 900


def test_no_line_that_may_change_a_variable_is_passed_over(tmp_path: Path) -> None:
    """An attacker's: `((N*=2))`, `let`, `A[0]=`, `declare -i`, `VAR=x command`, `$'...'`, division, splitting; each
    before one launch."""
    environment, found = stubs(tmp_path / "bin"), Counter[str]()
    launch = 'torchrun a.py --num-layers $N --seq-length $M "$A" $B "${L[@]}" "${U:-8}"'
    for row in (*ODD, *CONDITIONAL):
        line = re.sub("§.", lambda found: {"s": "N", "w": "'p q'"}[found[0][1]], row)
        found[outcome(f"A=a B='b  c' N=8 M=3\nL=(x 'y z')\n{line}\n{launch}\n", environment, tmp_path)] += 1
    assert found["refused"] + found["unknown"] > found["equal"] > 20, found
