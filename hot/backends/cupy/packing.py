"""pack4 and unpack4: two 4-bit codes a byte, by kernels/packing.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from hot.backends.cupy.launch import Kernel, fits
from hot.backends.devices import on_device
from hot.backends.layouts import cdiv
from hot.backends.table import register_kernel

LAYOUT = "@2Q4q2i"
"""Of struct Packing."""
PACK, UNPACK = (Kernel("packing.cu", name, (), LAYOUT) for name in ("pack_kernel", "unpack_kernel"))
SPECIMENS = [PACK, UNPACK]


def _served(t: Tensor, dtype: torch.dtype) -> bool:
    return t.dtype == dtype and t.dim() == 2


@register_kernel("pack4", backend="cupy", supports=lambda codes: _served(codes, torch.int8))
def pack4(codes: Tensor) -> Tensor:
    rows, k = codes.shape
    packed = torch.empty((rows, cdiv(k, 2)), dtype=torch.uint8, device=codes.device)
    if packed.numel():
        _run(PACK, codes, packed, k, 16, 8)
    return packed


@register_kernel("unpack4", backend="cupy", supports=lambda packed, length: _served(packed, torch.uint8))
def unpack4(packed: Tensor, length: int) -> Tensor:
    codes = torch.empty((packed.shape[0], length), dtype=torch.int8, device=packed.device)
    if codes.numel():
        _run(UNPACK, packed, codes, length, 8, 16)
    return codes


def _run(kernel: Kernel, source: Tensor, target: Tensor, k: int, chunk: int, target_chunk: int) -> None:
    """chunk, target_chunk: bytes of the source and of the target that a thread moves."""
    rows = source.shape[0]
    if k % 2 == 0 and source.is_contiguous():  # no byte straddles two rows, so they may be one
        source, target, rows, k = source.view(1, -1), target.view(1, -1), 1, rows * k
    row_step, step = (stride if size > 1 else 1 for stride, size in zip(source.stride(), source.shape, strict=True))
    dense_source = step == 1 and (rows == 1 or row_step % chunk == 0) and fits(source, chunk)
    with on_device(source):
        kernel(
            min(cdiv(rows * cdiv(k, 16), 256), 2**30), 256,
            source.data_ptr(), target.data_ptr(), rows, k, row_step, step,
            dense_source, fits(target, target_chunk, target.shape[1] if rows > 1 else 0),
        )  # fmt: skip
