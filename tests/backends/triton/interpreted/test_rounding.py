"""The helpers of rounding.py give the reference's codes, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
import triton
import triton.language as tl

from hot.backends import ops_for
from hot.backends.ops import largest_code
from hot.backends.triton import rounding

ROWS, K = 12, 128


@triton.jit
def probe(x, codes, scales, floats, LIMIT: tl.constexpr, KIND: tl.constexpr, ROUND: tl.constexpr, K: tl.constexpr):
    """A row a program, quantized with one scale."""
    row = tl.program_id(0)
    at = row * K + tl.arange(0, K)
    x = tl.load(x + at)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    bits = rounding.float_bits(x)
    scale, factor = rounding.scale_of(rounding.largest_bits(x, 0), LIMIT)
    v = x * factor.to(x.dtype)
    first, second = tl.split(tl.reshape(bits, (K // 2, 2)))
    first, second = rounding.pair_noise(
        first, second, rounding.row_hash(row) * rounding.column_hash(tl.arange(0, K // 2))
    )
    h = tl.reshape(tl.join(first, second), (K,))
    u = rounding.fraction(h)
    if ROUND == "pseudo_stochastic":
        h = rounding.mantissa_noise(bits)
        u = rounding.mantissa_fraction(bits)
    if KIND == "int":
        code = (rounding.nearest_codes(v, LIMIT) if ROUND == "nearest" else rounding.to_codes(v, h, LIMIT)).to(tl.uint8)
    elif KIND == "log":
        code = rounding.log_codes(v, u, LIMIT, ROUND != "nearest").to(tl.uint8)
    else:
        M: tl.constexpr = 3 if KIND == "e4m3" else 2
        BIAS: tl.constexpr = 7 if KIND == "e4m3" else 15
        if ROUND != "nearest":
            v = rounding.float8_values(v, u, LIMIT, M, BIAS)
        code = rounding.float8_bits(v, LIMIT, M, BIAS)
        tl.store(floats + at, rounding.float8_floats(code, M))
    tl.store(codes + at, code)
    tl.store(scales + row, scale)


@pytest.mark.parametrize("format", ["int2", "int4", "int8", "log2", "log4", "e4m3", "e5m2"])
@pytest.mark.parametrize("round", ["nearest", "hashed", "pseudo_stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_codes_are_those_of_the_reference(format: str, round: str, dtype: torch.dtype) -> None:
    x = (torch.randn(ROWS, K) * torch.logspace(-3, 3, K)).to(dtype)
    x[-3], x[-1, ::2] = 0.0, 1.375
    if dtype != torch.bfloat16:  # the interpreter reads a denormal bfloat16 wrongly
        x[-2] *= torch.finfo(dtype).smallest_normal
    want, scale = ops_for("reference", "cpu").quantize(x, format, "row", 0, round, ())
    codes, scales, floats = torch.empty(ROWS, K, dtype=torch.uint8), torch.empty(ROWS, 1), want.float()
    kind = format if format.startswith("e") else format[:3]
    probe[(ROWS,)](x, codes, scales, floats, largest_code(format), kind, round, K)
    assert torch.equal(codes, want.view(torch.uint8)) and torch.equal(scales, scale)
    assert torch.equal(floats, want.float())


@triton.jit
def scale_probe(x, scale, factor, K: tl.constexpr):
    top = rounding.largest_bits(tl.load(x + tl.arange(0, K)), 0)
    first, second = rounding.scale_of(top, 7.0)
    tl.store(scale, first)
    tl.store(factor, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_reaches_the_scale(value: float, dtype: torch.dtype) -> None:
    x = torch.randn(16, dtype=dtype)
    x[5] = value
    scale, factor = torch.empty(1), torch.empty(1)
    scale_probe[(1,)](x, scale, factor, 16)
    assert scale.isnan().item() and factor.item() == 0.0


def test_every_float8_is_read_and_written() -> None:
    """All 256 bytes, NaN and ±Inf included, on the way to float32; the finite ones on the way back."""
    for name, dtype, sizes in (("e4m3", torch.float8_e4m3fn, (3, 7)), ("e5m2", torch.float8_e5m2, (2, 15))):
        every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        floats, back = torch.empty(256), torch.empty(256, dtype=torch.uint8)
        every_byte[(1,)](every, floats, back, largest_code(name), *sizes)
        want = every.view(dtype).float()
        assert torch.equal(floats.nan_to_num(1e9), want.nan_to_num(1e9)) and torch.equal(floats.isnan(), want.isnan())
        assert torch.equal(back[want.isfinite()], every[want.isfinite()])


@triton.jit
def every_byte(bytes, floats, back, LIMIT: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr):
    at = tl.arange(0, 256)
    value = rounding.float8_floats(tl.load(bytes + at), M)
    tl.store(floats + at, value)
    tl.store(back + at, rounding.float8_bits(value, LIMIT, M, BIAS))
