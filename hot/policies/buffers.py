"""Buffers: what forward keeps of the input until backward, and how grad_weight's operand is made of it."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, field_validator
from torch import Tensor

from hot.policies.encode import encode
from hot.policies.params import Params, registering
from hot.policies.quantizers import Int, Operand, Quantizer, quantizers
from hot.policies.transforms import NoTransform, Transform
from hot.registry import Registry

UNTRANSFORMED = NoTransform()
"""Made once, its spec too: torch.compile can't trace either."""
_ = UNTRANSFORMED.spec


class Buffer(Params):
    """What is saved of x (rows, samples, length), one row an input channel, any strides. Subclass it, write both ends.

    recompute: save nothing where an `activations:` rule keeps codes that x can be made of again (those of the GELU before it).

    `transform` and `quantizer` are those of grad_weight's input operand, `draw` the transform's draw of this step or None,
    `ops` the op table of the backend that runs the layer.
    """

    recompute: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without `recompute` where it is off."""
        return {name: value for name, value in super().to_dict().items() if name != "recompute" or value}

    @property
    def is_packed(self) -> bool:
        """Whether `load` gives the finished operand; then the tokens of x must be the tokens of the product."""
        return False

    def save(
        self, x: Tensor, transform: Transform, quantizer: Quantizer, ops: Any, draw: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The tensors to keep. Their shapes and dtypes depend on x's shape and dtype and on the plan alone."""
        raise NotImplementedError

    def load(
        self,
        saved: tuple[Tensor, ...],
        shape: tuple[int, int, int],
        transform: Transform,
        quantizer: Quantizer,
        ops: Any,
    ) -> Tensor | Operand:
        """x again: its values (rows, samples, length), or the operand that grad_weight's product consumes."""
        raise NotImplementedError


buffers: Registry[type[Buffer]] = Registry("buffer")
register_buffer = registering(buffers, Buffer)


@register_buffer("raw")
class Raw(Buffer):
    """x as it is: what torch saves."""

    def save(
        self, x: Tensor, transform: Transform, quantizer: Quantizer, ops: Any, draw: Tensor | None
    ) -> tuple[Tensor, ...]:
        return (x,)

    def load(
        self,
        saved: tuple[Tensor, ...],
        shape: tuple[int, int, int],
        transform: Transform,
        quantizer: Quantizer,
        ops: Any,
    ) -> Tensor | Operand:
        return saved[0]


@register_buffer("quantized")
class Quantized(Buffer):
    """Codes of x before any transform; backward dequantizes them, transforms and quantizes for the product.

    quantizer: how x is stored, a quantizer block such as ``{kind: int, bits: 8, granularity: row}``.
    """

    quantizer: Quantizer = Field(default_factory=lambda: Int(bits=8, granularity="row"))

    @field_validator("quantizer", mode="before")
    @classmethod
    def _by_kind(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        params = dict(value)
        return quantizers[params.pop("kind", "int")].model_validate(params)

    def __str__(self) -> str:
        return str(self.quantizer) + ", recomputed" * self.recompute

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "quantizer": self.quantizer.to_dict()}

    def save(
        self, x: Tensor, transform: Transform, quantizer: Quantizer, ops: Any, draw: Tensor | None
    ) -> tuple[Tensor, ...]:
        codes, scale, _ = encode(x, UNTRANSFORMED, self.quantizer, ops)
        return (codes,) if scale is None else (self.quantizer.store(codes, ops), scale)

    def load(
        self,
        saved: tuple[Tensor, ...],
        shape: tuple[int, int, int],
        transform: Transform,
        quantizer: Quantizer,
        ops: Any,
    ) -> Tensor | Operand:
        return self.values(saved, shape[1] * shape[2], torch.float32, ops).view(shape)

    @property
    def is_plain(self) -> bool:
        """Whether `keep` gives codes as the ops read them, and their scale: not values, nor codes that are stored otherwise."""
        return self.quantizer.spec is not None and type(self.quantizer).store is Quantizer.store

    def keep(self, x: Tensor, ops: Any) -> tuple[Tensor, ...]:
        """What is kept of values (rows, K): their codes and scale, or they themselves where there are none."""
        spec = self.quantizer.spec
        if spec is not None and self.is_plain and self.quantizer.code_bits <= 4:
            packed: tuple[Tensor, Tensor] = ops.quantize_pack4(x, **spec)
            return packed
        codes, scale, _ = self.quantizer.encode(x, ops)
        return (codes,) if scale is None else (self.quantizer.store(codes, ops), scale)

    def values(self, kept: tuple[Tensor, ...], length: int, dtype: torch.dtype, ops: Any) -> Tensor:
        """The values (rows, length) again, in dtype; those that were kept as they are, in their own."""
        if len(kept) == 1:
            return kept[0]
        codes = self.quantizer.restore(kept[0], length, ops)
        spec = self.quantizer.spec
        values: Tensor = ops.dequantize(codes, kept[1], spec["group"] if spec else 0, dtype)
        return values


@register_buffer("packed")
class Packed(Buffer):
    """Exactly what grad_weight's product consumes: x projected and quantized, 4-bit codes two to a byte."""

    @property
    def is_packed(self) -> bool:
        return True

    def save(
        self, x: Tensor, transform: Transform, quantizer: Quantizer, ops: Any, draw: Tensor | None
    ) -> tuple[Tensor, ...]:
        codes, scale, _ = encode(x, transform, quantizer, ops, draw)
        if scale is None:  # values: no wider than x itself
            return (codes.to(x.dtype),)
        return quantizer.store(codes, ops), scale

    def load(
        self,
        saved: tuple[Tensor, ...],
        shape: tuple[int, int, int],
        transform: Transform,
        quantizer: Quantizer,
        ops: Any,
    ) -> Tensor | Operand:
        if len(saved) == 1:
            return Operand(saved[0], None)
        spec = quantizer.spec
        k = shape[1] * transform.projected_length(shape[2])
        return Operand(quantizer.restore(saved[0], k, ops), saved[1], spec["group"] if spec else 0)
