"""Run a program's steps next to the program, each in a `with session:`, with results that are equal to the bit.

The first step runs as it is, because libraries and optimizers make what they need there. Then steps are traced: their
operations run at once, and their trace is merged into the graph, until one brings nothing new. From then on Python only
issues: an operation finds its node in the graph, what it makes is known of the forms it takes, and Python goes on with
placeholders. When all operations of a block are issued it goes to the runner. Nothing runs on a guess, so nothing is
ever taken back. What is not in the graph falls back: the step so far is handed over and waited for, and the rest of it
runs at once, on the same placeholders, and is merged. The paper's design speculates instead.
"""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from terra.run import guards
from terra.run.blocks import Gathering, Variants
from terra.run.cell import Placeholder
from terra.run.issue import (
    Call,
    Function,
    Outers,
    Outputs,
    Results,
    are_sizes,
    refuse_other_gradient,
    refuse_other_higher_derivatives,
    run_below,
    values,
)
from terra.run.runner import Runner, State, current
from terra.trace.graph import END, Key, Node, TraceGraph
from terra.trace.place import Sites

# Operations after which a block is handed over: how far the runner may lag if it has nothing else to do.
BLOCK = 32
# The same before a branch, so that the blocks after it are known ones again. Shorter blocks cost more than they gain.
BLOCK_TO_FORK = 8
# The innermost frames, the same for every operation: the mode's own, of torch's wrapper around it, and of `issue`.
FRAMES_OF_ISSUE = 3
# Steps that may be pending when the next one begins: each keeps its batch.
STEPS_AHEAD = 2
# Limit of the compiled blocks and of the known results: a program whose sizes never recur would make ever more.
_MOST_KNOWN = 20_000
# Torch's words about code that takes a placeholder for a tensor with memory, and the note that is added.
_OF_PLACEHOLDERS = ("data is not allocated yet", "python object of type Placeholder")
_NO_MEMORY = (
    "terra: a session's step makes placeholders, which have no memory and a class of their own. Code that reads "
    "memory without torch's dispatcher, or makes a subclass of Tensor without its own __torch_dispatch__, must run "
    "outside of `with session:`"
)


class Phase(enum.Enum):
    WARM_UP = enum.auto()
    TRACE = enum.auto()
    CO_EXECUTE = enum.auto()


class Session:
    """Runs the steps of one program, in one thread: `with session:`.

    `runner="lazy"` runs operations only when somebody waits, at a step's end at the latest: serial, for comparison.
    `traces`, `fallbacks` and `co_executed` count steps; `at_once` counts those that were known and still ran in
    Python's thread, because another thread could look on, or denormal numbers are flushed. Within `ahead()` a step's
    end does not wait.
    """

    def __init__(self, runner: Literal["threaded", "lazy"] = "threaded", warm_up: int = 1) -> None:
        if runner not in ("threaded", "lazy") or warm_up < 0:
            raise ValueError(
                f"runner={runner!r}, warm_up={warm_up}: the runner must be 'threaded' or 'lazy', and warm_up at least 0"
            )
        self.graph = TraceGraph()
        self.traces = self.fallbacks = self.co_executed = self.at_once = 0
        self._left_to_warm_up = warm_up
        self._phase = Phase.WARM_UP if warm_up else Phase.TRACE
        self._stepping = self._phase
        self.in_step = self._is_ahead = self._runs_at_once = False
        self._is_lazy = runner == "lazy"
        self._runner = Runner(held_back=self._is_lazy)
        self._sites = Sites()
        self._mode = _Issued(self)
        self._functions: dict[int, Function] = {}
        self._outers = Outers(self)
        self._results = Results(self, self._outers)
        self._variants = Variants(self._sites.places)
        self._trace: list[Key] = []
        self._node = self.graph.start
        self._gathered: Gathering | None = None
        self._thread = threading.get_ident()
        self._ends: deque[threading.Event] = deque()
        guards.opened(self)

    def close(self) -> None:
        """Wait, and end the runner's thread. Placeholders keep their values."""
        try:
            self.drain()
        finally:
            self._runner.end()
            guards.closed(self)

    # -- steps
    # ------------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        if self.in_step:
            raise RuntimeError("terra: a step is under way, and cannot contain another: leave it first")
        if forward_ad._current_level >= 0:
            guards.refuse_duals()
        self.in_step, self._thread = True, threading.get_ident()
        if len(self._ends) >= STEPS_AHEAD:
            self._ends.popleft().wait()
        self._runs_at_once = guards.must_run_at_once()
        if self._runs_at_once:
            self.drain()
        if self._phase is not Phase.WARM_UP:
            self._outers.forget()
            if max(len(self._variants.programs), len(self._results.known)) > _MOST_KNOWN:
                self._variants.programs.clear()
                self._results.known.clear()
            self._trace.clear()
            self._node = self.graph.start
            self._stepping = self._phase
            self._sites.begin(sys._getframe(1))
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.in_step = False
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_PLACEHOLDERS):
            error.add_note(_NO_MEMORY)
        if self._phase is Phase.WARM_UP:
            self._left_to_warm_up -= error is None
            if self._left_to_warm_up <= 0:
                self._phase = Phase.TRACE
            return
        self._mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._sites.end()
        self._outers.forget()
        if error is None:
            self._ended()
        # After an error too: without a session, everything issued before it has run.
        self._commit()
        if self._is_ahead and not self._is_lazy and error is None:
            self._ends.append(self._runner.mark())
        else:
            self.drain()

    def _ended(self) -> None:
        if self._stepping is Phase.CO_EXECUTE:
            if END in self._node.following:
                self.at_once += self._runs_at_once
                self.co_executed += not self._runs_at_once
                return
            # It ended where no step did: nothing is left to run.
            self._fall_back()
        elif self._phase is Phase.TRACE:
            self.traces += 1
        grown = self.graph.merge(self._trace)
        # A step that fell back is followed by traced ones, until one of these brings nothing new.
        fell_back = self._phase is Phase.CO_EXECUTE
        self._phase = Phase.TRACE if grown or fell_back else Phase.CO_EXECUTE

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Run steps inside without waiting at their end; operations between them, in this thread, wait, and so does
        the end of all."""
        if self._is_ahead or self.in_step:
            raise RuntimeError("terra: ahead() contains steps, so it cannot be used inside a step or another ahead()")
        self._is_ahead = True
        try:
            with _Between(self):
                yield
        finally:
            self._is_ahead = False
            self._ends.clear()
            self.drain()

    def drain(self) -> None:
        """Wait until all that was issued has run, and raise the first error of an operation, with its place."""
        self._commit()
        self._runner.wait()

    def lend(self) -> None:
        """Wait for everything: from now on Python may have the memory of any tensor, or exchange it."""
        self.drain()
        self._outers.forget()
        self._outers.lent = True

    def run_at_once(self) -> None:
        """Leave nothing pending until the next step: something may read tensors without an operation."""
        self._runs_at_once = True
        if self.is_here():
            self.drain()

    def forked(self) -> None:
        """Go on in a child process, which has no runner; before the fork everything was waited for."""
        failed = self._runner.failed
        self._runner = Runner(held_back=self._is_lazy)
        self._runner.failed += failed
        self._ends.clear()

    def is_here(self) -> bool:
        """Whether this thread issues the operations: the one that entered, or autograd's for it."""
        return threading.get_ident() == self._thread or (self.in_step and torch._C._current_autograd_node() is not None)

    # -- operations
    # ------------------------------------------------------------------------------------------------------------------

    def issue(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # By identity, for torch's operations are hashed by Python; the function keeps its operation.
        function = self._functions.get(id(operation)) or self._function(operation)
        if function.is_beside or are_sizes(function, kwargs):
            return operation(*args, **kwargs)
        if function.is_lift and type(args[0]) is not Placeholder:
            return args[0]
        call = Call(function, self._outers, args, kwargs)
        if function.other_gradient_of is not None:
            refuse_other_gradient(call)
        key: Key = (function, call.template, self._sites.here(FRAMES_OF_ISSUE))
        self._trace.append(key)
        node = self._found(key)
        if call.is_host and not function.is_random:
            return run_below(operation, args, kwargs)
        made = self._known(call)
        if node is not None and made is not None:
            return self._gather(call, node, made)
        refuse_other_higher_derivatives()
        # In this thread, when all that was issued before has run.
        self.drain()
        return self._results.hand_out(call, run_below(operation, *values(args, kwargs)))

    def _known(self, call: Call) -> Outputs | None:
        """Return what the call makes, or None if it is not known or must be waited for."""
        if self._runs_at_once or call.is_awaited or (call.has_shared and call.reaches_shared):
            return None
        return self._results.known.get(call.result_key())

    def _function(self, operation: Any) -> Function:
        return self._functions.setdefault(id(operation), Function(operation))

    def _found(self, key: Key) -> Node | None:
        """Return the operation's node, or None if the step is traced, which it is from here on without one."""
        if self._stepping is not Phase.CO_EXECUTE:
            return None
        node = self._node.following.get(key)
        if node is None:
            self._fall_back()
        else:
            self._node = node
        return node

    def _fall_back(self) -> None:
        self.fallbacks += 1
        self._stepping = Phase.TRACE

    def _gather(self, call: Call, node: Node, made: Outputs) -> Any:
        gathered, state = self._gathered, current()
        if gathered is None or gathered.state != state:
            self._commit()
            gathered = self._gathered = Gathering(State(*state))
        cells = gathered.add(call, node, made, self._outers, self)
        if len(gathered.calls) >= (BLOCK_TO_FORK if node.is_fork else BLOCK):
            self._commit()
        if made.is_one and cells:
            return Placeholder(cells[0])
        new = iter(cells)
        outputs = [
            call.tensors[form] if type(form) is int else form and Placeholder(next(new)) for form in made.outputs
        ]
        return outputs[0] if made.is_one else (outputs or None)

    def _commit(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            self._runner.put(self._variants.block(gathered))

    def outside(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on placeholders outside of a step: only views and what it writes stay placeholders."""
        self.drain()
        function = self._function(operation)
        result = run_below(operation, *values(args, kwargs))
        if function.makes_views or function.writes:
            return self._results.hand_out(Call(function, self._outers, args, kwargs), result)
        return result


class _Issued(TorchDispatchMode):
    """All operations of a step, below autograd."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = weakref.proxy(session)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            # A tensor that takes itself apart does so first, and comes back as operations on others.
            if kind is not Placeholder and kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
                return NotImplemented
        return self._session.issue(func, args, kwargs or {})


class _Between(TorchDispatchMode):
    """Operations between steps that do not wait."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = session

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._session.in_step:
            self._session.drain()
        return func(*args, **(kwargs or {}))
