"""matmul: the product of two quantized operands, by the products of torch's libraries.

    int8 × int8    scales a row or tensor   torch._int_mm, exact int32 sums, then scaled by kernels/products.cu
    e4m3 × e4m3    scales a row or tensor   torch._scaled_mm with exact accumulation, where the chip has float8 tensor cores
    e4m3 × e4m3    blocks × tiles of 128    likewise, on Hopper

cuBLAS is hard to beat at whole products, so none is written here; what it has not, scales of other K-blocks and operands of two
kinds, is left to others.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hot.backends.cupy.launch import NUMBERS, Kernel, fits
from hot.backends.devices import on_device
from hot.backends.float8 import blocks_product, fits_blocks, fits_rows, rows_product
from hot.backends.layouts import cdiv
from hot.backends.ops import INT32_TERMS, factors_out
from hot.backends.reference.products import int32_product
from hot.backends.table import register_kernel

LAYOUT = "@4Q3q3i"
"""Of struct Rescale."""
OUT = (torch.bfloat16, torch.float16, torch.float32)


@cache
def _rescale_kernel(dtype: torch.dtype) -> Kernel:
    return Kernel("products.cu", "rescale_kernel", (NUMBERS[dtype],), LAYOUT)


def _integers(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    sums = int32_product(a, b)
    (m, n), pitch = sums.shape, sums.stride(0)
    out = torch.empty((m, n), dtype=dtype, device=a.device)
    chunk = 16 // out.element_size()
    with on_device(a):
        _rescale_kernel(dtype)(
            min(cdiv(m * cdiv(n, chunk), 256), 2**30), 256,
            sums.data_ptr(), out.data_ptr(), a_scale.data_ptr(), b_scale.data_ptr(), m, n, pitch,
            int(a_scale.shape[0] > 1), int(b_scale.shape[0] > 1), fits(sums, chunk, pitch) and fits(out, chunk, n),
        )  # fmt: skip
    return out


def _serves(
    a: Tensor, a_scale: Tensor, a_group: int, b: Tensor, b_scale: Tensor, b_group: int, dtype: torch.dtype
) -> bool:
    """float64 is the reference's."""
    if not (a.numel() and b.numel() and dtype in OUT):
        return False
    if factors_out(a_scale, a_group) and factors_out(b_scale, b_group):
        return (a.dtype == b.dtype == torch.int8 and a.shape[1] <= INT32_TERMS) or fits_rows(a, b)
    return fits_blocks(a, a_scale, a_group, b, b_scale, b_group, dtype)


@register_kernel("matmul", backend="cupy", supports=_serves)
def matmul(
    a: Tensor, a_scale: Tensor, a_group: int, b: Tensor, b_scale: Tensor, b_group: int, dtype: torch.dtype
) -> Tensor:
    a, b, a_scale, b_scale = a.contiguous(), b.contiguous(), a_scale.contiguous(), b_scale.contiguous()
    if a.dtype == torch.int8:
        return _integers(a, a_scale, b, b_scale, dtype)
    if factors_out(a_scale, a_group) and factors_out(b_scale, b_group):
        return rows_product(a, a_scale, b, b_scale, dtype)
    return blocks_product(a, a_scale, b, b_scale)


SPECIMENS = [_rescale_kernel(torch.bfloat16), _rescale_kernel(torch.float32)]
