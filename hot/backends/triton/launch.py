"""What every launcher needs: the tensor's device, rows with two strides, tiles, facts of the chip."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hot.backends.triton import interpreted as interpreted

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def on_device(t: Tensor) -> AbstractContextManager[object]:
    """A context in which t's device is the current one: Triton launches there, on torch's current stream of it."""
    if not t.is_cuda or t.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(t.device)


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability (major, minor); (0, 0) for what is no GPU."""
    return _capability(_index(device)) if device.type == "cuda" else (0, 0)


def has_fp8(device: torch.device) -> bool:
    """Whether the tensor cores multiply float8: capability 8.9 and up."""
    return capability(device) >= (8, 9)


def multiprocessors(device: torch.device) -> int:
    """How many streaming multiprocessors there are; 1 for what is no GPU."""
    return _multiprocessors(_index(device)) if device.type == "cuda" else 1


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉. Triton's own, made for kernels too, costs a step many microseconds; so does its next_power_of_2."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()


class Rows(NamedTuple):
    """A tensor (…, L) as `number` rows of its last axis: row r at (r % fast)·stride + (r // fast)·far, elements `step` apart.

    `out_stride` and `out_far` are the same for a contiguous result of another length; `innermost` says that neighbouring rows
    are nearer in memory than neighbouring elements, as in the transposed view of a matrix.
    """

    x: Tensor
    number: int
    fast: int
    stride: int
    far: int
    step: int
    out_stride: int
    out_far: int
    innermost: bool


def rows_of(x: Tensor, out_length: int) -> Rows:
    """x (…, L) as rows; x is copied, once, only where its leading axes do not merge into two."""
    lead = _merged(x)
    if len(lead) > 2:
        x = x.contiguous()
        lead = _merged(x)
    (far_count, far), (fast, stride) = [(1, 0)] * (2 - len(lead)) + lead
    out_stride, out_far = out_length, out_length * fast
    if far_count > 1 and (fast == 1 or 0 < far < stride):  # the tile runs along the nearer rows
        far_count, far, fast, stride = fast, stride, far_count, far
        out_stride, out_far = out_far, out_stride
    step = x.stride(-1) if x.shape[-1] > 1 else 1
    return Rows(x, far_count * fast, fast, stride, far, step, out_stride, out_far, 0 < stride < step and fast > 1)


def _merged(x: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of x's leading axes, outermost first, neighbours that are evenly spaced as one."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


def tile(count: int, length: int, elements: int, innermost: bool) -> tuple[int, int]:
    """(rows, columns) of a tile of about `elements`, powers of two, at least 2 columns, for a matrix (count, length).

    8 rows where the columns are contiguous, so that what is worked out per column serves eight; 32 where the rows are.
    """
    every = power_of_2(count)
    rows = min(every, 32 if innermost else 8)
    columns = min(max(power_of_2(length), 2), max(elements // rows, 2))
    return min(every, max(elements // columns, 1)), columns


Specimen = tuple[Any, dict[str, str], dict[str, Any]]
"""A kernel, the types of its arguments, its constants: a module's ``SPECIMENS`` are what tests compile without a GPU."""


def specimen(kernel: Any, pointers: dict[str, str], **constants: Any) -> Specimen:
    """A specimen from the pointers' types, such as ``{"x": "*bf16"}``; what is left are whole numbers."""
    numbers = {name: "i32" for name in kernel.arg_names if name not in pointers and name not in constants}
    return kernel, {**numbers, **pointers}, constants


INTERPRETED = interpreted()


class Launch:
    """``kernel[(programs,)](*tensors, *numbers, **constants)``, again and again, for a fraction of what Triton's own launch
    costs the host: all that it specializes on is settled but for the device and the tensors' alignment.

    A kernel's parameters stand in this order: tensors (or descriptors of tiles), of the same dtypes at every call, then
    numbers, then constexprs. constants: the constexprs and the launch options.
    """

    def __init__(self, kernel: Any, programs: int, numbers: Sequence[int], **constants: Any) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, (programs, 1, 1), tuple(numbers), constants
        self._tail = *self.numbers, *(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[tuple[int, ...], Any] = {}

    def __call__(self, *tensors: Any) -> None:
        if INTERPRETED:
            self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
            return
        key = torch.cuda.current_device(), *[t.data_ptr() % 16 for t in tensors if isinstance(t, Tensor)]
        found = self._compiled.get(key)
        if found is None:
            self._compiled[key] = self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
        else:
            found[self.grid](*tensors, *self._tail)
