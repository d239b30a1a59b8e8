"""matmul: the product of two quantized operands on tensor cores.

    int8 × int8        scales a row or tensor   int8 products, exact int32 sums, scales in the epilogue
    e4m3 × e4m3        scales a row or tensor   torch._scaled_mm with exact accumulation, where the chip has float8 tensor cores
    e4m3 × e4m3        blocks × tiles of 128    likewise, on Hopper
    everything else    scales a block too       products of one K-block at a time, scaled and summed in float32

Codes of 4 bits held as e4m3 floats are multiplied exactly by the second: see `in_float8`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hot.backends.devices import capability, multiprocessors, on_device
from hot.backends.float8 import blocks_product, fits_blocks, fits_rows, rows_product
from hot.backends.layouts import cdiv
from hot.backends.ops import INT32_TERMS, factors_out, is_tiled
from hot.backends.table import register_kernel
from hot.backends.triton.gemm import block_kernel, copied_kernel, integer_kernel, rescale_kernel, streamed_kernel
from hot.backends.triton.launch import Launch, Specimen, by_settings, specimen
from hot.backends.triton.tuning import Config, Key, bucket, family, launch

HELD = {torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}
OUT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


# Triton waits for a product of integers before it begins the next (wgmma; 3.6 to 3.9), so two programs share a multiprocessor.
_POINTERS = {"BM": 128, "BN": 128, "BK": 128, "GROUP": 8, "num_warps": 4, "num_stages": 3, "copied": 0}
_SMALL = _POINTERS | {"BM": 64, "BN": 64, "num_stages": 4}
_SHORT = _SMALL | {"BK": 64}
_NARROW = _SMALL | {"BN": 32}
_TINY = _NARROW | {"BM": 32}
_COPIED = _POINTERS | {"copied": 1}
_STREAMED = _POINTERS | {"copied": 2, "num_stages": 6}


def _default(key: Key) -> Config:
    """Small results in tiles so small that many multiprocessors have one; few tiles and a long K streamed; else a tile a
    program, by the copy engine if it can."""
    m, n, k, copies, _ = key
    assert isinstance(m, int) and isinstance(n, int) and isinstance(k, int)
    if k <= 8 and m + n <= 22:
        return _SHORT
    if m + n <= 18:
        return _NARROW if m + n == 18 else _TINY
    if m + n <= 20 and k <= 11:
        return _SMALL
    if not copies:
        return _POINTERS
    return _STREAMED if m + n <= 20 and k >= 12 else _COPIED


def _candidates(key: Key) -> list[Config]:
    wide = {"BN": 256, "num_warps": 8, "num_stages": 4}
    return [_POINTERS, _SMALL, _SHORT, _NARROW, _TINY] + (
        [_COPIED, _COPIED | wide, _STREAMED, _STREAMED | wide] if key[3] else []
    )


INTEGER = family("integer_product", _default, _candidates)
"""Shape class: classes of m, n and k, whether tiles may be copied, the result's dtype. copied: 0 by pointers, 1 by the copy
engine, 2 by it and streamed."""


class _Integers:
    """Products of one size of int8 codes: the launches, by their settings."""

    def __init__(
        self, m: int, n: int, k: int, steps: tuple[int, int], dtype: torch.dtype, copies: bool, many: int
    ) -> None:
        self.m, self.n, self.k, self.steps, self.dtype, self.many = m, n, k, steps, dtype, many
        self.key: Key = (bucket(m), bucket(n), bucket(k), int(copies), OUT[dtype])
        self.rescale = Launch(rescale_kernel, cdiv(m * n, 1024), (n, m * n, *steps), ELEMENTS=1024)
        self.product = by_settings(self._product)

    def _product(self, settings: Config) -> Launch:
        constants = {name: value for name, value in settings.items() if name != "copied"}
        sizes = self.m, self.n, self.k
        tiles = cdiv(self.m, settings["BM"]) * cdiv(self.n, settings["BN"])
        if settings["copied"] == 0:
            even, unit = self.k % settings["BK"] == 0, min(self.k & -self.k, 16)
            sizes = self.m, self.n, self.k // unit
            return Launch(integer_kernel, tiles, (*sizes, *self.steps), EVEN_K=even, UNIT=unit, **constants)
        if settings["copied"] == 1:
            return Launch(copied_kernel, tiles, (*sizes, *self.steps), **constants)
        return Launch(streamed_kernel, self.many, (*sizes, self.many), **constants)

    def __call__(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        out = torch.empty(self.m, self.n, dtype=self.dtype, device=a.device)

        def run(settings: Config) -> None:
            product = self.product(settings)
            if not settings["copied"]:
                product(a, b, out, a_scale, b_scale)
                return
            left = TensorDescriptor.from_tensor(a, [settings["BM"], settings["BK"]])
            right = TensorDescriptor.from_tensor(b, [settings["BN"], settings["BK"]])
            if settings["copied"] == 1:
                tiles = TensorDescriptor.from_tensor(out, [settings["BM"], settings["BN"]])
                product(left, right, tiles, a_scale, b_scale)
                return
            sums = torch.zeros(self.m, self.n, dtype=torch.int32, device=a.device)
            product(left, right, sums)
            self.rescale(sums, out, a_scale, b_scale)

        with on_device(a):
            launch(INTEGER, self.key, a.device, run)
        return out


_integers = lru_cache(maxsize=4096)(_Integers)


def _integer(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    steps = int(a_scale.shape[0] > 1), int(b_scale.shape[0] > 1)  # a scale of the whole tensor stays where it is
    copies = k % 16 == 0 and n % 8 == 0 and dtype in HALVES and capability(a.device) >= (9, 0)
    copies = copies and (a.data_ptr() | b.data_ptr()) % 16 == 0
    return _integers(m, n, k, steps, dtype, copies, multiprocessors(a.device))(a, a_scale, b, b_scale)


HALVES = (torch.bfloat16, torch.float16)


def _by_blocks(
    a: Tensor, a_scale: Tensor, a_group: int, b: Tensor, b_scale: Tensor, b_group: int, dtype: torch.dtype
) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    where: list[int] = []
    for codes, scale, group in ((a, a_scale, a_group), (b, b_scale, b_group)):
        width = scale.shape[1]
        where += [
            group if is_tiled(codes, scale, group) else 1,
            width * (scale.shape[0] > 1),
            int(width > 1),
            group or k,
        ]
    with on_device(a):
        _block_launch(m, n, k, *where, _k_block(a_group, b_group), a.dtype, bool(a_group or b_group), dtype)(
            a, b, out, a_scale, b_scale
        )
    return out


@lru_cache(maxsize=1024)
def _block_launch(
    m: int, n: int, k: int, a_rows: int, a_step: int, a_block: int, a_group: int,
    b_rows: int, b_step: int, b_block: int, b_group: int, block: int, codes: torch.dtype, blocks: bool, dtype: torch.dtype,
) -> Launch:  # fmt: skip
    size = 128 if m * n >= 2**20 else 64
    return Launch(
        block_kernel, cdiv(m, size) * cdiv(n, size),
        (m, n, k, a_rows, a_step, a_block, a_group, b_rows, b_step, b_block, b_group),
        BM=size, BN=size, BK=block, GROUP=8, HALF=codes != torch.int8 or block < 32, BLOCKS=blocks,
        num_warps=8 if size == 128 else 4, num_stages=3,
    )  # fmt: skip


def _k_block(*groups: int) -> int:
    """The largest K-block up to 128 that divides every group (0: no groups), 0 where it is less than 16."""
    block = math.gcd(128, *groups)
    return block if block >= 16 else 0


def _serves(
    a: Tensor, a_scale: Tensor, a_group: int, b: Tensor, b_scale: Tensor, b_group: int, dtype: torch.dtype
) -> bool:
    """Scales a token lie on K and are nobody's here; float64 is the reference's."""
    if not (a.numel() and b.numel() and dtype in OUT and a.dtype in HELD and b.dtype in HELD):
        return False
    if (a.dtype == torch.int8) != (b.dtype == torch.int8):
        return False
    if a.shape[1] > INT32_TERMS and factors_out(a_scale, a_group) and factors_out(b_scale, b_group):
        return False
    if not (a_group or a_scale.shape[1] == 1) or not (b_group or b_scale.shape[1] == 1):
        return False
    return _k_block(a_group, b_group) > 0


@register_kernel("matmul", backend="triton", supports=_serves)
def matmul(
    a: Tensor, a_scale: Tensor, a_group: int, b: Tensor, b_scale: Tensor, b_group: int, dtype: torch.dtype
) -> Tensor:
    a, b, a_scale, b_scale = a.contiguous(), b.contiguous(), a_scale.contiguous(), b_scale.contiguous()
    if factors_out(a_scale, a_group) and factors_out(b_scale, b_group):
        if a.dtype == torch.int8:
            return _integer(a, a_scale, b, b_scale, dtype)
        if fits_rows(a, b):
            return rows_product(a, a_scale, b, b_scale, dtype)
    if fits_blocks(a, a_scale, a_group, b, b_scale, b_group, dtype):
        return blocks_product(a, a_scale, b, b_scale)
    return _by_blocks(a, a_scale, a_group, b, b_scale, b_group, dtype)


def _specimen(codes: str, out: str) -> Specimen:
    pointers = {"a": f"*{codes}", "b": f"*{codes}", "out": f"*{out}", "a_scale": "*fp32", "b_scale": "*fp32"}
    half = codes != "i8"
    return specimen(block_kernel, pointers, BM=64, BN=64, BK=64, GROUP=8, HALF=half, BLOCKS=not half)


_INTEGERS = {"a": "*i8", "b": "*i8", "a_scale": "*fp32", "b_scale": "*fp32"}
SPECIMENS = [
    specimen(integer_kernel, _INTEGERS | {"out": "*bf16"}, BM=64, BN=64, BK=64, GROUP=8, EVEN_K=True, UNIT=16),
    specimen(integer_kernel, _INTEGERS | {"out": "*fp32"}, BM=64, BN=64, BK=64, GROUP=8, EVEN_K=False, UNIT=8),
    specimen(
        streamed_kernel,
        {"a": "tensordesc<i8[64, 64]>", "b": "tensordesc<i8[64, 64]>", "sums": "*i32"},
        BM=64,
        BN=64,
        BK=64,
        GROUP=8,
    ),
    specimen(
        copied_kernel,
        {"a": "tensordesc<i8[64, 64]>", "b": "tensordesc<i8[64, 64]>", "out": "tensordesc<bf16[64, 64]>"}
        | {"a_scale": "*fp32", "b_scale": "*fp32"},
        BM=64,
        BN=64,
        BK=64,
        GROUP=8,
    ),
    specimen(rescale_kernel, {"total": "*i32", "out": "*fp16", "a_scale": "*fp32", "b_scale": "*fp32"}, ELEMENTS=1024),
    _specimen("i8", "fp32"),
    _specimen("fp8e5", "fp16"),
]
