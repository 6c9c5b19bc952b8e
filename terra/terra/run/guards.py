"""Replace functions of torch and Python for the whole process while a session is open.

Python waits before it looks at what pending operations still change, if no operation shows that it looks: memory of a
tensor (`numpy`, `data_ptr`, saving it; `terra.run.past`), its exchange (`tensor.data = other`), the state of random
generators, and flags that choose kernels. These are wrapped where they are looked up. A generator's own methods, called
on `torch.default_generator` itself, are C's and cannot be. Python that computes also yields the interpreter's lock to
the runner sooner than a kernel takes.

Other threads read tensors without any mode to see them. So nothing is pending when one starts, and as long as one lives
a session runs its operations at once. The same holds if denormal numbers are flushed to zero, which the processor does
for each thread that a kernel uses. Nothing is pending when the process forks, for the child has no runner.
"""

import _thread
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from terra.run import past
from terra.run.cell import READS, Placeholder, plain, undispatched
from terra.run.runner import RunnerThread

_BASE: Any = torch._C.TensorBase
# With tensors of other types than these, optimizers and the clipping of gradients go another way, one tensor at a time.
_FOREACH_TYPES: tuple[list[Any], ...] = (_foreach_utils._foreach_supported_types, _optimizer._foreach_supported_types)
# Python that computes yields its lock after this time to a runner that waits for it, as it does at each operation. With
# Python's own 5 ms nothing was gained where both took 65 ms per step.
_SWITCH_S = 2e-4
# Half of it is zero if denormal numbers are flushed.
_SMALLEST = sys.float_info.min

# Where programs and torch itself look up what sets a flag for kernels.
_FLAGS = (
    "_set_deterministic_algorithms _set_deterministic_fill_uninitialized_memory _set_default_dtype _set_mkldnn_enabled "
    "_set_mkldnn_deterministic _set_float32_matmul_precision _set_fp32_precision_setter _set_cudnn_enabled "
    "_set_cudnn_benchmark _set_cudnn_deterministic _set_cudnn_allow_tf32 _set_cublas_allow_tf32 _set_sdp_use_flash "
    "_set_sdp_use_math _set_sdp_use_mem_efficient _set_sdp_use_cudnn _set_nnpack_enabled set_num_threads"
).split()
_SETTERS: tuple[tuple[Any, str], ...] = (
    *((torch._C, name) for name in _FLAGS if hasattr(torch._C, name)),
    (torch, "set_num_threads"),
)
_OF_GENERATORS = "get_state set_state manual_seed seed initial_seed graphsafe_get_state graphsafe_set_state".split()

# Those of `terra.run.session`.
_sessions: weakref.WeakSet[Any] = weakref.WeakSet()
# What was replaced: owner, name and what was there.
_before: list[tuple[Any, str, Any]] = []
_ABSENT = object()
# The interpreter's switch interval before a session was opened.
_intervals_s: list[float] = []
# Whether operations run at once as long as a session is open: denormal numbers were flushed, or a thread was started of
# which `threading` does not know when it ends.
_is_for_good = False


def opened(session: Any) -> None:
    _sessions.add(session)
    weakref.finalize(session, _remove_unless_used)
    if not _before:
        _install()


def closed(session: Any) -> None:
    _sessions.discard(session)
    _remove_unless_used()


def is_any_open() -> bool:
    return bool(_sessions)


def must_run_at_once() -> bool:
    """Whether another thread may look at tensors, or this one computes otherwise than a runner would."""
    global _is_for_good
    _is_for_good |= _SMALLEST / 2 == 0
    here = threading.current_thread()
    return _is_for_good or any(
        thread is not here and not isinstance(thread, RunnerThread) for thread in living_threads()
    )


def living_threads() -> list[threading.Thread]:
    """Return Python's threads. Tests replace this function, because their own runner has threads."""
    return threading.enumerate()


def _wait() -> None:
    for session in _here():
        session.drain()


def _lend() -> None:
    for session in _here():
        session.lend()


def _here() -> list[Any]:
    return [session for session in tuple(_sessions) if session.is_here()]


def _install() -> None:
    for name in (*READS, "__deepcopy__"):
        _put(torch.Tensor, name, _reading(getattr(torch.Tensor, name)))
    for owner, name, stand_in in past.stand_ins(_wait, _lend):
        _put(owner, name, stand_in(getattr(owner, name)))
    _put(forward_ad, "enter_dual_level", past.after(_refuse_duals_in_steps, forward_ad.enter_dual_level))
    _put(threading.Thread, "start", _starting(threading.Thread.start))
    for owner, name in ((_thread, "start_new_thread"), (torch, "set_flush_denormal"), (torch._C, "set_flush_denormal")):
        _put(owner, name, past.after(_run_at_once_for_good, getattr(owner, name)))
    _put(torch.Tensor, "data", property(_BASE.data.__get__, _exchange))
    for owner, name in _SETTERS:
        _put(owner, name, past.after(_wait, getattr(owner, name)))
    _put(torch.random, "default_generator", _Generator(torch.default_generator, _wait))
    for types in _FOREACH_TYPES:
        types.append(Placeholder)
    if torch.cuda.is_initialized():
        _put(torch.cuda, "default_generators", _Generators(torch.cuda.default_generators, _wait))
    _intervals_s.append(sys.getswitchinterval())
    sys.setswitchinterval(min(_SWITCH_S, _intervals_s[0]))


def _put(owner: Any, name: str, by: Any) -> None:
    _before.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, by)


class _Generator:
    """Replaces a default generator of `torch.random` or `torch.cuda`: calls `before` before its state is used."""

    def __init__(self, generator: torch.Generator, before: Callable[[], None]) -> None:
        self.generator, self._before = generator, before

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.generator, name)
        if name not in _OF_GENERATORS:
            return attribute

        def waiting(*args: Any) -> Any:
            self._before()
            return attribute(*(value.cell.fetch() if hasattr(value, "cell") else value for value in args))

        return waiting


class _Generators:
    """Replaces the default generators of `torch.cuda`, one by one as they are looked up: a stand-in for them of
    somebody else's may have no end."""

    def __init__(self, generators: Sequence[torch.Generator], before: Callable[[], None]) -> None:
        self._generators, self._before = generators, before

    def __getitem__(self, index: int) -> _Generator:
        return _Generator(self._generators[index], self._before)

    def __len__(self) -> int:
        return len(self._generators)


def _remove_unless_used() -> None:
    global _is_for_good
    if _before and not _sessions:
        for types in _FOREACH_TYPES:
            types.remove(Placeholder)
        sys.setswitchinterval(_intervals_s.pop())
        _is_for_good = False
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
        # A mode would take the read for an operation, whose result has no memory.
        with undispatched():
            return read(self, *args, **kwargs)

    return waiting


def _exchange(self: torch.Tensor, data: torch.Tensor) -> None:
    _lend()
    _BASE.data.__set__(self, plain(data))


def refuse_duals() -> None:
    raise RuntimeError(
        "terra: forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp) are computed by other formulas "
        "under a session, and would differ in their last digits: compute them outside of `with session:`"
    )


def _refuse_duals_in_steps() -> None:
    if any(session.in_step for session in _here()):
        refuse_duals()


def _starting(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def starting(self: threading.Thread) -> None:
        if not isinstance(self, RunnerThread):
            _run_at_once()
        start(self)

    return starting


def _run_at_once_for_good() -> None:
    global _is_for_good
    _is_for_good = True
    _run_at_once()


def _run_at_once() -> None:
    for session in tuple(_sessions):
        session.run_at_once()


def _forked() -> None:
    for session in tuple(_sessions):
        session.forked()


os.register_at_fork(before=_wait, after_in_child=_forked)
