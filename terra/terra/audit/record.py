"""Record what the steps of a program issue, operation by operation, while it runs as usual.

The recorder is below autograd, where forward, backward, hooks, custom Functions and optimizers all are operations. Each
runs as it came; nothing is changed, moved or kept except what tells one tensor's memory from another's. What the host
reads without an operation (a tensor as a list, as an array) is recorded where Python calls for it.

A tensor is known by its memory: it was *made* by an operation of this step, or *given* from outside. Weak references to
the storages that were made keep no memory, and still prevent that another storage takes the same address.
"""

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

# The profiler's operations are no part of what a program computes, and their arguments are new objects each time.
_SILENT = frozenset({"profiler", "prim"})
# Functions that need a tensor's bytes on the host and may issue no operation.
_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__", "apply_", "map_", "map2_"})
# Functions that take numbers out of the tensors in a list.
_READS_IN_LISTS = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})


# The operation that makes a tensor of Python's numbers.
LIFT = "lift_fresh"
# The value of an argument that is a generator which the program made.
OWN_GENERATOR = "a generator of its own"


class Fixed(NamedTuple):
    """Memory from outside of the step, by a number that is the same in all steps of a recorder."""

    number: int


class MadeInStep(NamedTuple):
    """Memory that an operation of the step made, by its index; below zero: a declared input of the step."""

    operation: int


@dataclass(frozen=True)
class Argument:
    """One leaf of an operation's arguments: a tensor's `memory`, `shape`, type and device, or a plain `value`."""

    name: str
    value: object = None
    memory: Fixed | MadeInStep | None = None
    shape: tuple[int, ...] = ()
    meta: str = ""


@dataclass(frozen=True)
class Operation:
    """An operation. `name` is torch's, with namespace and overload; anything else is in pointed brackets."""

    name: str
    place: Place
    arguments: tuple[Argument, ...] = ()

    @property
    def short(self) -> str:
        """Short name: `addcdiv_`."""
        return self.name.split(".")[1] if "." in self.name else self.name


@dataclass
class Step:
    """The operations that a step issued, in order."""

    operations: list[Operation] = field(default_factory=list)
    made: dict[int, tuple[Any, MadeInStep]] = field(default_factory=dict, repr=False)


class Recorder:
    """Records steps. Several may be in progress, like a pipeline's micro-batches, and each may come in parts.

    ```
    with recorder.running():
        with recorder.step(0):
            ...
    ```
    Operations outside of a step run and are not recorded. One thread at a time, with what autograd runs for it.
    """

    def __init__(self) -> None:
        self.steps: dict[object, Step] = {}
        self._places = Places()
        self._now: Step | None = None
        # Memory from outside is kept while recording: otherwise another tensor could take its place and pass for it.
        self._given: dict[int, tuple[torch.UntypedStorage, Fixed]] = {}
        self._seeding = False
        # Whether `tensor[...] = value` is running: it makes a tensor of a number, on the host even for a device.
        self.is_setting = False
        # By operation, the value of each argument that is not given.
        self._defaults: dict[int, tuple[Any, dict[str, Argument]]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch what runs inside."""
        with contextlib.ExitStack() as entered:
            entered.enter_context(_Reads(self))
            entered.enter_context(_Operations(self))
            for owner, name in _SEEDS:
                entered.enter_context(_replaced(owner, name, self._watched(getattr(owner, name), name)))
            for owner, name, word in _PRINTS_AND_SAVES:
                entered.enter_context(_replaced(owner, name, self._reading(getattr(owner, name), word)))
            yield

    @contextlib.contextmanager
    def step(self, key: object, inputs: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """Record what is issued inside as this step, or as a further part of it. `inputs` differ in each step."""
        before, self._now = self._now, self.steps.setdefault(key, Step())
        for tensor in inputs:
            storage = tensor.untyped_storage()
            self._now.made[storage._cdata] = _weak(storage), MadeInStep(-1)
        try:
            yield
        finally:
            self._now = before

    def begin(self, key: object) -> None:
        """Record everything as this step from now on."""
        self._now = self.steps.setdefault(key, Step())

    def pause(self) -> None:
        """Record nothing from now on."""
        self._now = None

    def issue(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        step = self._now
        if step is None or operation.namespace in _SILENT:
            return operation(*args, **kwargs)
        place = self._places.here()
        arguments = tuple(self._arguments(step, operation, args, kwargs))
        index = len(step.operations)
        step.operations.append(Operation(str(operation), place, arguments))
        results = operation(*args, **kwargs)
        for leaf in tree_leaves(results):
            storage = _storage(leaf) if isinstance(leaf, torch.Tensor) else None
            # A view has memory that is known already, and so has what was written in place.
            if storage is not None and storage._cdata not in step.made and storage._cdata not in self._given:
                step.made[storage._cdata] = _weak(storage), MadeInStep(index)
        return results

    def read(self, name: str, source: torch.Tensor | torch.UntypedStorage) -> None:
        """Record that Python needs the bytes of this tensor or memory."""
        if self._now is not None:
            of: Any = self._storage if isinstance(source, torch.UntypedStorage) else self._tensor
            argument = of(self._now, "self", source)
            self._now.operations.append(Operation(f"<{name}>", self._places.calling(), (argument,)))

    def _reading(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a function that reads its first argument, a tensor or memory."""

        @functools.wraps(function)
        def run(source: Any, *args: Any, **kwargs: Any) -> Any:
            self.read(name, source)
            return function(source, *args, **kwargs)

        return run

    def _watched(self, seed: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a function that seeds, and that may call others for each device: the program called once."""

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

    def _arguments(
        self, step: Step, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[Argument]:
        """Yield all arguments in the operation's order, defaults too: torch leaves out values that equal them."""
        defaults = self._defaults_of(operation)
        values = {**dict(zip(defaults, args, strict=False)), **kwargs}
        for name, default in defaults.items():
            if name not in values:
                yield default
                continue
            if isinstance(values[name], (list, tuple)):
                yield Argument(f"len({name})", len(values[name]))
            leaves = tree_leaves(values[name])
            for place, leaf in enumerate(leaves):
                yield self._argument(step, operation, name if len(leaves) == 1 else f"{name}[{place}]", leaf)

    def _argument(self, step: Step, operation: Any, name: str, leaf: Any) -> Argument:
        if isinstance(leaf, torch.Tensor):
            if self.is_setting and operation.overloadpacket.__name__ == LIFT and leaf.numel() == 1:
                return Argument(name, leaf.item())
            return self._tensor(step, name, leaf)
        if isinstance(leaf, torch.UntypedStorage):
            # The memory of a tensor that is made.
            return self._storage(step, name, leaf)
        if isinstance(leaf, torch.Generator):
            return Argument(name, _generator(leaf))
        # Process groups and the like come as new objects each time.
        return Argument(name, type(leaf).__name__ if isinstance(leaf, torch.ScriptObject) else leaf)

    def _defaults_of(self, operation: Any) -> dict[str, Argument]:
        # By identity, for torch's operations are hashed by Python; the operation is kept, so that its id is not reused.
        if id(operation) not in self._defaults:
            declared = operation._schema.arguments
            defaults = {argument.name: Argument(argument.name, argument.default_value) for argument in declared}
            self._defaults[id(operation)] = operation, defaults
        return self._defaults[id(operation)][1]

    def _tensor(self, step: Step, name: str, tensor: torch.Tensor) -> Argument:
        storage = _storage(tensor)
        memory = None if storage is None else self._memory(step, storage)
        meta = f"{str(tensor.dtype).removeprefix('torch.')} {tensor.device}"
        return Argument(name, memory=memory, shape=tuple(tensor.shape), meta=meta)

    def _storage(self, step: Step, name: str, storage: torch.UntypedStorage) -> Argument:
        return Argument(
            name, memory=self._memory(step, storage), shape=(storage.nbytes(),), meta=f"uint8 {storage.device}"
        )

    def _memory(self, step: Step, storage: torch.UntypedStorage) -> Fixed | MadeInStep:
        entry: Any = step.made.get(storage._cdata) or self._given.get(storage._cdata)
        if entry is None:
            entry = self._given[storage._cdata] = storage, Fixed(len(self._given))
        memory: Fixed | MadeInStep = entry[1]
        return memory


def _generator(generator: Any) -> str:
    of_torch: Any = (
        torch.default_generator
        if generator.device.type == "cpu"
        else torch.cuda.default_generators[generator.device.index or 0]
    )
    # It comes as another object each time.
    return "torch's generator" if generator._cdata == of_torch._cdata else OWN_GENERATOR


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage, or None if it has no single one, such as a sparse tensor."""
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
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _READS and args and isinstance(args[0], torch.Tensor):
            self._recorder.read(name, args[0])
        elif name in _READS_IN_LISTS:
            for tensor in _in_lists((*args, *kwargs.values())):
                self._recorder.read(name, tensor)
        if name != "__setitem__":
            return func(*args, **kwargs)
        self._recorder.is_setting = True
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.is_setting = False


def _in_lists(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists among these values, at any depth."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from (element for element in value if isinstance(element, torch.Tensor))
            yield from _in_lists(value)


# Functions through which every tensor is printed and every memory saved, and what an audit calls that.
_PRINTS_AND_SAVES: tuple[tuple[Any, str, str], ...] = (
    (torch._tensor_str, "_str", "repr"),
    (torch.serialization, "location_tag", "save"),
)


# Functions that set the state of random numbers, where programs look them up. A generator's own methods are C's and
# cannot be watched.
_SEEDS: tuple[tuple[Any, str], ...] = (
    *((owner, name) for owner in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "set_rng_state")),
)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, before)
