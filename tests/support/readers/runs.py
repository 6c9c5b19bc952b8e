"""What `bpipe compare` reads: iterations of a report, Megatron's log. In: text. Out: whether it was taken, or Wrong.

The judge reads a file once more by hand: what is taken as equal to itself must hold numbers, and as many as the command
says.
"""

import json
import random
import re
from pathlib import Path

from tests.support.readers.outcome import Wrong, judge_numbers, outcome

LOSSES = (5.5, 4.25, 0.1, float("nan"))
LINE = (
    " [2026-01-01 00:00:00.0] iteration {:8d}/       4 | consumed samples: 32 | elapsed time per iteration (ms): 10.5 |"
    " learning rate: 6.000000E-04 | lm loss: {:.6E} | loss scale: 1.0 | grad norm: 8.632 | number of nan iterations:  "
    " 0 |\n"
)


def report_texts(_: Path) -> list[str]:
    lines = [
        {"iteration": number, "lm loss": loss.hex(), "grad_norm": (0.3).hex(), "skipped": 0, "elapsed_s": 0.5}
        for number, loss in enumerate(LOSSES, start=1)
    ]
    return [
        "".join(json.dumps(line) + "\n" for line in lines),
        "".join(json.dumps({**line, "grad_norm": None}) + "\n" for line in lines),
    ]


def log_texts(_: Path) -> list[str]:
    return [
        "> building the model\n" + "".join(LINE.format(number, loss) for number, loss in enumerate(LOSSES, start=1))
    ]


def judge_report(path: Path, text: str, _: random.Random) -> bool:
    file = path.with_suffix(".jsonl")
    numbers = _compared(file, text)
    if numbers is None:
        return False
    for line in text.splitlines():
        found = json.loads(line)
        for name, value in found.items():
            wanted = (
                int
                if name in ("iteration", "skipped")
                else (int, float, type(None))
                if name == "elapsed_s"
                else (str, type(None))
            )
            if (
                isinstance(value, bool)
                or not isinstance(value, wanted)
                or (isinstance(value, str) and not re.search("0x|nan|inf", value))
            ):
                raise Wrong(f"{name} {value!r:.60} was accepted")
    if numbers != len({json.loads(line)["iteration"] for line in text.splitlines()}):
        raise Wrong(f"{numbers} iterations are said to be in it")
    return True


def judge_log(path: Path, text: str, _: random.Random) -> bool:
    numbers = _compared(path.with_suffix(".log"), text)
    if numbers is not None and numbers > text.count("iteration "):
        raise Wrong(f"{numbers} iterations are said to be in it")
    return numbers is not None


def _compared(file: Path, text: str) -> int | None:
    """How many iterations a run has that is laid beside itself: nothing can differ."""
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome(["compare", str(file), str(file), "--format", "json"], file)
    shown = outcome(["compare", str(file), str(file)], file)
    if (printed is None) != (shown is None):
        raise Wrong("text and JSON do not agree on whether it is a run")
    if printed is None:
        return None
    found = json.loads(printed)
    judge_numbers("", {name: found[name] for name in ("iterations", "in_one_only", "iteration_s_ratio")})
    if not found["equal"] or found["in_one_only"]:
        raise Wrong("a run differs from itself")
    return int(found["iterations"])
