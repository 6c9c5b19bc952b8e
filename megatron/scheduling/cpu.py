"""Replace the CUDA runtime on a machine without a GPU, so that Megatron's own trainer runs there unmodified.

"cuda" then means the CPU, or another device with answers of its own (`stand_in`). Never imported if there is a CUDA device.

A TorchFunctionMode would be shorter but is thread-local: autograd's and the data loader's threads would escape it. All this
must happen before Megatron's import, because Megatron binds some of these names then (`from torch.cuda import _lazy_call`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

_CPU = torch.device("cpu")

# Megatron's flags that a machine without a GPU needs; the user's win.
ARGUMENTS: tuple[str, ...] = tuple(
    """--distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
    --no-rope-fusion --no-persist-layer-norm""".split()
)


def install(device: torch.device = _CPU) -> None:
    """Replace the CUDA runtime by the CPU, or by another device that runs everything in order.

    Call once, before Megatron is imported; a second call does nothing.
    """
    accelerator = {
        "is_available": _answer(True),
        "current_device_index": _answer(0),
        "current_stream": _answer(_Inert()),
    }
    stand_in(device, _answers_of_one_device(device), accelerator)


def stand_in(device: torch.device, cuda: Mapping[str, Any], accelerator: Mapping[str, Any]) -> None:
    """Let "cuda" mean `device`, and `torch.cuda` and `torch.accelerator` give these answers.

    Call once, before Megatron is imported; a second call does nothing. Random numbers are those of the host's generator.
    """
    if standing_in():
        return
    if any(name == "megatron.core" or name.startswith("megatron.core.") for name in sys.modules):
        raise RuntimeError(
            "the CPU stand-in must be installed before megatron.core is imported: call cpu_runtime.install() first"
        )
    # Compiling element-wise fusions costs more than it saves in a few small steps, and needs a C++ compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _replace(torch.cuda, **cuda)
    _replace(torch.cuda.nvtx, range_push=_answer(None), range_pop=_answer(None))
    _replace(torch.accelerator, **accelerator)
    _replace_rng()
    _replace_factories(device)
    _replace_moves(device)
    _take_sizes_as_tensors()
    _fence_data_loader()
    _replace(torch.cuda, _bpipe_stand_in=device.type)


def standing_in() -> str | None:
    """Return the type of the device that replaces CUDA's in this process, or None."""
    return getattr(torch.cuda, "_bpipe_stand_in", None)


class _Inert:
    """A stream or an event of a device that runs everything in order: every wait is already over."""

    cuda_stream = 0
    device = _CPU
    stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: _Inert | None = None) -> _Inert:
        return event or _Inert()

    def elapsed_time(self, end: _Inert) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = wait = wait_event = wait_stream = synchronize = __exit__ = _nothing

    def __enter__(self) -> _Inert:
        return self


class _Generators:
    """`torch.cuda.default_generators`: whatever the index, the CPU's generator."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _replace(owner: object, **replacements: Any) -> None:
    for name, value in replacements.items():
        setattr(owner, name, value)


def _answer(value: Any) -> Callable[..., Any]:
    """Return a new function for every name: torch's compiler tables refuse one object under two names."""
    return lambda *args, **kwargs: value


def _answers(value: Any, names: str) -> dict[str, Any]:
    return {name: _answer(value) for name in names.split()}


class _Device(contextlib.nullcontext[None]):
    """`torch.cuda.device(index)`: a class, because torch asks whether something is an instance of it."""


def answers() -> dict[str, Any]:
    """Return the answers of `torch.cuda` that do not depend on the device in its place."""
    return {
        **_answers(True, "is_available is_initialized is_bf16_supported"),
        **_answers(False, "is_current_stream_capturing"),
        **_answers(None, "init _lazy_init ipc_collect"),
        **_answers(0, "device_memory_used"),
        "_lazy_call": lambda call, **kwargs: call(),
        "get_device_capability": _answer((8, 0)),
        "device": _Device,
    }


def _answers_of_one_device(device: torch.device) -> dict[str, Any]:
    """Return runtime queries, streams, events and memory counters of one device that runs all in order."""
    properties = SimpleNamespace(name="CPU", major=8, minor=0, multi_processor_count=1, total_memory=0)
    return {
        **answers(),
        **_answers(
            None, "set_device synchronize empty_cache reset_peak_memory_stats reset_max_memory_allocated set_stream"
        ),
        **_answers(0, "memory_allocated memory_reserved max_memory_allocated max_memory_reserved"),
        **_answers(_Inert(), "current_stream default_stream"),
        "device_count": _answer(1),
        "current_device": _answer(device),
        "get_device_name": _answer("CPU"),
        "get_device_properties": _answer(properties),
        "memory_stats": lambda *args, **kwargs: ZeroStatistics(),
        "Stream": _Inert,
        "Event": _Inert,
        "stream": lambda *args: contextlib.nullcontext(),
    }


class ZeroStatistics(dict[str, int]):
    """Memory statistics that are zero if nothing is counted."""

    def __missing__(self, key: str) -> int:
        return 0


def _replace_rng() -> None:
    """Let one generator serve as the CPU's and as the device's. It is looked up in torch, as it may be replaced."""
    random: Any = torch.random
    get_state: Callable[[], torch.Tensor] = torch.get_rng_state
    set_state: Callable[[torch.Tensor], None] = torch.set_rng_state
    for module in (torch.cuda, torch.cuda.random):
        _replace(
            module,
            get_rng_state=lambda device="cuda": get_state(),
            set_rng_state=lambda new_state, device="cuda": set_state(new_state),
            manual_seed=lambda seed: random.default_generator.manual_seed(seed) and None,
            manual_seed_all=lambda seed: random.default_generator.manual_seed(seed) and None,
            initial_seed=lambda: random.default_generator.initial_seed(),
        )
    _replace(torch.cuda, default_generators=_Generators())


def _meant(value: Any, device: torch.device) -> Any:
    """Return `device` for a name of CUDA, also with an index, and everything else unchanged."""
    name = value.type if isinstance(value, torch.device) else value
    return device if isinstance(name, str) and name.split(":")[0] == "cuda" else value


_FACTORIES = """
    empty zeros ones full rand randn randint randperm arange linspace tensor as_tensor eye
    empty_strided empty_like zeros_like ones_like full_like rand_like randn_like
""".split()


def _replace_factories(target: torch.device) -> None:
    """Let `torch.zeros(..., device="cuda")` and the like make tensors on the device in CUDA's place."""

    def redirected(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is not None:
                # An index alone is a CUDA device too.
                kwargs["device"] = target if isinstance(device, int) else _meant(device, target)
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return make

    for name in _FACTORIES:
        setattr(torch, name, redirected(getattr(torch, name)))


def _replace_moves(target: torch.device) -> None:
    """Let `.cuda()` and `.to("cuda")` move to the device in CUDA's place; a tensor's type name is CUDA's."""

    def redirected(move: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(move)
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = _meant(kwargs["device"], target)
            return move(self, *(_meant(arg, target) for arg in args), **kwargs)

        return to

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    def go(self: Any, device: object = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        return self.to(target, non_blocking=non_blocking)

    plain_type: Callable[..., Any] = torch.Tensor.type
    own_name = "torch." if target.type == "cpu" else f"torch.{target.type}."

    def type_name(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        # Megatron's optimizer sorts parameters by this name and asserts on any other.
        if dtype is None:
            # A torch function mode finds this function by the name of the plain one, and calls it a second time.
            return plain_type(self).replace("torch.cuda.", own_name, 1).replace(own_name, "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", own_name, 1)
        return plain_type(self, dtype, **kwargs)

    for owner in (torch.Tensor, torch.nn.Module):
        _replace(owner, to=redirected(owner.to), cuda=stay if target.type == "cpu" else go)
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        setattr(torch.Tensor, name, redirected(getattr(torch.Tensor, name)))
    _replace(torch.Tensor, pin_memory=stay, type=type_name)
    if target.type == "cpu":
        # No stream could use the memory.
        _replace(torch.Tensor, record_stream=_answer(None))


def _take_sizes_as_tensors() -> None:
    """Let an all-to-all take the sizes of its parts as a tensor.

    Megatron makes numbers of such sizes only if they are on a GPU, and torch refuses a tensor.
    """
    plain = torch.distributed.all_to_all_single

    def listed(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(plain)
    def exchange(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        return plain(output, input, listed(output_split_sizes), listed(input_split_sizes), **kwargs)

    _replace(torch.distributed, all_to_all_single=exchange)


def _fence_data_loader() -> None:
    """Disable pinned memory, workers, and draws from the generator that also serves as the device's.

    `DataLoader.__iter__` draws a base seed. On a GPU that cannot change the CUDA generator; here it would, and a resumed
    run, which iterates anew, would not continue with the same dropout.
    """
    loader = torch.utils.data.DataLoader
    plain_init, plain_iter = loader.__init__, loader.__iter__

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        kwargs["num_workers"] = 0
        for name in ("persistent_workers", "prefetch_factor"):
            kwargs.pop(name, None)
        plain_init(self, *args, **kwargs)

    @functools.wraps(plain_iter)
    def iterate(self: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return plain_iter(self)
        finally:
            torch.set_rng_state(state)

    _replace(loader, __init__=init, __iter__=iterate)
