"""rounding.cuh and codes.cuh give the reference's codes, bit for bit, of any numbers."""

from __future__ import annotations

import ctypes
from functools import cache

import pytest
import torch
from cuda_on_host import library, needs_compiler
from torch import Tensor

from hot.backends import ops_for
from hot.backends.cupy.quantization import _kind
from hot.backends.ops import MANTISSA, code_dtype, largest_code

pytestmark = needs_compiler
DTYPES = {torch.float32: "float", torch.float64: "double"}


@cache
def row_of(dtype: torch.dtype, format: str, rounding: str) -> ctypes.CDLL:
    number, mantissa = DTYPES[dtype], MANTISSA.get(code_dtype(format), 0)
    return library(f"""
#include "cuda.h"
#include "codes.cuh"
extern "C" void row_of(const {number}* x, int row, int k, double limit, unsigned char* codes, float* scale, float* floats) {{
    decltype(magnitude_bits(*x)) top = 0;
    float factor;
    for (int i = 0; i < k; ++i) top = magnitude_bits(x[i]) > top ? magnitude_bits(x[i]) : top;
    scale_of(top, {number}(limit), *scale, factor);
    for (int i = 0; i < k; ++i) {{
        const int even = i & ~1;
        const unsigned second = even + 1 < k ? float_bits(x[even + 1]) : 0;
        const uint2 h = pair_noise(float_bits(x[even]), second, row_hash(row) * column_hash(even / 2));
        const {number} v = x[i] * {number}(factor);
        codes[i] = encode<{_kind(format)}, {mantissa}, {rounding.upper()}>(v, float_bits(x[i]), i & 1 ? h.y : h.x, {number}(limit));
        if ({mantissa}) floats[i] = float8_floats<{mantissa or 3}, bias_of({mantissa or 3})>(codes[i]);
    }}
}}
""")


def rows(k: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers of every size, exact halves, denormals, zeros, equal numbers, and any bits that are finite."""
    x = torch.randn(40, k, dtype=torch.float64) * torch.logspace(-30, 30, 40, dtype=torch.float64)[:, None]
    x[0] = torch.randint(-254, 255, (k,)) / 2
    x[1], x[2], x[3] = 0.0, 1.375, torch.randint(-30, 30, (k,)) * torch.finfo(dtype).tiny / 64
    x = x.to(dtype)
    any_bits = torch.randint(-(2**31), 2**31, (20, k)).to(torch.int32).view(torch.float32).nan_to_num(1.0, 0.0, 0.0)
    return torch.cat([x, any_bits.to(dtype), (x[4:] * torch.logspace(-4, 4, k, dtype=dtype)).nan_to_num()])


@pytest.mark.parametrize("k", [64, 257])
@pytest.mark.parametrize(
    "format", ["int2", "int4", "int8", "int4.e4m3", "int5.e4m3", "log2", "log4", "log4.e4m3", "e4m3", "e5m2"]
)
@pytest.mark.parametrize("rounding", ["nearest", "hashed", "pseudo_stochastic"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_the_reference(format: str, rounding: str, dtype: torch.dtype, k: int) -> None:
    x = rows(k, dtype)
    want, want_scale = ops_for("reference", "cpu").quantize(x, format, "row", 0, rounding, ())
    codes, scale, floats = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.shape[0], 1), torch.zeros(x.shape)
    run = row_of(dtype, format, rounding).row_of
    for row in range(x.shape[0]):
        places = (ctypes.c_void_p(t[row].data_ptr()) for t in (codes, scale, floats))
        run(ctypes.c_void_p(x[row].data_ptr()), row, k, ctypes.c_double(largest_code(format)), *places)
    assert torch.equal(scale, want_scale)
    if "." in format:  # integers as floats: which zero it is does not matter
        assert torch.equal(codes.view(want.dtype).float(), want.float())
    else:
        assert torch.equal(codes, want.view(torch.uint8))
    if want.dtype != torch.int8:
        assert torch.equal(floats, want.float())


def test_every_float8_is_read() -> None:
    """All 256 bytes, NaN and ±Inf included."""
    made = library("""
#include "cuda.h"
#include "rounding.cuh"
extern "C" void every(float* e4m3, float* e5m2) {
    for (int byte = 0; byte < 256; ++byte) e4m3[byte] = float8_floats<3, 7>(byte), e5m2[byte] = float8_floats<2, 15>(byte);
}
""")
    got = torch.empty(2, 256)
    made.every(*(ctypes.c_void_p(each.data_ptr()) for each in got))
    for floats, dtype in zip(got, (torch.float8_e4m3fn, torch.float8_e5m2), strict=True):
        want = torch.arange(256).to(torch.uint8).view(dtype).float()
        assert torch.equal(floats.isnan(), want.isnan())
        assert torch.equal(floats.nan_to_num(1e9, 2e9, -2e9), want.nan_to_num(1e9, 2e9, -2e9))


def test_what_stands_for_a_gpu_converts_as_torch_does() -> None:
    made = library("""
#include "cuda.h"
#include "numbers.cuh"
extern "C" void convert(const unsigned* bits, int n, unsigned short* half, unsigned short* brain, float* halves) {
    for (int i = 0; i < n; ++i) {
        half[i] = narrow<fp16>(__uint_as_float(bits[i])).bits, brain[i] = narrow<bf16>(__uint_as_float(bits[i])).bits;
        halves[i] = widen(fp16{static_cast<unsigned short>(i)});
    }
}
""")
    n = 2**16
    x = torch.randint(-(2**31), 2**31, (n,)).to(torch.int32).view(torch.float32)
    x[: n // 2] = torch.randn(n // 2) * torch.logspace(-9, 5, n // 2)  # those that a float16 holds
    half, brain, halves = torch.empty(n, dtype=torch.float16), torch.empty(n, dtype=torch.bfloat16), torch.empty(n)
    made.convert(ctypes.c_void_p(x.data_ptr()), n, *(ctypes.c_void_p(t.data_ptr()) for t in (half, brain, halves)))
    want = torch.arange(n).to(torch.int16).view(torch.float16).float()
    for got, right in ((half, x.half()), (brain, x.bfloat16()), (halves, want)):
        assert torch.equal(got.isnan(), right.isnan()) and torch.equal(got[~got.isnan()], right[~right.isnan()])
