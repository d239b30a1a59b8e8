"""Quantizers: an operand (rows, K) to codes and a scale, value = code · scale.

A quantizer of your own writes `encode` in plain torch, or a `spec` in terms of the op `quantize`, which is what the
kernels understand.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from hot.policies.params import Params, registering
from hot.registry import Registry

Granularity = Literal["tensor", "row", "block", "token", "tile"]
Rounding = Literal["nearest", "hashed", "pseudo_stochastic", "stochastic"]


class Operand(NamedTuple):
    """One side of a product: codes (rows, K); scale, None where codes are values; group, K-block of a block scale, or 0."""

    codes: Tensor
    scale: Tensor | None
    group: int = 0


class Quantizer(Params):
    """How the values of an operand become codes. Subclass it and write `encode`, or `spec` for the op `quantize`."""

    @property
    def is_identity(self) -> bool:
        return False

    @property
    def scale_granularity(self) -> str:
        """What one scale covers; ``token`` lies on the contracted axis of grad_weight and cannot be factored out."""
        return "tensor"

    @property
    def code_bits(self) -> int:
        """Bits of one stored code."""
        return 8

    @property
    def spec(self) -> dict[str, Any] | None:
        """The arguments of the op `quantize` that mean this quantizer, or None: then it runs by its `encode`."""
        return None

    def encode(self, x: Tensor, ops: Any) -> Operand:
        """x (rows, K) float32 or float64 → its operand: codes and a float32 scale that broadcasts against them."""
        spec = self.spec
        if spec is None:
            raise NotImplementedError(f"{type(self).__name__} has neither a spec nor an encode()")
        codes, scale = ops.quantize(x, **spec)
        return Operand(codes, scale, spec["group"])

    def store(self, codes: Tensor, ops: Any) -> Tensor:
        """Codes as they are kept between forward and backward: two to a byte where they have four bits."""
        return ops.pack4(codes) if self.code_bits <= 4 else codes

    def restore(self, stored: Tensor, length: int, ops: Any) -> Tensor:
        """The inverse of `store`; length is K."""
        return ops.unpack4(stored, length) if self.code_bits <= 4 else stored


quantizers: Registry[type[Quantizer]] = Registry("quantizer")
register_quantizer = registering(quantizers, Quantizer)


@register_quantizer("none")
class NoQuantizer(Quantizer):
    """The values themselves, in the dtype of the gradient."""

    @property
    def is_identity(self) -> bool:
        return True

    def encode(self, x: Tensor, ops: Any) -> Operand:
        return Operand(x, None)


class _Scaled(Quantizer):
    """What the built-in kinds share.

    granularity: ``tensor``, ``row`` (factors out of the product, costs nothing), ``block`` (a row and `block` columns, applied
    inside the product's loop), ``tile`` (`block` rows and columns, likewise: made for weights) or ``token``. rounding:
    ``nearest``, ``hashed`` (unbiased, no state), ``pseudo_stochastic`` (noise from the value's own 11 low mantissa bits, which
    a bfloat16 value that nothing transformed has as zeros: it is then rounded down) or ``stochastic`` (torch.manual_seed).
    """

    granularity: Granularity = "tensor"
    block: int = Field(default=128, ge=16, le=65536)
    rounding: Rounding = "nearest"

    @property
    def scale_granularity(self) -> str:
        return self.granularity

    def __str__(self) -> str:
        name = getattr(self, "format", f"{self.kind}{self.code_bits}")
        size = f" {self.block}" if self.granularity in ("block", "tile") else ""
        return f"{name} {self.granularity}{size} {self.rounding}"

    def _spec(self, format: str, clip: tuple[float, ...] = ()) -> dict[str, Any]:
        group = self.block if self.granularity in ("block", "tile") else 0
        return {
            "format": format, "granularity": self.granularity, "group": group, "rounding": self.rounding, "clip": clip,
        }  # fmt: skip


@register_quantizer("int")
class Int(_Scaled):
    """Symmetric integers of 2 to 8 bits: the largest magnitude of a group maps to 2^(bits−1) − 1."""

    bits: int = Field(default=8, ge=2, le=8)

    @property
    def code_bits(self) -> int:
        return self.bits

    @cached_property
    def spec(self) -> dict[str, Any]:
        return self._spec(f"int{self.bits}")


@register_quantizer("sawb")
class Sawb(_Scaled):
    """Statistics-aware weight binning: integers whose range is clipped at c₁·√E[x²] − c₂·E|x| (J. Choi et al., MLSys 2019).

    coefficients: (c₁, c₂); left out, those fitted for `bits`. A clip outside (0, max |x|) falls back to max |x|.
    """

    bits: int = Field(default=4, ge=2, le=8)
    coefficients: tuple[float, float] | None = None

    @property
    def code_bits(self) -> int:
        return self.bits

    @cached_property
    def spec(self) -> dict[str, Any]:
        return self._spec(f"int{self.bits}", self.coefficients or SAWB_COEFFICIENTS[self.bits])


SAWB_COEFFICIENTS: dict[int, tuple[float, float]] = {
    2: (2.53, 1.61),
    3: (6.94, 6.31),
    4: (12.1, 12.2),
    5: (16.9, 17.8),
    6: (22.2, 24.0),
    7: (27.5, 30.3),
    8: (32.9, 36.7),
}
"""(c₁, c₂) by bits. 4 bits: as published. The others: least squares, over Gauss, Laplace, uniform, logistic, triangle and von
Mises values, of the clip with the least squared error (the same fit gives 11.8, 11.9 at 4 bits)."""


@register_quantizer("luq")
class Luq(_Scaled):
    """Logarithmic unbiased quantization: zero and ± powers of two, stochastic below the smallest and between two levels
    (B. Chmiel et al., ICLR 2023). The codes of the product are the powers themselves, so it is an exact integer product.
    Unlike the published code the range is max |x|, not max x.
    """

    bits: int = Field(default=4, ge=2, le=4)
    rounding: Rounding = "stochastic"

    @property
    def code_bits(self) -> int:
        return self.bits

    @cached_property
    def spec(self) -> dict[str, Any]:
        return self._spec(f"log{self.bits}")

    def store(self, codes: Tensor, ops: Any) -> Tensor:
        exponent = torch.frexp(codes.float()).exponent.to(torch.int8)  # 2^k → k + 1, and 0 → 0
        return ops.pack4(torch.where(codes < 0, -exponent, exponent))

    def restore(self, stored: Tensor, length: int, ops: Any) -> Tensor:
        exponent = ops.unpack4(stored, length)
        magnitude = (1 << exponent.abs().clamp_min(1) - 1).to(torch.int8)
        return magnitude * exponent.sign()


@register_quantizer("float8")
class Float8(_Scaled):
    """8-bit floats: e4m3 (finer) or e5m2 (wider). The largest magnitude of a group maps to the largest float."""

    format: Literal["e4m3", "e5m2"] = "e4m3"

    @cached_property
    def spec(self) -> dict[str, Any]:
        return self._spec(self.format)
