"""A transform and a quantizer, composed: from a tensor to one side of a product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hot.policies.quantizers import Operand, Quantizer
from hot.policies.transforms import Transform


def encode(
    x: Tensor,
    transform: Transform,
    quantizer: Quantizer,
    ops: Any,
    draw: Tensor | None = None,
    format: str | None = None,
) -> Operand:
    """x (rows, samples, length), any strides → its operand (rows, K): transform, then quantize, fused where ops can.

    format: another holder of the same codes than the quantizer's own. A transform or quantizer without a spec (a plug-in in
    plain torch) runs as written, between the ops that remain.
    """
    how, what = transform.spec, quantizer.spec
    if how is None or what is None:
        return quantizer.encode(transform.project(x, ops, draw).flatten(1), ops)
    codes, scale = ops.transform_quantize(
        x, **how, draw=draw, **(what if format is None else {**what, "format": format})
    )
    return Operand(codes, scale, what["group"])
