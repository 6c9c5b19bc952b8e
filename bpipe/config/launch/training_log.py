"""Read what a Megatron training prints of its arguments.

In: its log. Out: the words of a launch, and the tokenizer's vocabulary.

The words are those that `megatron_command` reads or refuses: of all others a log has defaults, too, so it does not tell
what was said. Knows no iteration: `bpipe.record.compare` reads them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import NamedTuple

from bpipe.config.flags.launches import READ
from bpipe.config.launch.other_flags import REFUSED
from bpipe.values import LARGEST

_BEGIN, _END = re.compile(r"(?<!-)-{8,} arguments -{8}"), re.compile(r"(?<!-)-{8,} end of arguments -{8}")
# A rank's prefix may stand before it; a long name has no dots.
_ARGUMENT = re.compile(r"(?:^|\s)([a-z]\w*) (?:\.+ | )(\S.*)$")
_PADDED = re.compile(r"padded vocab \(size: (\d{1,12})\) with \d+ dummy tokens")
# What Megatron calls otherwise than its flag.
_RENAMED = {"fp8": "--fp8-format", "fp4": "--fp4-format"}
_NOTHING = ("None", "False", "[]")
# Their defaults stand there even where nothing is recomputed.
_OF_RECOMPUTATION = ("--recompute-modules", "--recompute-method", "--recompute-num-layers")


class LoggedLaunch(NamedTuple):
    """Launch read from a log.

    `words` are empty where the log has no arguments; `vocabulary` is None where it says none.
    """

    words: tuple[str, ...]
    vocabulary: int | None


# Their lists are one value.
_PATTERNS = ("--moe-layer-freq", "--window-attn-skip-freq")


def read_log(text: str) -> LoggedLaunch:
    """Read a training log. Raises ValueError for the arguments of several trainings."""
    blocks, vocabulary = [], None
    block: dict[str, str] | None = None
    for line in text.splitlines():
        if _BEGIN.search(line):
            block = {}
        elif block is not None and _END.search(line):
            blocks.append(_words(block))
            block = None
        elif block is not None and (match := _ARGUMENT.search(line)):
            block[match[1]] = match[2].strip()
        elif match := _PADDED.search(line):
            vocabulary = min(int(match[1]), LARGEST)
    if any(one != blocks[0] for one in blocks):
        raise ValueError("it has the arguments of several training runs, which differ: give the part of one run")
    return LoggedLaunch(blocks[0] if blocks else (), vocabulary)


def _words(block: dict[str, str]) -> tuple[str, ...]:
    words: list[str] = []
    recomputes = block.get("recompute_granularity", "None") != "None"
    for name, value in block.items():
        flag = _RENAMED.get(name, f"--{name.replace('_', '-')}")
        if value in _NOTHING or flag not in (*READ, *REFUSED) or (flag in _OF_RECOMPUTATION and not recomputes):
            continue
        words += (
            [flag]
            if (flag in READ and READ[flag].is_switch) or value == "True"
            else [flag, *([value] if flag in _PATTERNS else _values(value))]
        )
    # Without chunks Megatron switches the overlap off itself.
    if block.get("overlap_p2p_comm") == "False" and block.get("virtual_pipeline_model_parallel_size", "None") != "None":
        words.append("--no-overlap-p2p-communication")
    return tuple(words)


def _values(text: str) -> Sequence[str]:
    """Of a list its elements; of an enumeration's `AttnBackend.flash` its name."""
    if text.startswith("["):
        try:
            return [str(one) for one in ast.literal_eval(text)]
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return [text]
    return [re.sub(r"^[A-Z]\w*\.", "", text)]
