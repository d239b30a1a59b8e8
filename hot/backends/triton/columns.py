"""batch_norm and batch_norm_backward: rows are samples, and what is known is known of columns."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

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
def coefficients_kernel(
    sums, mean, factor, weight, columns, rows, k, programs, P: tl.constexpr, C: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """columns (5, k): the gradients of weight and bias, and what makes the gradient x · slope + level + g · gain."""
    column = tl.program_id(0) * C + tl.arange(0, C)
    known = column < k
    total = tl.zeros((P, C), dtype=tl.float32)
    of_bias, off = total, total
    for start in range(0, programs, P):
        part = start + tl.arange(0, P)
        at, mask = (part * k)[:, None] + column[None, :], (part < programs)[:, None] & known[None, :]
        total += tl.load(sums + at, mask=mask, other=0.0)
        of_bias += tl.load(sums + programs * k + at, mask=mask, other=0.0)
        off += tl.load(sums + 2 * programs * k + at, mask=mask, other=0.0)
    bias, mid = tl.sum(of_bias, 0), tl.sum(off, 0) / rows
    centered = tl.sum(total, 0) - mid * bias
    center = tl.load(mean + column, mask=known, other=0.0)
    times = tl.load(factor + column, mask=known, other=0.0)
    gain = times * tl.load(weight + column, mask=known, other=0.0).to(tl.float32) if WEIGHTED else times
    # gain · (g − (Σ g + (n − mid) · Σ g·(n − mid)) / rows), n = (x − mean) · factor
    slope = -gain * times * centered / rows
    level = gain * (mid * centered - bias) / rows - center * slope
    tl.store(columns + column, centered, mask=known)
    tl.store(columns + k + column, bias, mask=known)
    tl.store(columns + 2 * k + column, slope, mask=known)
    tl.store(columns + 3 * k + column, level, mask=known)
    tl.store(columns + 4 * k + column, gain, mask=known)


@triton.jit
def gradient_kernel(
    g, codes, scale, columns, out, rows, k, length, scale_row, g_row,
    R: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = x · slope + level + g · gain, as `coefficients_kernel` left them of the column."""
    program, chunks = tl.program_id(0), tl.cdiv(k, C)
    row = (program // chunks).to(tl.int64) * R + tl.arange(0, R)
    chunk = program % chunks
    column = chunk * C + tl.arange(0, C)
    known = column < k
    mask = (row < rows)[:, None] & known[None, :]
    x = _coded(codes, scale, row, chunk, rows, k, length, scale_row, R, C, PACKED, GROUP)
    slope = tl.load(columns + 2 * k + column, mask=known, other=0.0)[None, :]
    level = tl.load(columns + 3 * k + column, mask=known, other=0.0)[None, :]
    gain = tl.load(columns + 4 * k + column, mask=known, other=0.0)[None, :]
    grad = tl.load(g + (row * g_row)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    result = x * slope + level + grad * gain
    tl.store(out + (row * k)[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def normed_kernel(
    codes, scale, mean, factor, weight, bias, out, rows, k, length, scale_row,
    R: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
    WEIGHTED: tl.constexpr, BIASED: tl.constexpr, RECTIFY: tl.constexpr,
):  # fmt: skip
    """out = (x − mean) · factor · weight + bias of the column, at least zero if RECTIFY."""
    program, chunks = tl.program_id(0), tl.cdiv(k, C)
    row = (program // chunks).to(tl.int64) * R + tl.arange(0, R)
    chunk = program % chunks
    column = chunk * C + tl.arange(0, C)
    known = column < k
    x = _coded(codes, scale, row, chunk, rows, k, length, scale_row, R, C, PACKED, GROUP)
    times = tl.load(factor + column, mask=known, other=0.0)
    if WEIGHTED:
        times *= tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
    result = (x - tl.load(mean + column, mask=known, other=0.0)[None, :]) * times[None, :]
    if BIASED:
        result += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[None, :]
    if RECTIFY:
        result = tl.where(result <= 0.0, 0.0, result)  # a NaN stays
    mask = (row < rows)[:, None] & known[None, :]
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
    dtypes = g.dtype, dtype, None if weight is None else weight.dtype
    programs, sum_up, finish, write = _gradient_launches(*how, multiprocessors(g.device), *dtypes)
    out = torch.empty(g.shape, dtype=dtype, device=g.device)
    sums = torch.empty((3, programs, k), dtype=torch.float32, device=g.device)
    columns = torch.empty((5, k), dtype=torch.float32, device=g.device)
    with on_device(g):
        sum_up(g, codes, scale, mean, factor, sums)
        finish(sums, mean, factor, mean if weight is None else weight, columns)
        write(g, codes, scale, columns, out)
    return out, columns[0], columns[1]


@lru_cache(maxsize=1024)
def _gradient_launches(
    rows: int, k: int, g_row: int, packed: bool, group: int, scale_row: int, many: int,
    g_dtype: torch.dtype, dtype: torch.dtype, weight: torch.dtype | None,
) -> tuple[int, Launch, Launch, Launch]:  # fmt: skip
    """How many programs add up, and the launches: for tensors of these dtypes, to which a launch is compiled."""
    r, c = _tile(rows, k)
    tiles, chunks = cdiv(rows, r), cdiv(k, c)
    programs = min(tiles, max(PROGRAMS * many // chunks, 1))
    numbers = rows, k, cdiv(k, 2) if packed else k, scale_row, g_row
    how = {"R": r, "C": c, "PACKED": packed, "GROUP": group, "num_warps": WARPS}
    sum_up = Launch(sums_kernel, programs * chunks, (*numbers, programs, cdiv(tiles, programs)), **how)
    finish = Launch(
        coefficients_kernel, cdiv(k, 32), (rows, k, programs), P=32, C=32, WEIGHTED=weight is not None, num_warps=WARPS
    )
    return programs, sum_up, finish, Launch(gradient_kernel, tiles * chunks, numbers, **how)


def _serves_values(
    codes: Tensor, scale: Tensor, group: int, mean: Tensor, factor: Tensor,
    weight: Tensor | None, bias: Tensor | None, rectify: bool, dtype: torch.dtype,
) -> bool:  # fmt: skip
    wide = all(t.dtype == torch.float32 and t.is_contiguous() for t in (mean, factor))
    own = all(t is None or (t.dtype in HALVES and t.is_contiguous()) for t in (weight, bias))
    return dtype in HALVES and codes.numel() > 0 and wide and own and _fits_codes(codes, scale, group)


@register_kernel("batch_norm", backend="triton", supports=_serves_values)
def batch_norm(
    codes: Tensor, scale: Tensor, group: int, mean: Tensor, factor: Tensor,
    weight: Tensor | None, bias: Tensor | None, rectify: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    out = torch.empty((codes.shape[0], mean.shape[0]), dtype=dtype, device=codes.device)
    dtypes = dtype, *(None if t is None else t.dtype for t in (weight, bias))
    launch = _values_launch(*out.shape, codes.dtype == torch.uint8, group, _scale_row(scale), rectify, *dtypes)
    with on_device(codes):
        launch(codes, scale, mean, factor, *(mean if t is None else t for t in (weight, bias)), out)
    return out


@lru_cache(maxsize=1024)
def _values_launch(
    rows: int, k: int, packed: bool, group: int, scale_row: int, rectify: bool,
    dtype: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None,
) -> Launch:  # fmt: skip
    r, c = _tile(rows, k)
    return Launch(
        normed_kernel, cdiv(rows, r) * cdiv(k, c), (rows, k, cdiv(k, 2) if packed else k, scale_row),
        R=r, C=c, PACKED=packed, GROUP=group, WEIGHTED=weight is not None, BIASED=bias is not None, RECTIFY=rectify,
        num_warps=WARPS,
    )  # fmt: skip


_KEPT = {"scale": "*fp32", "g": "*bf16"}
_STATISTICS = dict.fromkeys(("mean", "factor", "sums", "columns", "bias"), "*fp32")


def _specimen(kernel: Any, codes: str = "*u8", out: str = "*bf16", weight: str = "*fp32", **how: Any) -> Specimen:
    pointers = {**_KEPT, **_STATISTICS, "codes": codes, "out": out, "weight": weight}
    given = {name: kind for name, kind in pointers.items() if name in kernel.arg_names}
    if "codes" in given:
        how = {"R": 16, "C": 256, "PACKED": codes == "*u8", "GROUP": 64 * (codes == "*u8"), **how}
    return specimen(kernel, given, **how)


SPECIMENS = [
    _specimen(sums_kernel),
    _specimen(coefficients_kernel, P=32, C=32, WEIGHTED=True),
    _specimen(gradient_kernel),
    _specimen(normed_kernel, WEIGHTED=True, BIASED=True, RECTIFY=True),
    _specimen(normed_kernel, "*i8", "*fp16", "*fp16", WEIGHTED=True, BIASED=False, RECTIFY=False),
]
