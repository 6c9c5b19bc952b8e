"""Suggestions for unknown names."""

from collections.abc import Iterable


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name: `unknown model 'gpt3-13', did you mean 'gpt3-13b'? Choose from ...`."""
    known = tuple(known)
    hint = nearest(name, known)
    return f"unknown {what} {name!r}{hint and ','}{hint or ':'} {'C' if hint else 'c'}hoose from {', '.join(known)}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.66) -> str:
    """Return ` did you mean 'x'?`, or nothing if no name is near, as `--help` is not near `--html`."""
    # Imported here because it takes milliseconds that only a mistake should cost.
    from difflib import get_close_matches

    lower, wrong = {candidate.lower().lstrip("-"): candidate for candidate in known}, name.lower().lstrip("-")[:100]
    matches = get_close_matches(wrong, lower, 1, cutoff)
    # Two of three letters are easily equal.
    is_near = bool(matches) and (len(wrong) > 3 or matches[0].startswith(wrong))
    return f" did you mean {lower[matches[0]]!r}?" if is_near else ""
