"""What is kept of an op's input: codes of a matrix whose rows run along memory, and the way back to the tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from hot.backends import get_ops
from hot.policies.buffers import Quantized
from hot.recipes import Recipe
from hot.sharing import shared


class Layout:
    """How a tensor of a shape is a matrix (-1, k): its axes in this order, the last ones as columns. From `layout_of` and
    `rows_of`, which give equal ones as one object."""

    def __init__(self, shape: torch.Size, order: tuple[int, ...], k: int) -> None:
        self.shape, self.order, self.k = shape, order, k
        self.matrix_shape = torch.Size((shape.numel() // k if k else 0, k))
        steps, step = [0] * len(order), 1
        for axis in reversed(order):
            steps[axis], step = step, step * shape[axis]
        self.strides = tuple(steps)
        """Of a tensor that is this matrix, and nothing between its rows."""

    def matrix(self, t: Tensor) -> Tensor:
        """t, of the tensor's shape, as the matrix: a view where it lies in memory so."""
        if t.stride() == self.strides:
            return t.as_strided(self.matrix_shape, (self.k, 1))
        return t.permute(self.order).reshape(-1, self.k)

    def tensor(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`: a view."""
        if matrix.is_contiguous():
            return matrix.as_strided(self.shape, self.strides)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return matrix.view([self.shape[axis] for axis in self.order]).permute(back)


_layout = lru_cache(maxsize=4096)(Layout)


@lru_cache(maxsize=4096)
def layout_of(shape: torch.Size, strides: tuple[int, ...]) -> Layout:
    """Axes from the farthest to the nearest in memory, and as few of them as columns as lets the others be evenly spaced rows:
    (B, heads, T, d), cut out of one projection (B, T, 3 · heads · d), is a matrix (B · T, heads · d). Of short columns, which
    a scale each would make large, more: (B, C, 7, 7) is (B · C, 49)."""
    order = tuple(sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis)))
    sizes, steps = [shape[axis] for axis in order], [strides[axis] for axis in order]
    found = sizes[-1]
    for first in range(1, len(order)):
        k = math.prod(sizes[first:])
        even = _is_even(sizes[:first], steps[:first]) and _is_even(sizes[first:], steps[first:])
        if even and (k >= FEWEST_COLUMNS or k > found):
            found = k
    return _layout(shape, order, found)


FEWEST_COLUMNS = 32


def _is_even(sizes: list[int], steps: list[int]) -> bool:
    """Whether axes, from the farthest to the nearest, merge into one of even steps."""
    axes = [(n, step) for n, step in zip(sizes, steps, strict=True) if n > 1]
    return all(a[1] == b[0] * b[1] for a, b in pairwise(axes))


def rows_of(shape: torch.Size, k: int) -> Layout:
    """The layout whose rows are runs of k elements, as torch counts them: those of a norm."""
    return _layout(shape, tuple(range(len(shape))), k)


@lru_cache(maxsize=4096)
def channels_of(shape: torch.Size, strides: tuple[int, ...]) -> Layout | None:
    """The layout whose rows are pixels, or samples, with their channels, of a tensor (samples, channels, …) that lies so
    in memory; None of one that does not."""
    found = _layout(shape, layout_of(shape, strides).order, shape[1]) if len(shape) >= 2 and strides[1] == 1 else None
    dense = found is not None and all(n < 2 or a == b for n, a, b in zip(shape, strides, found.strides, strict=True))
    return found if dense else None


@dataclass(frozen=True, eq=False)
class Kept:
    """How a tensor of a layout and dtype is kept between forward and backward. Equal ones are one object."""

    layout: Layout
    dtype: torch.dtype
    buffer: Quantized
    backend: str

    @staticmethod
    def of(x: Tensor, buffer: Quantized, backend: str, layout: Layout | None = None) -> Kept:
        return _kept(layout or layout_of(x.shape, x.stride()), x.dtype, buffer, backend)

    def save(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tensors that stand for x; ops that read one x share them."""

        def make() -> tuple[Tensor, ...]:
            return self.buffer.keep(self.layout.matrix(x.detach()), get_ops(self.backend, x.device.type))

        return shared(x, self, make)

    def recipe(self, x: Tensor) -> Recipe:
        return Recipe(self.save(x), self.values)

    @property
    def group(self) -> int:
        spec = self.buffer.quantizer.spec
        return spec["group"] if spec else 0

    def values(self, tensors: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> Tensor:
        """x again, from what its tensors became: autograd hands other objects back."""
        ops = get_ops(self.backend, tensors[0].device.type)
        return self.layout.tensor(self.buffer.values(tensors, self.layout.k, dtype or self.dtype, ops))

    def rows(self, tensors: tuple[Tensor, ...], some: slice, dtype: torch.dtype) -> Tensor:
        """Some rows of the matrix that x is."""
        part = tuple(t[some] if t.shape[0] > 1 else t for t in tensors)  # one scale is that of all rows
        return self.buffer.values(part, self.layout.k, dtype, get_ops(self.backend, tensors[0].device.type))


_kept = lru_cache(maxsize=4096)(Kept)


def can_keep(*tensors: object) -> bool:
    """Whether codes are made of these: plain tensors of floats."""
    return all(type(x) is Tensor and x.is_floating_point() and x.dim() and x.numel() for x in tensors)
