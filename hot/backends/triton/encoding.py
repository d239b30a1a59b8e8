"""What the codes of a format are to a kernel: its constants, and `encode`, which makes the bytes of a tile."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from hot.backends.ops import FLOAT8, MANTISSA, code_dtype, largest_code
from hot.backends.triton import rounding

BIAS = {3: 7, 2: 15}


class Coding(NamedTuple):
    """The constants of a format that the kernels are compiled for. M: mantissa bits of what holds the codes, 0 for int8."""

    KIND: str
    LIMIT: float
    M: int
    BIAS: int


def coding(format: str) -> Coding:
    """The constants of a format of `quantize`."""
    m = MANTISSA.get(code_dtype(format), 0)
    kind = "float8" if format in FLOAT8 else "log" if format.startswith("log") else "int"
    return Coding(kind, largest_code(format), m, BIAS.get(m, 0))


@triton.jit
def encode(
    x, factor, random, row, left, k, R: tl.constexpr, C: tl.constexpr,
    KIND: tl.constexpr, ROUNDING: tl.constexpr, LIMIT: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The code bytes of a tile of x (rows, K) from column `left`, which is even, uint8. factor: 1 / scale, 0 for a group that
    is not finite. random (R, C): uniform numbers for stochastic."""
    v = x * factor.to(x.dtype)
    bits = rounding.float_bits(x)
    h = bits
    if ROUNDING == "hashed":
        first, second = tl.split(tl.reshape(bits, (R, C // 2, 2)))
        place = rounding.row_hash(row)[:, None] * rounding.column_hash(left // 2 + tl.arange(0, C // 2))[None, :]
        first, second = rounding.pair_noise(first, second, place)
        h = tl.reshape(tl.join(first, second), (R, C))
    elif ROUNDING == "stochastic":
        h = (random * 32768.0).to(tl.int32)
    elif ROUNDING == "pseudo_stochastic":
        h = rounding.mantissa_noise(bits)
    if KIND == "int":
        code = rounding.nearest_codes(v, LIMIT) if ROUNDING == "nearest" else rounding.to_codes(v, h, LIMIT)
    else:
        u = rounding.mantissa_fraction(bits) if ROUNDING == "pseudo_stochastic" else rounding.fraction(h)
        if KIND == "log":
            code = rounding.log_codes(v, u, LIMIT, ROUNDING != "nearest")
        else:
            if ROUNDING != "nearest":
                v = rounding.float8_values(v, u, LIMIT, M, BIAS)
            code = rounding.float8_bits(v, LIMIT, M, BIAS).to(tl.int32)
    code = tl.where(factor > 0.0, code, 0)
    if KIND != "float8" and M > 0:  # integers held as float8: exact
        code = rounding.float8_bits(code.to(tl.float32), 448.0, M, BIAS).to(tl.int32)
    return code.to(tl.uint8)
