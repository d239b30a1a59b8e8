"""pack1 and pass1: a bit an element."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hot.backends.devices import on_device
from hot.backends.layouts import cdiv
from hot.backends.table import register_kernel
from hot.backends.triton.launch import Launch, specimen

HALVES = (torch.bfloat16, torch.float16, torch.float32)
BYTES = 512
"""Of bits, that a program reads or writes."""


@triton.jit
def pack_bits_kernel(x, bits, count, BYTES: tl.constexpr):
    # bit = not (x <= 0), which a NaN passes
    at = tl.program_id(0).to(tl.int64) * BYTES * 8 + tl.arange(0, BYTES * 8)
    value = tl.load(x + at, mask=at < count, other=0.0)
    passed = tl.reshape(tl.where(value <= 0.0, 0, 1), (BYTES, 8))
    byte = tl.sum(passed << tl.arange(0, 8)[None, :], 1)
    target = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    tl.store(bits + target, byte.to(tl.uint8), mask=target * 8 < count)


@triton.jit
def pass_bits_kernel(g, bits, out, count, factor, BYTES: tl.constexpr):
    # out = g · factor where the bit is set, else 0
    at = tl.program_id(0).to(tl.int64) * BYTES * 8 + tl.arange(0, BYTES * 8)
    source = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    byte = tl.load(bits + source, mask=source * 8 < count, other=0).to(tl.int32)
    passed = tl.reshape((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1, (BYTES * 8,))
    value = tl.load(g + at, mask=at < count, other=0.0)
    result = tl.where(passed != 0, value.to(tl.float32) * factor, 0.0)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=at < count)


def _serves_pack(x: Tensor) -> bool:
    return x.dtype in HALVES and x.is_contiguous() and x.numel() > 0


@register_kernel("pack1", backend="triton", supports=_serves_pack)
def pack1(x: Tensor) -> Tensor:
    bits = torch.empty(cdiv(x.numel(), 8), dtype=torch.uint8, device=x.device)
    with on_device(x):
        _pack_launch(x.numel(), x.dtype)(x, bits)
    return bits


@lru_cache(maxsize=1024)
def _pack_launch(count: int, dtype: torch.dtype) -> Launch:
    return Launch(pack_bits_kernel, cdiv(count, BYTES * 8), (count,), BYTES=BYTES, num_warps=4)


def _serves_pass(g: Tensor, bits: Tensor, factor: float) -> bool:
    return _serves_pack(g) and bits.is_contiguous()


@register_kernel("pass1", backend="triton", supports=_serves_pass)
def pass1(g: Tensor, bits: Tensor, factor: float) -> Tensor:
    out = torch.empty_like(g)
    with on_device(g):
        _pass_launch(g.numel(), factor, g.dtype)(g, bits, out)
    return out


@lru_cache(maxsize=1024)
def _pass_launch(count: int, factor: float, dtype: torch.dtype) -> Launch:
    return Launch(pass_bits_kernel, cdiv(count, BYTES * 8), (count, factor), BYTES=BYTES, num_warps=4)


SPECIMENS = [
    specimen(pack_bits_kernel, {"x": "*bf16", "bits": "*u8"}, BYTES=512),
    specimen(pack_bits_kernel, {"x": "*fp32", "bits": "*u8"}, BYTES=512),
    specimen(pass_bits_kernel, {"g": "*bf16", "bits": "*u8", "out": "*bf16", "factor": "fp32"}, BYTES=512),
]
