"""batch_norm_backward and scaled: rows are samples, and what is known is known of columns."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hot.backends.devices import multiprocessors, on_device
from hot.backends.layouts import cdiv, power_of_2
from hot.backends.table import register_kernel
from hot.backends.triton.activations import HALVES, _coded, _fits, _fits_codes, _scale_row
from hot.backends.triton.launch import Launch, Specimen, specimen

COLUMNS, ELEMENTS, WARPS, PROGRAMS = 256, 4096, 4, 8
"""Columns of a tile at most; elements of it; warps; programs of each multiprocessor at most, where they add up."""


@triton.jit
def sums_kernel(
    g, codes, scale, mean, factor, sums, rows, k, length, scale_row, g_row, programs, share,
    R: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """sums (3, programs, k): what `share` tiles of R rows add to Σ g·n, n = (x − mean) · factor, to Σ g and to Σ n."""
    program, chunk = tl.program_id(0) % programs, tl.program_id(0) // programs
    column = chunk * C + tl.arange(0, C)
    center = tl.load(mean + column, mask=column < k, other=0.0)
    times = tl.load(factor + column, mask=column < k, other=0.0)
    of_weight = tl.zeros((R, C), dtype=tl.float32)
    of_bias = tl.zeros((R, C), dtype=tl.float32)
    off = tl.zeros((R, C), dtype=tl.float32)
    for turn in range(share):
        row = (program + turn * programs).to(tl.int64) * R + tl.arange(0, R)
        mask = (row < rows)[:, None] & (column < k)[None, :]
        x = _coded(codes, scale, row, chunk, rows, k, length, scale_row, R, C, PACKED, GROUP)
        grad = tl.load(g + (row * g_row)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        normed = tl.where(mask, (x - center[None, :]) * times[None, :], 0.0)
        of_weight += grad * normed
        of_bias += grad
        off += normed
    at = program * k + column
    tl.store(sums + at, tl.sum(of_weight, 0), mask=column < k)
    tl.store(sums + programs * k + at, tl.sum(of_bias, 0), mask=column < k)
    tl.store(sums + 2 * programs * k + at, tl.sum(off, 0), mask=column < k)


@triton.jit
def columns_kernel(
    g, codes, scale, slope, level, gain, out, rows, k, length, scale_row, g_row,
    R: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, GRADIENT: tl.constexpr, RECTIFY: tl.constexpr,
):  # fmt: skip
    """out = x · slope + level of the column, at least zero if RECTIFY; with GRADIENT g · gain more."""
    program, chunks = tl.program_id(0), tl.cdiv(k, C)
    row = (program // chunks).to(tl.int64) * R + tl.arange(0, R)
    chunk = program % chunks
    column = chunk * C + tl.arange(0, C)
    mask = (row < rows)[:, None] & (column < k)[None, :]
    x = _coded(codes, scale, row, chunk, rows, k, length, scale_row, R, C, PACKED, GROUP)
    by = tl.load(slope + column, mask=column < k, other=0.0)[None, :]
    result = x * by + tl.load(level + column, mask=column < k, other=0.0)[None, :]
    if GRADIENT:
        grad = tl.load(g + (row * g_row)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        result += grad * tl.load(gain + column, mask=column < k, other=0.0)[None, :]
    if RECTIFY:
        result = tl.where(result <= 0.0, 0.0, result)  # a NaN stays
    tl.store(out + (row * k)[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=mask)


def _tile(rows: int, k: int) -> tuple[int, int]:
    columns = max(min(power_of_2(k), COLUMNS), 2)
    return min(power_of_2(rows), max(ELEMENTS // columns, 1)), columns


def _serves_norm(
    g: Tensor, codes: Tensor, scale: Tensor, group: int, weight: Tensor | None, mean: Tensor, factor: Tensor, dtype: torch.dtype
) -> bool:  # fmt: skip
    wide = all(t.dtype == torch.float32 and t.is_contiguous() for t in (mean, factor))
    return _fits(g, codes, scale, group) and wide and dtype in HALVES and (weight is None or weight.dtype in HALVES)


@register_kernel("batch_norm_backward", backend="triton", supports=_serves_norm)
def batch_norm_backward(
    g: Tensor, codes: Tensor, scale: Tensor, group: int, weight: Tensor | None, mean: Tensor, factor: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows, k = g.shape
    how = rows, k, g.stride(0), codes.dtype == torch.uint8, group, _scale_row(scale)
    programs, sum_up, write = _norm_launches(*how, multiprocessors(g.device), g.dtype, dtype)
    out = torch.empty(g.shape, dtype=dtype, device=g.device)
    sums = torch.empty((3, programs, k), dtype=torch.float32, device=g.device)
    with on_device(g):
        sum_up(g, codes, scale, mean, factor, sums)
        of_weight, of_bias, off = sums.sum(1).unbind()
        off = off / rows
        of_weight = of_weight - off * of_bias
        # out = gain · (g − (Σ g + (n − off) · Σ g·(n − off)) / rows), as x · slope + level + g · gain
        gain = factor if weight is None else factor * weight
        slope = -gain * factor * of_weight / rows
        level = gain * (off * of_weight - of_bias) / rows - mean * slope
        write(g, codes, scale, slope, level, gain, out)
    return out, of_weight, of_bias


@lru_cache(maxsize=1024)
def _norm_launches(
    rows: int, k: int, g_row: int, packed: bool, group: int, scale_row: int, many: int, *dtypes: torch.dtype
) -> tuple[int, Launch, Launch]:
    """How many programs add up, and both launches: for tensors of these dtypes, to which a launch is compiled."""
    r, c = _tile(rows, k)
    tiles, chunks = cdiv(rows, r), cdiv(k, c)
    programs = min(tiles, max(PROGRAMS * many // chunks, 1))
    numbers = rows, k, cdiv(k, 2) if packed else k, scale_row, g_row
    how = {"R": r, "C": c, "PACKED": packed, "GROUP": group, "num_warps": WARPS}
    sum_up = Launch(sums_kernel, programs * chunks, (*numbers, programs, cdiv(tiles, programs)), **how)
    write = Launch(columns_kernel, tiles * chunks, numbers, GRADIENT=True, RECTIFY=False, **how)
    return programs, sum_up, write


def _serves_scaled(
    codes: Tensor, scale: Tensor, group: int, factor: Tensor, shift: Tensor, rectify: bool, dtype: torch.dtype
) -> bool:  # fmt: skip
    wide = all(t.dtype == torch.float32 and t.is_contiguous() for t in (factor, shift))
    return dtype in HALVES and codes.numel() > 0 and wide and _fits_codes(codes, scale, group)


@register_kernel("scaled", backend="triton", supports=_serves_scaled)
def scaled(
    codes: Tensor, scale: Tensor, group: int, factor: Tensor, shift: Tensor, rectify: bool, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    out = torch.empty((codes.shape[0], factor.shape[0]), dtype=dtype, device=codes.device)
    packed = codes.dtype == torch.uint8
    with on_device(codes):
        launch = _scaled_launch(*out.shape, packed, group, _scale_row(scale), rectify, dtype)
        launch(scale, codes, scale, factor, shift, shift, out)  # no gradient, and no gain
    return out


@lru_cache(maxsize=1024)
def _scaled_launch(
    rows: int, k: int, packed: bool, group: int, scale_row: int, rectify: bool, dtype: torch.dtype
) -> Launch:
    r, c = _tile(rows, k)
    return Launch(
        columns_kernel, cdiv(rows, r) * cdiv(k, c), (rows, k, cdiv(k, 2) if packed else k, scale_row, 0),
        R=r, C=c, PACKED=packed, GROUP=group, GRADIENT=False, RECTIFY=rectify, num_warps=WARPS,
    )  # fmt: skip


_KEPT = {"scale": "*fp32", "g": "*bf16"}


def _columns(codes: str, out: str, gradient: bool, rectify: bool) -> Specimen:
    pointers = {"codes": codes, "out": out, **_KEPT, **dict.fromkeys(("slope", "level", "gain"), "*fp32")}
    how = {"R": 16, "C": 256, "PACKED": codes == "*u8", "GROUP": 64 * (codes == "*u8")}
    return specimen(columns_kernel, pointers, GRADIENT=gradient, RECTIFY=rectify, **how)


SPECIMENS = [
    specimen(
        sums_kernel, {"codes": "*u8", **_KEPT, **dict.fromkeys(("mean", "factor", "sums"), "*fp32")},
        R=16, C=256, PACKED=True, GROUP=64,
    ),
    _columns("*u8", "*bf16", True, False),
    _columns("*i8", "*fp16", False, True),
]  # fmt: skip
