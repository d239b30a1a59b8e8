"""What HOT lets a package add: found through the entry point ``hot.plugins``, imported on first need."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from hot.backends import Backend, register_backend, register_kernel
from hot.policies.quantizers import Operand, Quantizer, register_quantizer
from hot.policies.transforms import Transform, register_transform


@register_quantizer("ternary")
class Ternary(Quantizer):
    """−1, 0 and 1: one scale a row, values within `threshold` of their mean magnitude become zero."""

    threshold: float = Field(default=0.7, ge=0)

    @property
    def scale_granularity(self) -> str:
        return "row"

    def encode(self, x: Tensor, ops: Any) -> Operand:
        magnitude = x.abs()
        kept = magnitude > self.threshold * magnitude.mean(1, keepdim=True)
        scale = (magnitude * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp_min(1)
        return Operand((x.sign() * kept).to(torch.int8), scale.float())


@register_transform("haar")
class Haar(Transform):
    """The orthonormal Haar wavelet transform of every block; block is a power of two."""

    block: int = 4

    def matrix(self) -> Tensor:
        h = torch.ones(1, 1, dtype=torch.float64)
        while h.shape[0] < self.block:
            averages = torch.kron(h, torch.tensor([[1.0, 1.0]], dtype=torch.float64))
            differences = torch.kron(torch.eye(h.shape[0]), torch.tensor([[1.0, -1.0]])).double()
            h = torch.cat([averages, differences])
        return h / h.norm(dim=1, keepdim=True)


register_backend(Backend("example", devices=("cpu",), probe=lambda: (True, "plain torch"), priority=1))


@register_kernel("pack4", backend="example")
def pack4(codes: Tensor) -> Tensor:
    """Two codes a byte, by arithmetic instead of bits."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return (codes[:, 0::2] % 16 + codes[:, 1::2] % 16 * 16).to(torch.uint8)
