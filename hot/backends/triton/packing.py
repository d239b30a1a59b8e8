"""pack4 and unpack4: two 4-bit codes a byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hot.backends.devices import on_device
from hot.backends.layouts import cdiv
from hot.backends.table import register_kernel
from hot.backends.triton.launch import Launch, by_settings, specimen, tile
from hot.backends.triton.tuning import Config, Key, bucket, family, launch


@triton.jit
def pack_kernel(codes, packed, rows, k, length, stride_row, stride_column, R: tl.constexpr, C: tl.constexpr):
    """R rows × C codes a program. length: bytes of a row."""
    # byte = even & 15 | odd << 4
    program, column_tiles = tl.program_id(0), tl.cdiv(k, C)
    row = (program // column_tiles).to(tl.int64) * R + tl.arange(0, R)
    chunk = (program % column_tiles).to(tl.int64)
    column = chunk * C + tl.arange(0, C)
    mask = (row < rows)[:, None] & (column < k)[None, :]
    code = tl.load(codes + (row * stride_row)[:, None] + (column * stride_column)[None, :], mask=mask, other=0)
    even, odd = tl.split(tl.reshape(code.to(tl.uint8, bitcast=True), (R, C // 2, 2)))
    at = chunk * (C // 2) + tl.arange(0, C // 2)
    target = packed + (row * length)[:, None] + at[None, :]
    tl.store(target, (even & 15) | (odd << 4), mask=(row < rows)[:, None] & (at < length)[None, :])


@triton.jit
def unpack_kernel(packed, codes, rows, k, length, stride_row, stride_column, R: tl.constexpr, C: tl.constexpr):
    """R rows × C codes a program. length: bytes of a row."""
    # even = byte << 4 >> 4, odd = byte >> 4, both with sign
    program, column_tiles = tl.program_id(0), tl.cdiv(k, C)
    row = (program // column_tiles).to(tl.int64) * R + tl.arange(0, R)
    chunk = (program % column_tiles).to(tl.int64)
    at = chunk * (C // 2) + tl.arange(0, C // 2)
    mask = (row < rows)[:, None] & (at < length)[None, :]
    byte = tl.load(packed + (row * stride_row)[:, None] + (at * stride_column)[None, :], mask=mask, other=0)
    signed = byte.to(tl.int8, bitcast=True)
    code = tl.reshape(tl.join((signed << 4).to(tl.int8) >> 4, signed >> 4), (R, C))
    column = chunk * C + tl.arange(0, C)
    tl.store(codes + (row * k)[:, None] + column[None, :], code, mask=(row < rows)[:, None] & (column < k)[None, :])


def _candidates(key: Key) -> list[Config]:
    return [{"ELEMENTS": elements, "num_warps": warps} for elements in (2048, 4096, 8192, 16384) for warps in (4, 8)]


PACK = family("pack4", lambda key: {"ELEMENTS": 8192, "num_warps": 4}, _candidates)
"""Shape class: ``pack`` or ``unpack``, class of K."""


def _served(t: Tensor, dtype: torch.dtype) -> bool:
    return t.dtype == dtype and t.dim() == 2


@register_kernel("pack4", backend="triton", supports=lambda codes: _served(codes, torch.int8))
def pack4(codes: Tensor) -> Tensor:
    rows, k = codes.shape
    packed = torch.empty((rows, -(-k // 2)), dtype=torch.uint8, device=codes.device)
    if packed.numel():
        _run("pack", codes, packed, k)
    return packed


@register_kernel("unpack4", backend="triton", supports=lambda packed, length: _served(packed, torch.uint8))
def unpack4(packed: Tensor, length: int) -> Tensor:
    codes = torch.empty((packed.shape[0], length), dtype=torch.int8, device=packed.device)
    if codes.numel():
        _run("unpack", packed, codes, length)
    return codes


def _run(way: str, source: Tensor, target: Tensor, k: int) -> None:
    key, launches = _launches(way, source.shape[0], k, *source.stride())
    with on_device(source):
        launch(PACK, key, source.device, lambda settings: launches(settings)(source, target))


@lru_cache(maxsize=4096)
def _launches(
    way: str, rows: int, k: int, stride_row: int, stride_column: int
) -> tuple[Key, Callable[[Config], Launch]]:
    """The shape class of one size, and its launch by settings."""
    kernel, numbers = pack_kernel if way == "pack" else unpack_kernel, (rows, k, cdiv(k, 2), stride_row, stride_column)

    def make(settings: Config) -> Launch:
        r, c = tile(rows, k, settings["ELEMENTS"], False)
        return Launch(kernel, cdiv(rows, r) * cdiv(k, c), numbers, R=r, C=c, num_warps=settings["num_warps"])

    return (way, bucket(k)), by_settings(make)


SPECIMENS = [
    specimen(pack_kernel, {"codes": "*i8", "packed": "*u8"}, stride_column=1, R=8, C=1024),
    specimen(pack_kernel, {"codes": "*i8", "packed": "*u8"}, stride_row=1, R=32, C=64),
    specimen(unpack_kernel, {"codes": "*i8", "packed": "*u8"}, stride_column=1, R=8, C=1024),
]
