"""One side of a product: what a transform and a quantizer make of a tensor, and what the product consumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from hot.policies.quantizers import Quantizer
    from hot.policies.transforms import Transform


class Operand(NamedTuple):
    """Codes (rows, K) and their scale (None: the codes are the values); group: K-block of a block scale, else 0."""

    codes: Tensor
    scale: Tensor | None
    group: int = 0


def encode(x: Tensor, transform: Transform, quantizer: Quantizer, ops: Any, draw: Tensor | None = None) -> Operand:
    """x (rows, samples, length), any strides → its operand (rows, K): transform, then quantize, fused where ops can.

    A transform or quantizer without a spec (a plug-in in plain torch) runs as written, between the ops that remain.
    """
    how, what = transform.spec, quantizer.spec
    if how is None or what is None:
        return quantizer.encode(transform.project(x, ops, draw).flatten(1), ops)
    codes, scale = ops.transform_quantize(x, **how, draw=draw, **what)
    return Operand(codes, scale, what["group"])
