"""matmul: the product of two quantized operands, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hot.backends.ops import INT32_TERMS, factors_out
from hot.backends.reference.quantization import dequantize
from hot.backends.table import REFERENCE, register_kernel

FLOAT32_TERMS = 2**24 // 128**2
"""So many sum exactly in float32."""


def _int_mm_is_exact() -> bool:
    """Whether torch._int_mm is right on this CPU: without VNNI its sums of two products saturate at 16 bits."""
    codes = torch.full((32, 64), 127, dtype=torch.int8, device="cpu")
    return bool((torch._int_mm(codes, codes.T) == 64 * 127**2).all())


INT_MM_ON_CPU = _int_mm_is_exact()


def integer_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """(M, K) int8 @ (N, K) int8ᵀ, exact, → (M, N) in dtype (float32 or float64, to which the exact sum is rounded).

    Equals: (a.double() @ b.double().T).to(dtype)
    """
    # a longer contraction than fits is summed in pieces
    product, terms = (_int32_product, INT32_TERMS) if a.is_cuda or INT_MM_ON_CPU else (_float32_product, FLOAT32_TERMS)
    pieces = map(product, a.split(terms, 1), b.split(terms, 1))
    total = next(pieces)
    for piece in pieces:
        total = total.double() + piece
    return total.to(dtype)


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float().T


def _int32_product(a: Tensor, b: Tensor) -> Tensor:
    """torch._int_mm under its own limits: on CUDA M > 16 and K, N multiples of 8, so zeros are added and cut off again;
    on the CPU it is wrong for K = 1, and where a stride is smaller than the row (pytorch/pytorch#195066)."""
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    if a.is_cuda:
        a = F.pad(a, (0, -k % 8, 0, max(17 - m, 0)))
        b = F.pad(b, (0, -k % 8, 0, -n % 8))
    elif k == 1:
        a, b = F.pad(a, (0, 1)), F.pad(b, (0, 1))
    a, b = (codes.reshape(-1).view(codes.shape) for codes in (a, b))  # contiguous() leaves the stride of a single row
    return torch._int_mm(a, b.T)[:m, :n]


@register_kernel("matmul", backend=REFERENCE)
def matmul(
    a: Tensor, a_scale: Tensor, a_group: int, b: Tensor, b_scale: Tensor, b_group: int, dtype: torch.dtype
) -> Tensor:
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    if a.dtype == b.dtype and factors_out(a_scale, a_group) and factors_out(b_scale, b_group):
        integers = a.dtype == torch.int8 and a.numel() and b.numel()
        product = integer_product(a, b, compute) if integers else a.to(compute) @ b.to(compute).T
        return product.mul_(a_scale).mul_(b_scale.T).to(dtype)
    return (dequantize(a, a_scale, a_group, compute) @ dequantize(b, b_scale, b_group, compute).T).to(dtype)
