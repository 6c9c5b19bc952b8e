"""Know every flag of the trainer by its name. In: a launch's flags. Out: those that nobody knows, and a warning.

Megatron's names are in `megatron_flags.txt`, one per line: those of the version that this package installs, to whose
parser a test holds them. Ours are those of the table. Knows no flag's meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources

from bpipe.config.flags.trainer import TRAINER
from bpipe.names import nearest

# How near a known name a typo is. What a newer Megatron or a script adds to a known name is further away.
_TYPO, _TYPO_OF_OURS = 0.87, 0.66
_MOST_FLAGS = 20


@cache
def names() -> frozenset[str]:
    of_megatron = resources.files("bpipe.config.launch").joinpath("megatron_flags.txt").read_text(encoding="utf-8")
    return frozenset((*of_megatron.split(), *(flag.in_launch for group in TRAINER for flag in group.flags)))


def unknown_flags(flags: Sequence[str]) -> list[str]:
    """Return the names of flags that neither Megatron nor this project has. Raises ValueError for one like ours."""
    unknown = [flag for flag in dict.fromkeys(word.partition("=")[0] for word in flags) if _is_unknown(flag)]
    for flag in unknown:
        if flag.startswith("--bpipe-"):
            meant = nearest(flag, [name for name in names() if name.startswith("--bpipe")], _TYPO_OF_OURS)
            raise ValueError(f"unknown flag {flag[:60]}{meant and ','}{meant or ': leave it out'}")
    return unknown


def _is_unknown(word: str) -> bool:
    return word.startswith("--") and word not in names()


def unknown_note(unknown: Sequence[str]) -> str:
    """Return the warning of flags that may be the training script's own."""
    shown = [f"{flag[:60]}{_meant(flag)}" for flag in unknown[:_MOST_FLAGS]]
    more = [f"{len(unknown) - _MOST_FLAGS} more"] if unknown[_MOST_FLAGS:] else []
    them = "them" if unknown[1:] else "it"
    return f"Megatron's parser does not know {', '.join([*shown, *more])}; ignore this if your script adds {them}"


def _meant(flag: str) -> str:
    meant = nearest(flag, sorted(names()), _TYPO).strip()
    return f" ({meant})" if meant else ""


def without(unknown: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the flags of a launch but for unknown ones and their values."""
    kept: list[str] = []
    is_known = True
    for word in flags:
        if word.startswith("--"):
            is_known = word.partition("=")[0] not in unknown
        kept += [word] if is_known else []
    return kept
