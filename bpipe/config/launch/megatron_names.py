"""Know every flag of the trainer by its name. In: a launch's flags. Out: what is wrong with one that was mistyped.

The names stand in `megatron_flags.txt`, one per line: those of the Megatron that this package installs, and ours; a test
holds them to its parser. A script may have flags of its own, and a newer Megatron others: what is near no known name is
passed. Knows no flag's meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources

from bpipe.names import nearest

# How near a known name a typo is. What a newer Megatron or a script adds to a known name is further away.
_TYPO, _TYPO_OF_OURS = 0.87, 0.66
MOST_OWN_FLAGS = 100


@cache
def names() -> frozenset[str]:
    return frozenset(
        resources.files("bpipe.config.launch").joinpath("megatron_flags.txt").read_text(encoding="utf-8").split()
    )


def refuse_mistyped(flags: Sequence[str]) -> None:
    """Raise ValueError for a mistyped flag: the trainer would not start with it."""
    for message in mistyped(flags):
        raise ValueError(message)


def without_own(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags that Megatron has, with their values, and the names of those that only a script has."""
    kept: list[str] = []
    own: list[str] = []
    is_known = True
    for word in flags:
        if word.startswith("--"):
            name = word.partition("=")[0]
            is_known = name in names()
            own += [] if is_known else [name]
        kept += [word] if is_known else []
    return kept, own


def mistyped(flags: Sequence[str]) -> list[str]:
    """Return a message for each flag that nobody knows and that is near a known one."""
    known = names()
    unknown = [flag for flag in flags if flag not in known]
    if len(unknown) > MOST_OWN_FLAGS:
        raise ValueError(
            f"{len(unknown)} flags that Megatron does not have: a script may have at most {MOST_OWN_FLAGS} of its own"
        )
    messages = []
    for flag in unknown:
        ours = flag.startswith("--bpipe-")
        near = [one for one in known if one.startswith("--bpipe")] if ours else sorted(known)
        meant = nearest(flag, near, _TYPO_OF_OURS if ours else _TYPO)
        if meant or ours:
            messages.append(f"unknown flag {flag[:60]}{meant and ','}{meant or ': leave it out'}")
    return messages
