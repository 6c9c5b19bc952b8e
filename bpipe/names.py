"""Say which known name an unknown one was probably meant to be. In: a name and the known ones. Out: a phrase. Knows none of them itself."""

from __future__ import annotations

from collections.abc import Iterable


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is none: `unknown model 'gpt3-13', did you mean 'gpt3-13b'? Choose from gpt3-13b, ...`."""
    known = tuple(known)
    meant = nearest(name, known)
    return f"unknown {what} {name!r}{meant and ','}{meant or ':'} {'C' if meant else 'c'}hoose from {', '.join(known)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """` did you mean 'x'?`, or nothing where no name is near."""
    # A few milliseconds that only a mistake costs.
    from difflib import get_close_matches

    lower = {one.lower(): one for one in known}
    found = get_close_matches(name.lower(), lower, 1)
    return f" did you mean {lower[found[0]]!r}?" if found else ""
