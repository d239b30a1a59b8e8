"""Launching kernels: one struct by value, packed by the host, on torch's current device and stream.

    # struct Params { const float* x; float* out; long long n; };
    copy = Kernel(Path("copy.cu"), "copy_kernel", ("float",), "@QQq")
    copy(blocks, 256, x.data_ptr(), out.data_ptr(), x.numel())

CuPy is imported when a kernel is first used, and only its bindings of NVRTC and of the driver are: no cupy.ndarray, and none of
its ideas of the current device and stream, which are torch's here.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hot.backends.cupy.compile import compiled, size_of
from hot.errors import BackendError

NUMBERS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The floats that kernels take, as C++ spells them."""

Grid = int | tuple[int, ...]
_lock = threading.Lock()


class Kernel:
    """One instance of a ``template <…> __global__ void name(Params)`` in a source: a file of HOT's ``kernels`` folder by its
    name, or any other by its Path; both may include the headers of that folder. It is read and compiled at the first launch.

    template: its arguments, as C++ spells them; empty: not a template. layout: the fields of Params for the `struct` module,
    in native alignment: ``"@QQi"`` is two pointers and an int. cooperative: blocks wait for each other, so all must run at
    once; a grid that is too large for that is not launched.
    """

    def __init__(
        self, source: str | Path, name: str, template: tuple[str, ...], layout: str, cooperative: bool = False
    ) -> None:
        self.source = source.absolute() if isinstance(source, Path) else source
        self.layout, self.cooperative = layout, cooperative
        self.name = f"{name}<{', '.join(template)}>" if template else name
        self._pack = struct.Struct(f"{layout}0Q").pack
        self._loaded: dict[int, _Loaded] = {}

    def __repr__(self) -> str:
        return f"{self.source}: {self.name}"

    def __call__(self, grid: Grid, block: Grid, *values: Any, shared: int = 0) -> None:
        """Launch on the current device and stream: `grid` blocks of `block` threads, numbers or up to three of them.

        values: one for each field of the layout. shared: bytes of dynamic shared memory. Raises BackendError if it does not
        compile or cannot be launched so.
        """
        device = _current_device()
        loaded = self._loaded.get(device)
        if loaded is None:
            loaded = self._load(device)
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        tx, ty, tz = (block, 1, 1) if isinstance(block, int) else (*block, 1, 1)[:3]
        # the driver wants the address of a table of the parameters' addresses, and copies them before it returns
        table = ctypes.c_char_p(self._pack(*values))
        try:
            if shared > loaded.shared:
                loaded.allow(shared)
            where = loaded.function, x, y, z, tx, ty, tz, shared, _current_stream(device), ctypes.addressof(table)
            if self.cooperative:
                loaded.driver.launchCooperativeKernel(*where)
            else:
                loaded.launch(*where, 0)
        except RuntimeError as error:
            if not loaded.enter():
                what = f"grid {grid}, block {block}, {shared} bytes of shared memory"
                raise BackendError(f"{self} was not launched with {what}: {error}") from error
            self(grid, block, *values, shared=shared)

    def load(self) -> _Loaded:
        """Compile and load for the current device, if that has not happened yet."""
        device = _current_device()
        return self._loaded.get(device) or self._load(device)

    def _load(self, device: int) -> _Loaded:
        with _lock:
            if device not in self._loaded:
                chip = torch.cuda.get_device_capability(device)
                code = compiled(self.source, self.name, size_of(self.layout), chip)
                try:
                    with _harmless_to_captures():
                        self._loaded[device] = _Loaded(code.name, code.image)
                except RuntimeError as error:
                    raise BackendError(f"{self} was not loaded: {error}") from error
        return self._loaded[device]


def fits(t: Tensor, chunk: int, *offsets: int) -> bool:
    """Whether chunks of so many elements, at multiples of these offsets, may be moved in one access."""
    return t.data_ptr() % (chunk * t.element_size()) == 0 and all(offset % chunk == 0 for offset in offsets)


class _Loaded:
    """A kernel in the memory of a device."""

    def __init__(self, name: str, image: bytes) -> None:
        from cupy_backends.cuda.api import driver

        self.driver, self.launch, self.shared = driver, driver.launchKernel, 0
        if not driver.ctxGetCurrent():  # a thread that has not asked the runtime for anything yet
            torch.cuda.mem_get_info()
        self.context = driver.ctxGetCurrent()
        self.module = driver.moduleLoadData(image)
        self.function = driver.moduleGetFunction(self.module, name)

    def allow(self, shared: int) -> None:
        """Let the kernel have so many bytes of dynamic shared memory."""
        attribute = self.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.driver.funcSetAttribute(self.function, attribute, shared)
        self.shared = shared

    def enter(self) -> bool:
        """Make the device's context the thread's, if it has none yet: whether that was missing."""
        if self.driver.ctxGetCurrent():
            return False
        self.driver.ctxSetCurrent(self.context)
        return True


@contextmanager
def _harmless_to_captures() -> Iterator[None]:
    """Loading a module would end the capture of a CUDA graph, unless its thread says that it means no harm."""
    cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED; the call puts the old mode here
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


# None where torch is built without CUDA: there nothing is launched.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
