"""Write down what a step issues, operation by operation. In: a program that runs as it would. Out: a `Step` of `Operation`s each.

It stands below autograd, where forward, backward, hooks, custom Functions and optimizers all come by as operations. Each operation runs as
it came; nothing is changed, moved or kept but what tells one tensor's memory from another's. What the host reads without an operation (a
tensor as a list, as an array) is seen where Python asks for it.

A tensor is told by its memory: it was *made* by an operation of this step, or *given* from outside. Storages made are remembered by weak
references, which keep no memory and still keep another storage from taking the same address.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from terra.trace.place import Place, Places

# What a program asks of the profiler is no part of what it computes, and its arguments are new objects each time.
_SILENT = frozenset({"profiler", "prim"})
# What Python does with a tensor that needs its bytes on the host and may issue no operation.
_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


# A value: random numbers come from a generator that the program made.
OWN_GENERATOR = "a generator of its own"


class Given(NamedTuple):
    """Memory from outside of the step: the same number is the same memory, in all steps of a recorder."""

    number: int


class Made(NamedTuple):
    """Memory that this operation of the step made, by its index; below zero the step's inputs, which whoever records declared."""

    operation: int


@dataclass(frozen=True)
class Argument:
    """One leaf of an operation's arguments: a tensor's `memory`, `shape`, type and device, or a plain `value`."""

    name: str
    value: object = None
    memory: Given | Made | None = None
    shape: tuple[int, ...] = ()
    meta: str = ""


@dataclass(frozen=True)
class Operation:
    """`name` as torch's: namespace, operation and overload, or, in pointed brackets, what is none."""

    name: str
    place: Place
    arguments: tuple[Argument, ...] = ()

    @property
    def short(self) -> str:
        """As people say it: `addcdiv_`."""
        return self.name.split(".")[1] if "." in self.name else self.name


@dataclass
class Step:
    """What was issued between its beginning and its end, in order."""

    operations: list[Operation] = field(default_factory=list)
    made: dict[int, tuple[Any, Made]] = field(default_factory=dict, repr=False)


class Recorder:
    """Records steps; several may be under way, as when a pipeline's micro-batches are, and each may come in parts.

    ```
    with recorder.running():
        with recorder.step(0):
            ...
    ```
    Operations outside of a step run and are not recorded. One thread at a time, and what autograd runs for it. `through`: files whose
    functions stand in for torch's: what they issue stands at the line that called them.
    """

    def __init__(self, through: Iterable[str] = ()) -> None:
        self.steps: dict[object, Step] = {}
        self._places = Places(through)
        self._now: Step | None = None
        # Memory from outside is kept while recording: else another tensor could come to lie there and pass for the same.
        self._given: dict[int, tuple[torch.UntypedStorage, Given]] = {}
        self._seeding = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Look on inside. Leaves everything as it was."""
        with contextlib.ExitStack() as entered:
            entered.enter_context(_Reads(self))
            entered.enter_context(_Operations(self))
            for owner, name in _SEEDS:
                entered.enter_context(_replaced(owner, name, self._watched(getattr(owner, name), name)))
            yield

    @contextlib.contextmanager
    def step(self, key: object, inputs: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """What is issued inside belongs to this step, as a further part if there was one. `inputs` are known to be others each step."""
        before, self._now = self._now, self.steps.setdefault(key, Step())
        for tensor in inputs:
            storage = tensor.untyped_storage()
            self._now.made[storage._cdata] = _weak(storage), Made(-1)
        try:
            yield
        finally:
            self._now = before

    def begin(self, key: object) -> None:
        """From now on everything belongs to this step."""
        self._now = self.steps.setdefault(key, Step())

    def pause(self) -> None:
        """From now on nothing is recorded."""
        self._now = None

    # -- what comes by -------------------------------------------------------------------------------------------------------------

    def issue(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        step = self._now
        if step is None or operation.namespace in _SILENT:
            return operation(*args, **kwargs)
        place = self._places.here()
        arguments = tuple(self._arguments(step, operation, args, kwargs))
        index = len(step.operations)
        step.operations.append(Operation(str(operation), place, arguments))
        made = operation(*args, **kwargs)
        for each in tree_leaves(made):
            storage = _storage(each) if isinstance(each, torch.Tensor) else None
            # A view lies in memory that is known already, and so does what was written in place.
            if storage is not None and storage._cdata not in step.made and storage._cdata not in self._given:
                step.made[storage._cdata] = _weak(storage), Made(index)
        return made

    def read(self, name: str, tensor: torch.Tensor) -> None:
        """Python needs this tensor's bytes."""
        if self._now is not None:
            self._now.operations.append(Operation(f"<{name}>", self._places.calling(), (self._tensor(self._now, "self", tensor),)))

    def _watched(self, seed: Callable[..., Any], name: str) -> Callable[..., Any]:
        """What seeds the CPU seeds each device: the program asked once."""

        @functools.wraps(seed)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._now is None or self._seeding:
                return seed(*args, **kwargs)
            self._now.operations.append(Operation(f"<{name}>", self._places.calling()))
            self._seeding = True
            try:
                return seed(*args, **kwargs)
            finally:
                self._seeding = False

        return run

    # -- arguments -----------------------------------------------------------------------------------------------------------------

    def _arguments(self, step: Step, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Argument]:
        named = [(formal.name, given) for formal, given in zip(operation._schema.arguments, args, strict=False)]
        for name, given in (*named, *kwargs.items()):
            leaves = tree_leaves(given)
            for place, leaf in enumerate(leaves):
                of = name if len(leaves) == 1 else f"{name}[{place}]"
                if isinstance(leaf, torch.Tensor):
                    yield self._tensor(step, of, leaf)
                elif isinstance(leaf, torch.UntypedStorage):
                    # A tensor is made to lie there.
                    yield Argument(of, memory=self._memory(step, leaf), shape=(leaf.nbytes(),), meta=f"uint8 {leaf.device}")
                elif isinstance(leaf, torch.Generator):
                    yield Argument(of, _generator(leaf))
                elif isinstance(leaf, torch.ScriptObject):
                    # Process groups and the like come as new objects each time.
                    yield Argument(of, type(leaf).__name__)
                else:
                    yield Argument(of, leaf)

    def _tensor(self, step: Step, name: str, tensor: torch.Tensor) -> Argument:
        storage = _storage(tensor)
        memory = None if storage is None else self._memory(step, storage)
        meta = f"{str(tensor.dtype).removeprefix('torch.')} {tensor.device}"
        return Argument(name, memory=memory, shape=tuple(tensor.shape), meta=meta)

    def _memory(self, step: Step, storage: torch.UntypedStorage) -> Given | Made:
        known: Any = step.made.get(storage._cdata) or self._given.get(storage._cdata)
        if known is None:
            known = self._given[storage._cdata] = storage, Given(len(self._given))
        memory: Given | Made = known[1]
        return memory


def _generator(generator: Any) -> str:
    of_torch: Any = (
        torch.default_generator if generator.device.type == "cpu" else torch.cuda.default_generators[generator.device.index or 0]
    )
    # It comes as another object each time.
    return "torch's generator" if generator._cdata == of_torch._cdata else OWN_GENERATOR


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None of a tensor that has not one memory, as a sparse one or one that only wraps others."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _weak(storage: torch.UntypedStorage) -> Any:
    weak: Any = StorageWeakRef
    return weak(storage)


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.issue(func, args, kwargs or {})


class _Reads(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and args and isinstance(args[0], torch.Tensor):
            self._recorder.read(name, args[0])
        return func(*args, **(kwargs or {}))


# What sets the state of random numbers, where programs look it up. A generator's own methods are C's and cannot be looked at.
_SEEDS: tuple[tuple[Any, str], ...] = (
    (torch, "manual_seed"),
    (torch, "seed"),
    (torch, "set_rng_state"),
    (torch.random, "manual_seed"),
    (torch.random, "seed"),
    (torch.random, "set_rng_state"),
    (torch.cuda, "manual_seed"),
    (torch.cuda, "manual_seed_all"),
    (torch.cuda, "set_rng_state"),
)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, before)
