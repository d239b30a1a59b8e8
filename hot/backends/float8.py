"""The float8 products of torch's library, for the matmul of every backend: e4m3 with exact accumulation.

scales a row or tensor    where the chip has float8 tensor cores
blocks × tiles of 128     on Hopper
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hot.backends.devices import capability, has_fp8


def fits_rows(a: Tensor, b: Tensor) -> bool:
    """Whether `rows_product` takes these codes."""
    return a.dtype == b.dtype == torch.float8_e4m3fn and has_fp8(a.device) and a.shape[1] % 16 == b.shape[0] % 16 == 0


def rows_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """By the library's float8 product. Only bfloat16 results come with scales a row; the others are scaled afterwards."""
    if dtype == torch.bfloat16 and (a_scale.numel() > 1 or b_scale.numel() > 1):
        own, other = (
            (scale if scale.shape[0] == codes.shape[0] else scale.expand(codes.shape[0], 1)).contiguous()
            for codes, scale in ((a, a_scale), (b, b_scale))
        )
        return torch._scaled_mm(a, b.T, own, other.T, out_dtype=dtype, use_fast_accum=False)
    one = torch.ones((), device=a.device)
    sums = torch._scaled_mm(a, b.T, one, one, out_dtype=torch.float32, use_fast_accum=False)
    return sums.mul_(a_scale).mul_(b_scale.T).to(dtype)


def fits_blocks(
    a: Tensor, a_scale: Tensor, a_group: int, b: Tensor, b_scale: Tensor, b_group: int, dtype: torch.dtype
) -> bool:
    """Whether the library's product of blocks of 128 by tiles of 128 takes these operands: e4m3 on Hopper, whole tiles, rows by
    fours, for it reads the scales of a in columns of whole fours."""
    (m, k), n = a.shape, b.shape[0]
    return (
        a.dtype == b.dtype == torch.float8_e4m3fn
        and a_group == b_group == 128
        and a_scale.shape[0] == m
        and b_scale.shape[0] * 128 == n
        and k % 128 == m % 4 == 0
        and dtype == torch.bfloat16
        and capability(a.device)[0] == 9
        and _rows_of_tiles(a.device) != ""
    )


def blocks_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """A scale a row and 128 codes of a, a tile of b. The library wants those of a with rows innermost, those of b by fours."""
    scales = a_scale.T.contiguous().T, _by_fours(b_scale, _rows_of_tiles(a.device)).T
    return torch._scaled_mm(a, b.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=False)


def _by_fours(scale: Tensor, rows: str) -> Tensor:
    """The scales of tiles laid out as the library reads them: rows filled up to whole fours. rows: as of `_rows_of_tiles`."""
    tiles, width = scale.shape
    if width % 4 == 0:
        return scale
    padded = F.pad(scale, (0, -width % 4))
    return padded[:, :width] if rows == "padded" else padded.as_strided((tiles, width), (width, 1))


@lru_cache(maxsize=64)
def _rows_of_tiles(device: torch.device) -> str:
    """The strides that torch's product asks for in the scales of tiles: ``padded``, those of memory; ``dense``, those of rows
    without a gap, as torch 2.11 does, though its library reads padded rows all the same; "" where torch or its CUDA has no such
    product. Told by a product of the smallest size where they differ: a refusal runs nothing."""
    codes = torch.zeros(256, 384, device=device).to(torch.float8_e4m3fn)
    blocks, tiles = torch.ones(3, 256, device=device).T, torch.ones(2, 3, device=device)
    for rows in ("padded", "dense"):
        try:
            torch._scaled_mm(codes, codes.T, blocks, _by_fours(tiles, rows).T, out_dtype=torch.bfloat16)
        except (RuntimeError, ValueError):
            continue
        return rows
    return ""
