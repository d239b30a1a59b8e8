"""quantize and dequantize: codes and scales in one pass where a tile holds whole scale groups, else in two.

A matrix (rows, K) is cut into runs of columns: the whole of K, or the K-blocks of a block scale. A program takes R rows ×
C columns of one run. `groups_kernel` holds whole runs; else `largest_kernel` finds max |x| and `codes_kernel` applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hot.backends.devices import on_device
from hot.backends.layouts import FLOATS, cdiv, power_of_2
from hot.backends.ops import MANTISSA, bits_of, code_dtype, is_tiled, scale_shape
from hot.backends.table import register_kernel
from hot.backends.triton import rounding
from hot.backends.triton.encoding import coding, encode
from hot.backends.triton.launch import Launch, Specimen, by_settings, specimen, tile
from hot.backends.triton.tuning import Config, Key, bucket, family, launch

LARGEST_TILE, NEAR_ROWS = 2**14, 16
"""So many elements at most are held in registers, of so many rows at least where these are innermost: else two passes."""


@triton.jit
def _corner(rows, k, span, R: tl.constexpr, C: tl.constexpr, INNERMOST: tl.constexpr):
    """(first row, run, first column) of this program's tile, int64; a tile lies in one run; neighbours as memory has them."""
    program = tl.program_id(0)  # divided in 32 bits, which costs a fifth
    chunks = tl.cdiv(span, C)
    if INNERMOST:
        row_tiles = tl.cdiv(rows, R)
        row, at = program % row_tiles, program // row_tiles
    else:
        across = tl.cdiv(k, span) * chunks
        row, at = program // across, program % across
    run, chunk = (at // chunks).to(tl.int64), (at % chunks).to(tl.int64)
    return row.to(tl.int64) * R, run, run * span + chunk * C


@triton.jit
def _spread(first, run, left, rows, k, span, R: tl.constexpr, C: tl.constexpr):
    """(row (R,), column (C,), mask (R, C)) of the tile at a corner."""
    row = first + tl.arange(0, R)
    column = left + tl.arange(0, C)
    return row, column, (row < rows)[:, None] & (column < tl.minimum(k, (run + 1) * span))[None, :]


@triton.jit
def _load(x, row, column, x_row, x_column, mask):
    """A tile of x as float32, or float64 where it is."""
    values = tl.load(x + (row * x_row)[:, None] + (column * x_column)[None, :], mask=mask, other=0.0)
    return values if values.dtype == tl.float64 else values.to(tl.float32)


@triton.jit
def groups_kernel(
    x, codes, scale, random, rows, k, span, x_row, x_column, R: tl.constexpr, C: tl.constexpr, INNERMOST: tl.constexpr,
    KIND: tl.constexpr, ROUNDING: tl.constexpr, LIMIT: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """C ≥ span: every row of the tile is one scale group. PACKED: two codes a byte, of an even span if there are several."""
    first, run, left = _corner(rows, k, span, R, C, INNERMOST)
    row, column, mask = _spread(first, run, left, rows, k, span, R, C)
    values = _load(x, row, column, x_row, x_column, mask)
    # scale = max |x| / limit; codes = round(x · (1 / scale))
    own, factor = rounding.scale_of(rounding.largest_bits(values, 1), LIMIT)
    tl.store(scale + row * tl.cdiv(k, span) + run, own, mask=row < rows)
    target = (row * k)[:, None] + column[None, :]
    noise = tl.load(random + target, mask=mask, other=0.0) if ROUNDING == "stochastic" else 0.0
    code = encode(values, factor[:, None], noise, row, left, k, R, C, KIND, ROUNDING, LIMIT, M, BIAS)
    if PACKED:
        even, odd = tl.split(tl.reshape(code, (R, C // 2, 2)))
        length = tl.cdiv(k, 2)
        half = tl.arange(0, C // 2)
        inside = (row < rows)[:, None] & (half < tl.cdiv(tl.minimum(span, k - left), 2))[None, :]
        at = (row * length)[:, None] + (left // 2 + half)[None, :]
        tl.store(codes + at, (even & 15) | (odd << 4), mask=inside)
    else:
        tl.store(codes + target, code, mask=mask)


@triton.jit
def largest_kernel(
    x, top, rows, k, span, x_row, x_column, R: tl.constexpr, C: tl.constexpr, INNERMOST: tl.constexpr, PER: tl.constexpr
):
    """max |x| as bits, merged into `top` (zeros at first) by atomic maxima, whose order does not matter."""
    first, run, left = _corner(rows, k, span, R, C, INNERMOST)
    row, column, mask = _spread(first, run, left, rows, k, span, R, C)
    values = _load(x, row, column, x_row, x_column, mask)
    if PER == "row":
        at = top + row * tl.cdiv(k, span) + run
        tl.atomic_max(at, rounding.largest_bits(values, 1), mask=row < rows, sem="relaxed")
    elif PER == "token":
        tl.atomic_max(top + column, rounding.largest_bits(values, 0), mask=column < k, sem="relaxed")
    else:
        tl.atomic_max(top, tl.max(rounding.largest_bits(values, 1), 0), sem="relaxed")


@triton.jit
def codes_kernel(
    x, codes, scale, random, top, rows, k, span, x_row, x_column, R: tl.constexpr, C: tl.constexpr, INNERMOST: tl.constexpr,
    PER: tl.constexpr, KIND: tl.constexpr, ROUNDING: tl.constexpr, LIMIT: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Codes by the maxima of `largest_kernel`. The programs of the first tile of a group write its scale."""
    first, run, left = _corner(rows, k, span, R, C, INNERMOST)
    row, column, mask = _spread(first, run, left, rows, k, span, R, C)
    values = _load(x, row, column, x_row, x_column, mask)
    if PER == "row":
        at = row * tl.cdiv(k, span) + run
        own, factor = rounding.scale_of(tl.load(top + at, mask=row < rows, other=0), LIMIT)
        if left == run * span:
            tl.store(scale + at, own, mask=row < rows)
        factor = factor[:, None]
    elif PER == "token":
        own, factor = rounding.scale_of(tl.load(top + column, mask=column < k, other=0), LIMIT)
        if first == 0:
            tl.store(scale + column, own, mask=column < k)
        factor = factor[None, :]
    else:
        own, factor = rounding.scale_of(tl.load(top + tl.arange(0, 1)), LIMIT)
        if tl.program_id(0) == 0:
            tl.store(scale + tl.arange(0, 1), own)
        factor = factor[:, None]
    target = (row * k)[:, None] + column[None, :]
    noise = tl.load(random + target, mask=mask, other=0.0) if ROUNDING == "stochastic" else 0.0
    code = encode(values, factor, noise, row, left, k, R, C, KIND, ROUNDING, LIMIT, M, BIAS)
    tl.store(codes + target, code, mask=mask)


@triton.jit
def dequantize_kernel(
    codes, scale, out, rows, k, group, codes_row, codes_column, scale_row, scale_column,
    R: tl.constexpr, C: tl.constexpr, INNERMOST: tl.constexpr, M: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """out = codes · scale, in float64 where out is, else in float32. M: mantissa bits of float8 codes, 0 for integers."""
    first, run, left = _corner(rows, k, k, R, C, INNERMOST)
    row, column, mask = _spread(first, run, left, rows, k, k, R, C)
    code = tl.load(codes + (row * codes_row)[:, None] + (column * codes_column)[None, :], mask=mask, other=0)
    if PER == "row":
        own = tl.load(scale + row * scale_row, mask=row < rows, other=0.0)[:, None]
    else:
        block = (column.to(tl.int32) // group).to(tl.int64)  # a division in 64 bits takes as long as all the rest
        own = tl.load(scale + (row * scale_row)[:, None] + (block * scale_column)[None, :], mask=mask, other=0.0)
    v = rounding.float8_floats(code, M) if M > 0 else code.to(tl.float32)
    if out.dtype.element_ty == tl.float64:
        v = v.to(tl.float64) * own.to(tl.float64)
    else:
        v *= own
    tl.store(out + (row * k)[:, None] + column[None, :], v.to(out.dtype.element_ty), mask=mask)


def _candidates(key: Key) -> list[Config]:
    sizes, warps = (1024, 2048, 4096, 8192), (2, 4, 8, 16)
    return [{"ELEMENTS": size, "num_warps": n} for size in sizes for n in warps if 8 <= size // (32 * n) <= 64]


def _default(key: Key) -> Config:
    """32 elements a thread, also where one long row makes the tile larger than ELEMENTS."""
    one_pass, exponent = key[-1] == "one pass", int(key[0])
    return {"ELEMENTS": 4096, "num_warps": min(max(2**exponent // 1024, 4), 16) if one_pass else 4}


QUANTIZE, DEQUANTIZE = (family(name, _default, _candidates) for name in ("quantization", "dequantization"))
"""Shape class: class of the run's length, rows innermost or not, dtype, format or the second dtype, one pass or two."""


def _innermost(rows: int, strides: tuple[int, ...]) -> bool:
    """Whether neighbouring rows are nearer in memory than neighbouring columns."""
    return rows > 1 and 0 < strides[0] < strides[1]


def _whole(rows: int, span: int, elements: int, innermost: bool) -> tuple[int, int]:
    """As `tile`, of whole runs: as many rows as make `elements`, NEAR_ROWS at least where they are innermost."""
    columns = max(power_of_2(span), 2)
    return min(power_of_2(rows), max(elements // columns, NEAR_ROWS if innermost else 1)), columns


def _supports(x: Tensor, format: str, granularity: str, group: int, rounding: str, clip: Sequence[float]) -> bool:
    """No clip; a pair of neighbours with one hash must lie in one K-block."""
    split_pairs = rounding == "hashed" and granularity == "block" and group % 2 == 1
    return x.dtype in FLOATS and not clip and not split_pairs and granularity != "tile"


class _Quantization:
    """`quantize` of one size: its launches, by their settings."""

    def __init__(
        self, rows: int, k: int, strides: tuple[int, ...], dtype: torch.dtype,
        format: str, granularity: str, group: int, rounding: str, packed: bool,
    ) -> None:  # fmt: skip
        self.rows, self.k, self.per = rows, k, "row" if granularity == "block" else granularity
        self.span = min(group, k) if granularity == "block" else k
        self.numbers = rows, k, self.span, *strides
        self.packed, width = packed, cdiv(k, 2) if packed else k
        self.room = (rows, width), torch.uint8 if packed else code_dtype(format)
        self.scales, self.noisy = scale_shape(rows, k, granularity, group), rounding == "stochastic"
        self.innermost = _innermost(rows, strides)
        self.one_pass = (
            self.per == "row" and power_of_2(self.span) * (NEAR_ROWS if self.innermost else 1) <= LARGEST_TILE
        )
        self.top = torch.int64 if dtype == torch.float64 else torch.int32
        self.given = {"ROUNDING": rounding, **coding(format)._asdict()}
        passes = "one pass" if self.one_pass else "two passes"
        self.key: Key = (bucket(self.span), "rows" if self.innermost else "columns", str(dtype), format, passes)
        self.launches = by_settings(self._launches)

    def _launches(self, settings: Config) -> tuple[Launch, ...]:
        """That of `groups_kernel`, or those of the two passes."""
        r, c = (_whole if self.one_pass else tile)(self.rows, self.span, settings["ELEMENTS"], self.innermost)
        programs = cdiv(self.rows, r) * cdiv(self.k, self.span) * cdiv(self.span, c)
        # no fusion: every operation is rounded by itself, as the reference's are
        how = {"num_warps": settings["num_warps"], "enable_fp_fusion": False}
        tiles = {"R": r, "C": c, "INNERMOST": self.innermost}
        if self.one_pass:
            return (Launch(groups_kernel, programs, self.numbers, **how, **tiles, **self.given, PACKED=self.packed),)
        return (
            Launch(largest_kernel, programs, self.numbers, **how, **tiles, PER=self.per),
            Launch(codes_kernel, programs, self.numbers, **how, **tiles, PER=self.per, **self.given),
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = self.room
        codes = torch.empty(shape, dtype=dtype, device=x.device)
        scale = torch.empty(self.scales, dtype=torch.float32, device=x.device)
        random = torch.rand(x.shape, dtype=torch.float32, device=x.device) if self.noisy else scale
        bytes = codes if self.packed else codes.view(torch.uint8)

        def run(settings: Config) -> None:
            *first, last = self.launches(settings)
            if not first:
                last(x, bytes, scale, random)
                return
            top = torch.zeros(self.scales, dtype=self.top, device=x.device)
            first[0](x, top)
            last(x, bytes, scale, random, top)

        with on_device(x):
            launch(QUANTIZE, self.key, x.device, run)
        return codes, scale


_quantization = lru_cache(maxsize=4096)(_Quantization)


@register_kernel("quantize", backend="triton", supports=_supports)
def quantize(
    x: Tensor, format: str, granularity: str, group: int, rounding: str, clip: Sequence[float]
) -> tuple[Tensor, Tensor]:
    if not x.numel():
        codes = torch.empty(x.shape, dtype=code_dtype(format), device=x.device)
        shape = scale_shape(x.shape[0], x.shape[1], granularity, group)
        return codes, torch.full(shape, torch.finfo(torch.float32).tiny, dtype=torch.float32, device=x.device)
    return _quantization(*x.shape, x.stride(), x.dtype, format, granularity, group, rounding, False)(x)


def _supports_packed(
    x: Tensor, format: str, granularity: str, group: int, rounding: str, clip: Sequence[float]
) -> bool:
    """Whole groups in registers, pairs of neighbours in one of them."""
    return not clip and _packs(x.shape, x.stride(), x.dtype, format, granularity, group)


@lru_cache(maxsize=4096)
def _packs(
    shape: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype, format: str, granularity: str, group: int
) -> bool:
    (rows, k), whole = shape, granularity == "row"
    if not (whole or granularity == "block") or not format.startswith("int") or "." in format or bits_of(format) > 4:
        return False
    if dtype not in FLOATS or not rows * k or _innermost(rows, strides):
        return False
    return power_of_2(k if whole else min(group, k)) <= LARGEST_TILE and (whole or group % 2 == 0)


@register_kernel("quantize_pack4", backend="triton", supports=_supports_packed)
def quantize_pack4(
    x: Tensor, format: str, granularity: str, group: int, rounding: str, clip: Sequence[float]
) -> tuple[Tensor, Tensor]:
    return _quantization(*x.shape, x.stride(), x.dtype, format, granularity, group, rounding, True)(x)


def _serves(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> bool:
    return dtype in FLOATS and not is_tiled(codes, scale, group)


@register_kernel("dequantize", backend="triton", supports=_serves)
def dequantize(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    rows, k = codes.shape
    out = torch.empty((rows, k), dtype=dtype, device=codes.device)
    if not out.numel():
        return out
    source = codes.view(torch.uint8) if codes.dtype in MANTISSA else codes
    steps = tuple(stride if size > 1 else 0 for size, stride in zip(scale.shape, scale.stride(), strict=True))
    per = "row" if scale.shape[1] == 1 and group == 0 else "column"
    key, launches = _dequantizations(rows, k, codes.stride(), steps, group, per, codes.dtype, dtype)
    with on_device(codes):
        launch(DEQUANTIZE, key, codes.device, lambda settings: launches(settings)(source, scale, out))
    return out


@lru_cache(maxsize=4096)
def _dequantizations(
    rows: int, k: int, strides: tuple[int, ...], steps: tuple[int, ...], group: int, per: str,
    codes: torch.dtype, dtype: torch.dtype,
) -> tuple[Key, Callable[[Config], Launch]]:  # fmt: skip
    """The shape class of one size, and its launch by settings."""
    innermost = _innermost(rows, strides)

    def make(settings: Config) -> Launch:
        r, c = tile(rows, k, settings["ELEMENTS"], innermost)
        return Launch(
            dequantize_kernel, cdiv(rows, r) * cdiv(k, c), (rows, k, max(group, 1), *strides, *steps),
            R=r, C=c, INNERMOST=innermost, M=MANTISSA.get(codes, 0), PER=per, num_warps=settings["num_warps"],
        )  # fmt: skip

    return (bucket(k), "rows" if innermost else "columns", str(codes), str(dtype)), by_settings(make)


_CODED = {"codes": "*u8", "scale": "*fp32", "random": "*fp32"}
_WIDE, _TALL = {"x_column": 1, "R": 8, "C": 512, "INNERMOST": False}, {"x_row": 1, "R": 32, "C": 128, "INNERMOST": True}


def _groups(dtype: str, format: str, rounding: str, layout: dict[str, Any], packed: bool = False) -> Specimen:
    how = {"ROUNDING": rounding, "PACKED": packed, **layout, **coding(format)._asdict()}
    return specimen(groups_kernel, {"x": dtype, **_CODED}, **how)


def _codes(per: str) -> Specimen:
    how = {"PER": per, "ROUNDING": "pseudo_stochastic", **_TALL, **coding("e5m2")._asdict()}
    return specimen(codes_kernel, {"x": "*fp32", "top": "*i32", **_CODED}, **how)


def _dequantize(codes: str, out: str, mantissa: int, per: str) -> Specimen:
    layout = {"codes_column": 1, "R": 8, "C": 512, "INNERMOST": False}
    return specimen(dequantize_kernel, {"codes": codes, "scale": "*fp32", "out": out}, M=mantissa, PER=per, **layout)


SPECIMENS = [
    _groups("*bf16", "int4.e4m3", "hashed", _WIDE),
    _groups("*fp32", "int8", "stochastic", _WIDE),
    _groups("*fp64", "log4", "nearest", _WIDE),
    _groups("*fp16", "e4m3", "hashed", _TALL),
    _groups("*bf16", "int4", "hashed", _WIDE, True),
    _groups("*fp32", "int3", "nearest", _WIDE, True),
    *(specimen(largest_kernel, {"x": "*bf16", "top": "*i32"}, PER=per, **_WIDE) for per in ("row", "token", "tensor")),
    specimen(largest_kernel, {"x": "*fp64", "top": "*i64"}, PER="token", **_TALL),
    *(_codes(per) for per in ("row", "token", "tensor")),
    _dequantize("*i8", "*bf16", 0, "row"),
    _dequantize("*u8", "*fp32", 3, "column"),
    _dequantize("*u8", "*fp64", 2, "row"),
]
