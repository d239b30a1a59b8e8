"""What every launcher of Triton's kernels needs: tiles, what of them is compiled in tests, launches again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hot.backends.layouts import power_of_2
from hot.backends.triton import interpreted


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
Config = dict[str, int]
Made = TypeVar("Made")


class Launch:
    """``kernel[(programs,)](*tensors, *numbers, **constants)``, again and again, for a fraction of what Triton's own launch
    costs the host: all that it specializes on is settled but for the device and the tensors' alignment, and what it compiled
    is run with bare pointers, on torch's current stream. Triton's launch hooks see the first launch only.

    A kernel's parameters stand in this order: tensors (or descriptors of tiles), of the same dtypes at every call, then
    numbers, then constexprs. constants: the constexprs and the launch options.
    """

    def __init__(self, kernel: Any, programs: int, numbers: Sequence[float], **constants: Any) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, (programs, 1, 1), tuple(numbers), constants
        self._tail = *self.numbers, *(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[tuple[int, ...], Any] = {}

    def __call__(self, *tensors: Any) -> None:
        if INTERPRETED:
            self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
            return
        device = torch.cuda.current_device()
        given = [t.data_ptr() if isinstance(t, Tensor) else t for t in tensors]
        found = self._compiled.get(key := (device, *[p % 16 for p in given if type(p) is int]))
        if found is None:
            self._compiled[key] = self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        found.run(*self.grid, stream, found.function, found.packed_metadata, None, None, None, *given, *self._tail)


def by_settings(make: Callable[[Config], Made]) -> Callable[[Config], Made]:
    """``make(settings)``, kept for each settings of a family: there are few, and each stays the same object."""
    kept: dict[int, tuple[Config, Made]] = {}

    def get(settings: Config) -> Made:
        found = kept.get(id(settings))
        if found is None:  # with the settings, so that their id stays theirs
            found = kept[id(settings)] = settings, make(settings)
        return found[1]

    return get
