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
    assert all(re.search("line [0-9]+", reason) for reason in reasons), f"{script}\n{reasons}"
    calls = calls_of(script, environment, folder)
    words = list(launch.words)
    while words[0] in ("srun", "exec"):
        words = words[1:]
    # For a word that is unknown there may be any words, or none.
    known = "".join(".*" if launch.unknown(word) else re.escape(f"\1{word}") for word in words)
    same = all(re.fullmatch(known, "".join(f"\1{word}" for word in call), re.DOTALL) for call in calls)
    assert same, f"{script}\nread {words}\nbash {calls}"
    return "unknown" if reasons else "equal" if calls else "not run"


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


@pytest.mark.parametrize(
    "before",
    [
        "A=1; for i in 1 2; do ((A)); A='N=5'; done",
        "A=echo; for i in 1 2; do $A; A='export N=5'; done",
        "A=a; for i in 1 2; do eval \"$A\"; A='N=5'; done",
        "for A in 'N=5'; do ((A)); done",
        "A=1; if true; then A='N=5'; fi; B=\"$A \"; ((B))",
        "A=2; if true; then A+=' + (N=5)'; fi; ((A))",
        "time -p N=5",
        "L[1 + 0]=q",
        "A=1; L[$A]=q",
        "B='N=5'; L[B]=q",
        'if true; then K=(p q); fi; K=z; L=("${K[@]}")',
        'K=(p q); if false; then unset K; fi; K=z; L=("${K[@]}")',
        "L=(x)0",
        "L=(x)\\\nN=5",
        'if false; then L+=(b); fi; L=("${L[@]}"c)',
        'if false; then L+=(b); fi; A="${L[*]}"; L=(${A}c)',
        'L=(x); if true; then L+=(b); fi; A="5${L-x}"; L=($A)',
        "A='p q'; if true; then A+=' r'; fi; L=(\"$A\")",
        "A=a; B=' b'; for i in 1 2; do A=\"$A$B\"; B=c; done; L=($A)",
    ],
)
def test_a_way_to_change_a_variable_that_is_easily_overlooked(before: str, tmp_path: Path) -> None:
    launch = 'torchrun a.py --num-layers $N "${L[@]}"'
    assert outcome(f"N=8; L=(x y)\n{before}\n{launch}\n", stubs(tmp_path / "bin"), tmp_path) != "equal"


def test_no_line_that_may_change_a_variable_is_passed_over(tmp_path: Path) -> None:
    """An attacker's: `((N*=2))`, `let`, `A[0]=`, `declare -i`, `VAR=x command`, `$'...'`, division, splitting; each
    before one launch."""
    environment, found = stubs(tmp_path / "bin"), Counter[str]()
    launch = 'torchrun a.py --num-layers $N --seq-length $M "$A" $B "${L[@]}" "${U:-8}"'
    for row in (*ODD, *CONDITIONAL):
        line = re.sub("§.", lambda found: {"s": "N", "w": "'p q'", "t": "r"}[found[0][1]], row)
        found[outcome(f"A=a B='b  c' N=8 M=3\nL=(x 'y z')\n{line}\n{launch}\n", environment, tmp_path)] += 1
    assert found["refused"] + found["unknown"] > found["equal"] > 20, found
