"""Have the installed Megatron judge a launch.

Megatron's own parser and validation, and the trainer's refusals, run in a process of their own
(`megatron.scheduling.start.validation`), because importing Megatron takes seconds and torch.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import util

from bpipe.extras import install_command

PROGRAM = "megatron.scheduling.start.validation"
_TIMEOUT_S = 120.0
# Flags alone without these are only a part of a launch.
_SIZES = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
# Megatron requires these, and no prediction depends on them: flags alone need not have them.
_ASSUMED = {"--micro-batch-size": "1", "--max-position-embeddings": "10000000"}
_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")


@dataclass(frozen=True, slots=True)
class Judgement:
    """Judgement of a launch by the installed Megatron.

    Attributes:
        by: A line on who judged, or why Megatron did not.
        refused: Why Megatron would end the launch at its start, in its words.
        trainer: Why this project's trainer would, a line per reason.
        unknown: Flags that Megatron's parser does not have; None if it was not asked.
    """

    by: str
    refused: str | None = None
    trainer: tuple[str, ...] = ()
    unknown: tuple[str, ...] | None = None


def is_installed() -> bool:
    """Whether Megatron's trainer can be imported here."""
    return all(util.find_spec(name) is not None for name in ("torch", "megatron.core", "megatron.training"))


@lru_cache(maxsize=4)
def judge(flags: tuple[str, ...], devices: tuple[int, int] | None, is_whole: bool) -> Judgement:
    """Have Megatron judge a launch.

    Args:
        flags: the flags of its script.
        devices: its nodes and the devices of each; None if nobody knows.
        is_whole: whether these are all flags of a launch: flags alone may be a part.

    Returns:
        Why Megatron, and this project's trainer, would refuse the launch.
    """
    if not is_installed():
        lets = f"{install_command('megatron')} lets its own validation judge"
        return Judgement(f"judged without Megatron: it is not installed here; {lets}")
    flag_names = {word.partition("=")[0] for word in flags}
    if not is_whole:
        missing = [
            name for name in _SIZES if name not in flag_names and not (name == _SIZES[0] and flag_names & {*_PATTERNS})
        ]
        if missing:
            return Judgement(f"judged without Megatron: flags without {', '.join(missing)} are no whole launch")
        flags += tuple(word for name, value in _ASSUMED.items() if name not in flag_names for word in (name, value))
    print("asking Megatron's own parser and validation, about five seconds", file=sys.stderr, flush=True)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", PROGRAM],
            input=json.dumps([[flags, devices]]),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return Judgement(f"judged without Megatron: it took longer than {_TIMEOUT_S:.0f} s to answer")
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["it ended without a reason"])[-1]
        return Judgement(f"judged without Megatron, which cannot be used here: {reason}")
    answer = json.loads(ended.stdout.splitlines()[-1])
    (judgement,) = answer["judgements"]
    by = f"judged by the parser and validation of megatron-core {answer['version']}"
    if judgement["unasked"] is not None:
        by = f"judged by the parser of megatron-core {answer['version']} only: {judgement['unasked']}"
    return Judgement(by, judgement["megatron"], tuple(judgement["trainer"]), tuple(judgement["unknown"]))
