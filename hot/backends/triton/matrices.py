"""What the fused kernels are told: how a tensor is a matrix to them, and what is made of it as an operand."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hot.backends.layouts import cdiv, power_of_2
from hot.backends.reference.transforms import basis
from hot.backends.transforms import IDENTITY, held_gain


class Matrix(NamedTuple):
    """How the kernels see a tensor: `samples` × `length` rows, `columns` dense, the whole of it `pieces` times."""

    samples: int
    length: int
    columns: int
    pieces: int
    stride: int  # of a sample
    step: int  # of a row
    piece_stride: int

    @property
    def rows(self) -> int:
        return self.samples * self.length

    @property
    def outer(self) -> tuple[int, int]:
        """How many matrices of `length` × `columns` there are, and how far apart."""
        if self.samples == self.pieces == 1:
            return 1, self.length * self.step
        return (self.samples, self.stride) if self.pieces == 1 else (self.pieces, self.piece_stride)

    def merged(self, side: int) -> Matrix:
        """The same as one sample, where each begins behind the one before and with a block of its own."""
        if self.stride != self.length * self.step or self.length % side:
            return self
        return self._replace(samples=1, length=self.samples * self.length)

    def can_be_copied(self, size: int) -> bool:
        """Whether a copy engine takes tiles of it, where elements have so many bytes: its strides are units of 16."""
        strides = self.step * size, self.outer[1] * size
        return all(stride > 0 and stride % 16 == 0 for stride in strides)

    def tiles(self, x: Tensor, rows: int, columns: int) -> TensorDescriptor:
        """Its tiles (1, rows, columns), with zeros where they reach beyond it."""
        count, far = self.outer
        return TensorDescriptor(x, [count, self.length, self.columns], [far, self.step, 1], [1, rows, columns])


class Way(NamedTuple):
    """What one operand's transform and quantizer are to the kernels: arguments of their ops, `rank` where rows are drawn."""

    block: int  # 1: nothing is transformed
    rows: tuple[int, ...]
    signs: tuple[int, ...]
    rank: int
    drawn: bool
    format: str
    granularity: str  # empty for an operand that is not made
    group: int
    rounding: str

    @property
    def side(self) -> int:
        """The side of the blocks that are cut."""
        return IDENTITY if self.block == 1 else self.block

    @property
    def kept(self) -> int:
        """How many coefficients a block makes."""
        return IDENTITY if self.block == 1 else self.rank

    @property
    def width(self) -> int:
        """That as a side of a product."""
        return max(power_of_2(self.kept), 8)

    @property
    def gain(self) -> float:
        """What the basis does not hold of the gain 1/√size."""
        size = self.rank if self.drawn else self.block
        return float(size**-0.5 / held_gain(size))

    def drawn_basis(self, draw: Tensor, x: Tensor) -> Tensor:
        """`held_basis` of the rows that were drawn."""
        return basis(self.block, self.rows, self.signs, draw, x.new_empty(0)) * held_gain(self.rank)

    @property
    def tile(self) -> int:
        """How many elements of the axis make one group of a block scale."""
        return self.group // self.kept * self.side

    @property
    def scaled_by(self) -> str:
        """The granularity, where the largest magnitude must be known before the first code."""
        return "" if self.granularity in ("block", "tile") else self.granularity

    def k(self, length: int) -> int:
        """The part of K that `length` elements make."""
        return length if self.block == 1 else cdiv(length, self.block) * self.rank

    def factors(self, rows: int) -> int:
        """How many factors `scales_kernel` makes for so many rows."""
        return {"": 0, "row": rows, "tensor": 1}[self.scaled_by]
