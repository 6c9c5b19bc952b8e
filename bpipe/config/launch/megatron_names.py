"""Find flags of a launch that neither Megatron nor this project has.

Megatron's names are in `megatron_flags.txt`, one per line: those of the version that this package installs, to whose
parser a test holds them. Ours are those of the table.
"""

from collections.abc import Sequence
from functools import cache
from importlib import resources

from bpipe.config.flags.trainer import TRAINER
from bpipe.names import nearest

# Similarity from which a flag is taken for a mistyped one. Additions of scripts and of newer Megatrons are less similar.
_TYPO, _TYPO_OF_OURS = 0.87, 0.66
_MOST_FLAGS = 20


@cache
def names() -> frozenset[str]:
    of_megatron = resources.files("bpipe.config.launch").joinpath("megatron_flags.txt").read_text(encoding="utf-8")
    return frozenset((*of_megatron.split(), *(flag.in_launch for group in TRAINER for flag in group.flags)))


def unknown_flags(flags: Sequence[str]) -> list[str]:
    """Return the names of flags that neither Megatron nor this project has. Raises ValueError for one like ours."""
    flag_names = dict.fromkeys(word.partition("=")[0] for word in flags if word.startswith("--"))
    unknown = [flag for flag in flag_names if flag not in names()]
    for flag in unknown:
        if flag.startswith("--bpipe-"):
            meant = nearest(flag, [name for name in names() if name.startswith("--bpipe")], _TYPO_OF_OURS)
            raise ValueError(f"unknown flag {flag[:60]}{meant and ','}{meant or ': leave it out'}")
    return unknown


def unknown_note(unknown: Sequence[str]) -> str:
    """Return the warning of flags that may be the training script's own."""
    shown = []
    for flag in unknown[:_MOST_FLAGS]:
        meant = nearest(flag, sorted(names()), _TYPO).strip()
        shown.append(f"{flag[:60]} ({meant})" if meant else flag[:60])
    shown += [f"{len(unknown) - _MOST_FLAGS} more"] if unknown[_MOST_FLAGS:] else []
    them = "them" if unknown[1:] else "it"
    return f"Megatron's parser does not know {', '.join(shown)}; ignore this if your script adds {them}"


def without(unknown: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the flags of a launch without unknown ones and their values."""
    kept: list[str] = []
    is_known = True
    for word in flags:
        if word.startswith("--"):
            is_known = word.partition("=")[0] not in unknown
        kept += [word] if is_known else []
    return kept
