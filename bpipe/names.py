"""Say which known name an unknown one was probably meant to be.

In: a name and the known ones. Out: a phrase. Knows none of them itself.
"""

from __future__ import annotations

from collections.abc import Iterable


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that is none: `unknown model 'gpt3-13', did you mean 'gpt3-13b'? Choose from
    gpt3-13b, ...`."""
    known = tuple(known)
    meant = nearest(name, known)
    return f"unknown {what} {name!r}{meant and ','}{meant or ':'} {'C' if meant else 'c'}hoose from {', '.join(known)}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.66) -> str:
    """Return ` did you mean 'x'?`, or nothing where no name is near: `--html` is not near `--help`, though two of
    its letters are."""
    # A few milliseconds that only a mistake costs.
    from difflib import get_close_matches

    lower, wrong = {one.lower().lstrip("-"): one for one in known}, name.lower().lstrip("-")[:100]
    found = get_close_matches(wrong, lower, 1, cutoff)
    # Of three letters two are soon the same.
    meant = bool(found) and (len(wrong) > 3 or found[0].startswith(wrong))
    return f" did you mean {lower[found[0]]!r}?" if meant else ""
