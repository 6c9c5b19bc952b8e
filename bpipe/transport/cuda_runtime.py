"""Calls of the CUDA runtime that torch has loaded.

One process may hold several runtimes, and each has a current device and a last error of its own. So the functions are
looked up through torch's own extension module, in whatever it was linked with. That needs no package of bindings, which
could be for another CUDA than torch's.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

# Source, target, bytes.
Copy = tuple[int, int, int]

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
_COPY_BY_ADDRESS = 4  # cudaMemcpyDefault: a partner's address or one's own, only CUDA can tell
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_SOURCE_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_BESIDE_COMPUTE = 1  # cudaMemcpyFlagPreferOverlapWithCompute
# cudaMemcpyBatchAsync came with CUDA 12.8; in 13.0 it lost the argument that told which copy failed.
_BATCHES_SINCE = 12080
_NO_FAILED_INDEX_SINCE = 13000


class CudaError(RuntimeError):
    """A call that failed. `status` is CUDA's error code."""

    def __init__(self, call: str, status: int, name: str) -> None:
        super().__init__(f"{call} failed: {name}")
        self.status = status


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("raw", ctypes.c_ubyte * HANDLE_BYTES),)


class _Location(ctypes.Structure):
    """cudaMemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes. The two locations are hints for managed memory only and stay empty."""

    _fields_ = (("source_order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


_ADDRESS, _SIZE, _POINTER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaRuntimeGetVersion": (_POINTER,),
    "cudaDriverGetVersion": (_POINTER,),
    "cudaGetLastError": (),
    "cudaSetDevice": (ctypes.c_int,),
    "cudaDeviceSynchronize": (),
    "cudaStreamIsCapturing": (_ADDRESS, _POINTER),
    "cudaMemGetInfo": (_POINTER, _POINTER),
    "cudaMalloc": (_POINTER, _SIZE),
    "cudaFree": (_ADDRESS,),
    "cudaIpcGetMemHandle": (_POINTER, _ADDRESS),
    "cudaIpcOpenMemHandle": (_POINTER, _Handle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (_ADDRESS,),
    "cudaHostRegister": (_ADDRESS, _SIZE, ctypes.c_uint),
    "cudaHostUnregister": (_ADDRESS,),
    "cudaMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, ctypes.c_int, _ADDRESS),
}
_BATCH = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE)


class CudaRuntime:
    """The CUDA runtime calls that transports need. Every error is raised, and cleared as CUDA's last error.

    Torch reads the last error after every kernel launch, so one that was left there would surface in the middle of the
    model, as torch's own.
    """

    def __init__(self, library: Any) -> None:
        """`library` has the functions as attributes, as `ctypes.CDLL` does. Raises RuntimeError if one is missing."""
        self._library = library
        try:
            self._functions = {name: self._bound(name, types) for name, types in SIGNATURES.items()}
            self._name_of = library.cudaGetErrorName
        except AttributeError as error:
            raise RuntimeError(f"this torch ({torch.__version__}) includes no CUDA runtime: {error}") from error
        self._name_of.argtypes, self._name_of.restype = (ctypes.c_int,), ctypes.c_char_p
        self._batch = self._batch_call()

    def _bound(self, name: str, types: tuple[Any, ...]) -> Callable[..., int]:
        function = getattr(self._library, name)
        function.argtypes, function.restype = types, ctypes.c_int
        return function  # type: ignore[no-any-return]

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            self._fail(name, status)

    def _fail(self, name: str, status: int) -> None:
        self._functions["cudaGetLastError"]()
        raise CudaError(name, status, self._name_of(status).decode())

    def _number(self, name: str) -> int:
        number = ctypes.c_int()
        self._call(name, ctypes.byref(number))
        return number.value

    def _address(self, name: str, *arguments: Any) -> int:
        address = ctypes.c_void_p()
        self._call(name, ctypes.byref(address), *arguments)
        return address.value or 0

    @functools.cached_property
    def version(self) -> int:
        """Version of this CUDA library: 1000 times the major version plus 10 times the minor one."""
        return self._number("cudaRuntimeGetVersion")

    @functools.cached_property
    def driver_version(self) -> int:
        """Version of the newest CUDA that the driver knows; 0 without a driver."""
        return self._number("cudaDriverGetVersion")

    def set_device(self, index: int) -> None:
        """Make this thread allocate and open on that device from now on."""
        self._call("cudaSetDevice", index)

    def synchronize(self) -> None:
        """Wait until the current device is idle: for ever if a kernel on it never ends."""
        self._call("cudaDeviceSynchronize")

    def is_capturing(self, stream: int) -> bool:
        """Whether what the stream is given is captured into a graph instead of run."""
        status = ctypes.c_int()
        self._call("cudaStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != 0

    def memory(self) -> tuple[int, int]:
        """Return the current device's free and total bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, nbytes: int) -> int:
        return self._address("cudaMalloc", nbytes)

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def handle_of(self, address: int) -> bytes:
        """Return the handle by which another process opens what was allocated here."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.raw)

    def open_handle(self, handle: bytes) -> int:
        return self._address("cudaIpcOpenMemHandle", _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def close_handle(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def lock(self, address: int, nbytes: int) -> None:
        """Keep the host's pages where they are, so that a device copies to and from them by itself."""
        self._call("cudaHostRegister", address, nbytes, 0)

    def unlock(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def copy(self, copies: Sequence[Copy], stream: int) -> None:
        """Start these copies on a stream, in any order among themselves: by one call if CUDA has one for it."""
        # The default stream takes no batches, and nothing in a step runs there. A graph has no node for one.
        if self._batch is not None and stream and len(copies) > 1 and not self.is_capturing(stream):
            self._batch(copies, stream)
            return
        for source, target, nbytes in copies:
            self._call("cudaMemcpyAsync", target, source, nbytes, _COPY_BY_ADDRESS, stream)

    def _batch_call(self) -> Callable[[Sequence[Copy], int], None] | None:
        """Return the call for many copies at once; None if this CUDA, or the driver under it, has none.

        340 single calls would take as long as a layer's forward.
        """
        if min(self.version, self.driver_version) < _BATCHES_SINCE:
            return None
        failed = () if self.version >= _NO_FAILED_INDEX_SINCE else (ctypes.byref(ctypes.c_size_t()),)
        function = self._bound("cudaMemcpyBatchAsync", (*_BATCH, *(_POINTER for _ in failed), _ADDRESS))
        attributes, first = _Attributes(source_order=_SOURCE_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE), ctypes.c_size_t(0)

        def batch(copies: Sequence[Copy], stream: int) -> None:
            number = len(copies)
            sources, targets, lengths = zip(*copies, strict=True)
            status = function(
                (ctypes.c_void_p * number)(*targets),
                (ctypes.c_void_p * number)(*sources),
                (ctypes.c_size_t * number)(*lengths),
                number,
                ctypes.byref(attributes),
                ctypes.byref(first),
                1,
                *failed,
                stream,
            )
            if status:
                self._fail("cudaMemcpyBatchAsync", status)

        return batch


# By device type, the library with the runtime that torch uses for it. A look-up in it goes on into everything that it
# was linked with.
LIBRARIES: dict[str, str] = {"cuda": torch._C.__file__}


@functools.cache
def runtime(device_type: str = "cuda") -> CudaRuntime:
    """Return torch's own CUDA runtime. Raises RuntimeError if torch was built without it."""
    return CudaRuntime(ctypes.CDLL(LIBRARIES[device_type]))


def current_stream(device_type: str) -> int:
    """Return the current stream as its runtime knows it."""
    # torch.Stream.native_handle came only with torch 2.12.
    if device_type == "cuda":
        return int(torch.cuda.current_stream().cuda_stream)
    return int(cast(Any, torch.accelerator.current_stream()).native_handle)


def is_capturing(device: torch.device) -> bool:
    """Whether what is issued now is captured into a CUDA graph: it runs when that is replayed, and not before."""
    return device.type in LIBRARIES and runtime(device.type).is_capturing(current_stream(device.type))
