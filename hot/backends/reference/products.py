"""matmul: the product of two quantized operands, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hot.backends.reference.quantization import dequantize
from hot.backends.table import REFERENCE, register_kernel

INT32_TERMS = 2**31 // 128**2 // 16 * 16 - 16
"""So many products of two int8 codes always fit into int32; a longer contraction is summed in pieces."""


def integer_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """(M, K) int8 @ (N, K) int8ᵀ, exact, → (M, N) in dtype (float32 or float64, to which the exact sum is rounded).

    Equals: (a.double() @ b.double().T).to(dtype)
    """
    pieces = [
        _int32_product(a_piece, b_piece)
        for a_piece, b_piece in zip(a.split(INT32_TERMS, 1), b.split(INT32_TERMS, 1), strict=True)
    ]
    total = pieces[0] if len(pieces) == 1 else torch.stack(pieces).sum(0, dtype=torch.int64)
    return total.to(dtype)


def _int32_product(a: Tensor, b: Tensor) -> Tensor:
    """torch._int_mm under its own limits: on CUDA M > 16 and K, N multiples of 8, so zeros are added and cut off again."""
    if not a.is_cuda:
        return torch._int_mm(a, b.T)
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    a = F.pad(a, (0, -k % 8, 0, max(17 - m, 0)))
    b = F.pad(b, (0, -k % 8, 0, -n % 8))
    return torch._int_mm(a, b.T)[:m, :n]


def _factors_out(scale: Tensor, codes: Tensor, group: int) -> bool:
    """Whether a scale is constant along the contracted axis: one for all, or one a row."""
    return group == 0 and scale.shape[1] == 1


@register_kernel("matmul", backend=REFERENCE)
def matmul(
    a: Tensor, a_scale: Tensor, a_group: int, b: Tensor, b_scale: Tensor, b_group: int, dtype: torch.dtype
) -> Tensor:
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    integers = a.dtype == b.dtype == torch.int8
    if integers and _factors_out(a_scale, a, a_group) and _factors_out(b_scale, b, b_group) and a.shape[1]:
        return integer_product(a, b, compute).mul_(a_scale).mul_(b_scale.T).to(dtype)
    return (dequantize(a, a_scale, a_group, compute) @ dequantize(b, b_scale, b_group, compute).T).to(dtype)
