"""Keys of a line of a file, taken from the class that holds it.

A field of type `Annotated[int, Rule(...)]`, or of such a type or None, is a key of the same name. A key without a
default is required; of the others null and absence mean the default. A field without a rule is no key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from bpipe.values import LARGEST, LARGEST_BYTES, a_flag, a_list, a_number, a_text, a_whole, an_object, printable


@dataclass(frozen=True, slots=True)
class Rule:
    """How a value is read and written: `read(value, name)` raises ValueError; `write` returns the JSON form."""

    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a line, or one column of its rows."""

    name: str
    rule: Rule
    needed: bool
    default: Any


@cache
def keys_of(kind: type) -> tuple[Key, ...]:
    """Return the keys in the order of the class."""
    rules = {name: _rule(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    defaults = _defaults(kind)
    return tuple(
        Key(name, rule, name not in defaults, defaults.get(name)) for name, rule in rules.items() if rule is not None
    )


def _defaults(kind: type) -> dict[str, Any]:
    if not dataclasses.is_dataclass(kind):
        return dict(kind._field_defaults)  # type: ignore[attr-defined]
    defaults = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


def _rule(hint: Any) -> Rule | None:
    """Return the rule in a type, or in a part of it."""
    own = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Rule)), None)
    return own or next((rule for rule in map(_rule, get_args(hint)) if rule is not None), None)


def values_of(kind: type, value: object, name: str, prefix: str = "") -> dict[str, Any]:
    """Return the arguments of a `kind` that an object of a file has. Unknown keys are ignored: later versions add some."""
    return read_keys(keys_of(kind), an_object(value, name), prefix)


def read_keys(keys: Iterable[Key], entries: Mapping[str, object], prefix: str) -> dict[str, Any]:
    """Return the values of these keys by their names, without those that are absent or null."""
    values = {}
    for key in keys:
        value = entries.get(key.name)
        if value is not None:
            values[key.name] = key.rule.read(value, prefix + key.name)
        elif key.needed:
            raise ValueError(f"{key.name!r} is missing")
    return values


def written(value: Any) -> dict[str, Any]:
    """Return a line's keys and values as JSON has them."""
    kind: type = type(value)
    fields = ((key, getattr(value, key.name)) for key in keys_of(kind))
    return {key.name: None if field is None else key.rule.write(field) for key, field in fields}


# Rules for what files hold.


def whole(least: int = 0, most: int = LARGEST_BYTES) -> Rule:
    return Rule(lambda value, name: a_whole(value, name, least, most))


def number(least: float = 0, most: float = LARGEST) -> Rule:
    return Rule(lambda value, name: a_number(value, name, least, most))


def each(rule: Rule, element: str | None = None) -> Rule:
    """Read a list as a tuple. `element`: how an error calls an element, by default like the list."""
    return Rule(
        lambda values, name: tuple(rule.read(value, element or name) for value in a_list(values, name)),
        lambda values: [rule.write(value) for value in values],
    )


def line(kind: Callable[..., Any], name: str) -> Rule:
    """Read an object with keys of its own as a `kind`."""
    return Rule(lambda value, _: kind(**values_of(kind, value, name)), written)  # type: ignore[arg-type]


def by_name(rule: Rule, element: str) -> Rule:
    """Read an object whose keys are names. `element`: how an error calls a value, with `{key}` for its key."""

    def read(values: object, name: str) -> dict[str, Any]:
        pairs = an_object(values, name).items()
        return {printable(key): rule.read(value, element.format(key=key)) for key, value in pairs}

    return Rule(read, dict)


Text = Annotated[str, Rule(a_text)]
Flag = Annotated[bool, Rule(a_flag)]
