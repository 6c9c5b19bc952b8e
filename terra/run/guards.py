"""What is another for the whole process while a session is open. In: open sessions. Out: waiting, and a lock that changes hands sooner.

Python waits before it looks at what pending operations still change, where no operation tells: memory of a tensor (`numpy`, `data_ptr`,
saving it), its exchange (`tensor.data = other`), the state of random generators, and flags that choose kernels. These are wrapped where
they are looked up; a generator's own methods called on `torch.default_generator` itself are C's and cannot be. And Python that computes
lets the runner have the interpreter's lock before a kernel's time has passed.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from terra.run.cell import READS, Placeholder, undispatched
from terra.run.state import SETTERS, Generator, Generators

_BASE: Any = torch._C.TensorBase
# With tensors of other types than these, optimizers and the clipping of gradients go another way, one tensor at a time.
_FOREACH_TYPES: tuple[list[Any], ...] = (_foreach_utils._foreach_supported_types, _optimizer._foreach_supported_types)
# After this long Python that computes hands its lock to a runner that waits for it, as it does at each operation. With the 5 ms that Python
# has of its own nothing was gained where both took 65 ms a step.
_SWITCH_S = 2e-4


class Waits(Protocol):
    """A session."""

    def is_here(self) -> bool:
        """Whether this thread issues its operations; what others read is theirs."""

    def drain(self) -> None:
        """Wait for what is pending."""

    def lend(self) -> None:
        """Wait for what is pending; from now on Python may have the memory of any tensor, or another in its place."""


_sessions: weakref.WeakSet[Any] = weakref.WeakSet()
_before: list[tuple[Any, str, Any]] = []
_ABSENT = object()
# The interval that there was.
_intervals_s: list[float] = []


def opened(session: Waits) -> None:
    _sessions.add(session)
    weakref.finalize(session, _remove_unless_used)
    if not _before:
        _install()


def closed(session: Waits) -> None:
    _sessions.discard(session)
    _remove_unless_used()


def is_any_open() -> bool:
    return bool(_sessions)


def _wait() -> None:
    for session in _here():
        session.drain()


def _lend() -> None:
    for session in _here():
        session.lend()


def _here() -> list[Any]:
    return [session for session in tuple(_sessions) if session.is_here()]


def _install() -> None:
    for name in READS:
        _put(torch.Tensor, name, _reading(getattr(torch.Tensor, name)))
    _put(torch.Tensor, "data", property(_BASE.data.__get__, _exchange))
    for owner, name in SETTERS:
        _put(owner, name, _waiting(getattr(owner, name)))
    _put(torch.random, "default_generator", Generator(torch.default_generator, _wait))
    for types in _FOREACH_TYPES:
        types.append(Placeholder)
    if torch.cuda.is_initialized():
        _put(torch.cuda, "default_generators", Generators(torch.cuda.default_generators, _wait))
    _intervals_s.append(sys.getswitchinterval())
    sys.setswitchinterval(min(_SWITCH_S, _intervals_s[0]))


def _put(owner: Any, name: str, by: Any) -> None:
    _before.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, by)


def _remove_unless_used() -> None:
    if _before and not _sessions:
        for types in _FOREACH_TYPES:
            types.remove(Placeholder)
        sys.setswitchinterval(_intervals_s.pop())
    while _before and not _sessions:
        owner, name, was = _before.pop()
        if was is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, was)


def _reading(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def waiting(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _lend()
        if type(self) not in (torch.Tensor, torch.nn.Parameter):
            return read(self, *args, **kwargs)
        # A mode would take what is read for an operation, and what it gives has no memory.
        with undispatched():
            return read(self, *args, **kwargs)

    return waiting


def _waiting(setter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(setter)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        _wait()
        return setter(*args, **kwargs)

    return waiting


def _exchange(self: torch.Tensor, given: torch.Tensor) -> None:
    _lend()
    _BASE.data.__set__(self, given.cell.fetch() if isinstance(given, Placeholder) else given)
