"""Take the keys of a line from the class that stands for it.

In: a class whose fields say how they are read. Out: its keys, and values.

A field of type `Annotated[int, Rule(...)]`, or of such a type or None, is a key of the same name. One without a default
is needed; of the others null and absence mean the default. A field without a rule is no key. Knows no file and no
class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from bpipe.values import LARGEST, LARGEST_BYTES, a_flag, a_list, a_number, a_text, a_whole, an_object, printable


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of a value: `read(value, name)` returns its meaning or raises ValueError; `write` returns its JSON form."""

    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any] = _as_it_is


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
    plain = {
        field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING
    }
    made = {field.name: field.default_factory for field in dataclasses.fields(kind)}
    return plain | {name: make() for name, make in made.items() if make is not dataclasses.MISSING}


def _rule(hint: Any) -> Rule | None:
    """Return the rule in a type, or in a part of it."""
    own = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Rule)), None)
    return own or next((rule for rule in map(_rule, get_args(hint)) if rule is not None), None)


def values_of(kind: type, found: object, name: str, prefix: str = "") -> dict[str, Any]:
    """Return the arguments for a `kind` that an object read from a file gives.

    What it has besides, later versions added.
    """
    return read_keys(keys_of(kind), an_object(found, name), prefix)


def read_keys(keys: Iterable[Key], held: Mapping[str, object], prefix: str) -> dict[str, Any]:
    """Return the values of these keys by their names, without those that are absent or null."""
    values = {}
    for key in keys:
        value = held.get(key.name)
        if value is not None:
            values[key.name] = key.rule.read(value, prefix + key.name)
        elif key.needed:
            raise ValueError(f"{key.name!r} is missing")
    return values


def written(value: Any) -> dict[str, Any]:
    """Return a line's keys and values as JSON has them."""
    kind: type = type(value)
    held = ((key, getattr(value, key.name)) for key in keys_of(kind))
    return {key.name: None if one is None else key.rule.write(one) for key, one in held}


# Rules for what files hold.


def whole(least: int = 0, most: int = LARGEST_BYTES) -> Rule:
    return Rule(lambda value, name: a_whole(value, name, least, most))


def number(least: float = 0, most: float = LARGEST) -> Rule:
    return Rule(lambda value, name: a_number(value, name, least, most))


def each(rule: Rule, element: str | None = None) -> Rule:
    """Read a list as a tuple. `element` is what an error calls one of it, by default what it calls the list."""
    return Rule(
        lambda value, name: tuple(rule.read(one, element or name) for one in a_list(value, name)),
        lambda values: [rule.write(one) for one in values],
    )


def line(kind: Callable[..., Any], name: str) -> Rule:
    """Read an object with keys of its own as a `kind`."""
    return Rule(lambda value, _: kind(**values_of(kind, value, name)), written)  # type: ignore[arg-type]


def by_name(rule: Rule, element: str) -> Rule:
    """Read an object whose keys are names.

    `element` is what an error calls one value of it, with `{key}` for its key.
    """

    def read(value: object, name: str) -> dict[str, Any]:
        return {printable(key): rule.read(one, element.format(key=key)) for key, one in an_object(value, name).items()}

    return Rule(read, dict)


Text = Annotated[str, Rule(a_text)]
Flag = Annotated[bool, Rule(a_flag)]
Count = Annotated[int, whole(1, LARGEST)]
Counts = Annotated[tuple[int, ...], each(whole(0, LARGEST))]
