"""activation, activation_backward and norm_backward: one reading of codes and gradient, one writing of the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hot.backends.activation_ops import FUNCTIONS
from hot.backends.devices import multiprocessors, on_device
from hot.backends.layouts import cdiv, power_of_2
from hot.backends.ops import is_tiled
from hot.backends.table import register_kernel
from hot.backends.triton.launch import Launch, Specimen, by_settings, specimen, tile
from hot.backends.triton.tuning import Config, Key, bucket, family, launch

HALVES = (torch.bfloat16, torch.float16, torch.float32)
LONGEST = 8192
"""A row of a norm is held whole, in registers."""


@triton.jit
def _coded(
    codes, scale, row, chunk, rows, k, length, scale_row,
    R: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The values (R, C) of rows in columns from chunk · C on, float32; zeros outside. length: bytes of a row."""
    column = chunk * C + tl.arange(0, C)
    inside = (row < rows)[:, None]
    if PACKED:
        at = chunk * (C // 2) + tl.arange(0, C // 2)
        byte = tl.load(codes + (row * length)[:, None] + at[None, :], mask=inside & (at < length)[None, :], other=0)
        signed = byte.to(tl.int8, bitcast=True)
        code = tl.reshape(tl.join((signed << 4).to(tl.int8) >> 4, signed >> 4), (R, C))
    else:
        code = tl.load(codes + (row * length)[:, None] + column[None, :], mask=inside & (column < k)[None, :], other=0)
    if GROUP == 0:
        own = tl.load(scale + row * scale_row, mask=row < rows, other=0.0)[:, None]
    elif C % GROUP == 0:  # a scale is read once, not by each of its columns
        block = chunk * (C // GROUP) + tl.arange(0, C // GROUP)
        wide = inside & (block * GROUP < k)[None, :]
        some = tl.load(scale + (row * scale_row)[:, None] + block[None, :], mask=wide, other=0.0)
        own = tl.reshape(tl.broadcast_to(some[:, :, None], (R, C // GROUP, GROUP)), (R, C))
    else:  # GROUP is a constant: dividing by a number that is not takes as long as all the rest
        at = (row * scale_row)[:, None] + (column // GROUP)[None, :]
        own = tl.load(scale + at, mask=inside & (column < k)[None, :], other=0.0)
    return code.to(tl.float32) * own


@triton.jit
def _derivative(x, FUNCTION: tl.constexpr):
    if FUNCTION == "gelu":
        # Φ(x) + x φ(x); both by one exponential: erf by M. Abramowitz and I. Stegun 7.1.26, which is off by 1.5e-7 at most
        bell = tl.exp(-0.5 * x * x)
        t = 1.0 / (1.0 + 0.2316418882 * tl.abs(x))  # 0.3275911 / √2
        series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
        tail = t * series * bell  # (1 − erf) / 2
        return tl.where(x > 0, 1.0 - tail, tail) + 0.3989422804014327 * x * bell
    elif FUNCTION == "gelu_tanh":
        inner = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)  # twice: tanh(u) = 2 σ(2u) − 1
        share = tl.sigmoid(inner)
        return share + x * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    share = tl.sigmoid(x)
    return share * (1.0 + x * (1.0 - share))


@triton.jit
def _function(x, FUNCTION: tl.constexpr):
    if FUNCTION == "gelu":
        t = 1.0 / (1.0 + 0.2316418882 * tl.abs(x))  # as in _derivative
        series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
        tail = t * series * tl.exp(-0.5 * x * x)
        return x * tl.where(x > 0, 1.0 - tail, tail)
    elif FUNCTION == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    return x * tl.sigmoid(x)


@triton.jit
def values_kernel(
    codes, scale, out, rows, k, length, scale_row,
    R: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    """R rows × C columns a program. length: bytes of a row of codes."""
    # out = f(code · scale)
    program, chunks = tl.program_id(0), tl.cdiv(k, C)
    row = (program // chunks).to(tl.int64) * R + tl.arange(0, R)
    chunk = program % chunks
    x = _coded(codes, scale, row, chunk, rows, k, length, scale_row, R, C, PACKED, GROUP)
    column = chunk * C + tl.arange(0, C)
    mask = (row < rows)[:, None] & (column < k)[None, :]
    tl.store(out + (row * k)[:, None] + column[None, :], _function(x, FUNCTION).to(out.dtype.element_ty), mask=mask)


@triton.jit
def activation_kernel(
    g, codes, scale, out, rows, k, length, scale_row, g_row,
    R: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    """R rows × C columns a program. length: bytes of a row of codes."""
    # out = g · f'(code · scale)
    program, chunks = tl.program_id(0), tl.cdiv(k, C)
    row = (program // chunks).to(tl.int64) * R + tl.arange(0, R)
    chunk = program % chunks
    x = _coded(codes, scale, row, chunk, rows, k, length, scale_row, R, C, PACKED, GROUP)
    column = chunk * C + tl.arange(0, C)
    mask = (row < rows)[:, None] & (column < k)[None, :]
    grad = tl.load(g + (row * g_row)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    result = grad * _derivative(x, FUNCTION)
    tl.store(out + (row * k)[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm_kernel(
    g, codes, scale, weight, out, sums, rows, k, length, scale_row, g_row, programs, share, eps,
    R: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, CENTERED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """R whole rows at a time, `share` times a program. sums (2, programs, k): what a program adds to the gradients of weight
    and bias."""
    program = tl.program_id(0)
    column = tl.arange(0, C)
    of_weight = tl.zeros((R, C), dtype=tl.float32)
    of_bias = tl.zeros((R, C), dtype=tl.float32)
    own = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32) if WEIGHTED else 1.0
    for turn in range(share):
        row = (program + turn * programs).to(tl.int64) * R + tl.arange(0, R)
        mask = (row < rows)[:, None] & (column < k)[None, :]
        x = _coded(codes, scale, row, 0, rows, k, length, scale_row, R, C, PACKED, GROUP)
        grad = tl.load(g + (row * g_row)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        # n = (x − mean x) / √(mean x² + eps); out = (gw − mean gw − n · mean(gw · n)) / √(…)
        if CENTERED:
            x = tl.where(mask, x - (tl.sum(x, 1) / k)[:, None], 0.0)
        factor = tl.rsqrt(tl.sum(x * x, 1) / k + eps)[:, None]
        normed = x * factor
        inner = grad * own
        result = inner - normed * (tl.sum(inner * normed, 1) / k)[:, None]
        if CENTERED:
            result -= (tl.sum(inner, 1) / k)[:, None]
        tl.store(out + (row * k)[:, None] + column[None, :], (result * factor).to(out.dtype.element_ty), mask=mask)
        of_weight += grad * normed
        of_bias += grad
    at = program * k + column
    tl.store(sums + at, tl.sum(of_weight, 0), mask=column < k)
    tl.store(sums + programs * k + at, tl.sum(of_bias, 0), mask=column < k)


def _activation_settings(key: Key) -> list[Config]:
    return [{"ELEMENTS": elements, "num_warps": warps} for elements in (2048, 4096, 8192) for warps in (4, 8)]


def _norm_settings(key: Key) -> list[Config]:
    return [
        {"ELEMENTS": elements, "num_warps": warps, "PROGRAMS": programs}
        for elements in (1024, 2048, 4096)
        for warps in (4, 8, 16)
        for programs in (2, 4, 8)
        if elements // (32 * warps) >= 4
    ]


ACTIVATION = family("activation", lambda key: {"ELEMENTS": 4096, "num_warps": 4}, _activation_settings)
"""Shape class: values or gradient, class of K, dtype, packed or not, function."""
NORM = family("norm", lambda key: {"ELEMENTS": 2048, "num_warps": 4, "PROGRAMS": 4}, _norm_settings)
"""Shape class: class of K, the dtypes of gradient, result and weight, packed or not. PROGRAMS: at most, a multiprocessor."""


def _fits(g: Tensor, codes: Tensor, scale: Tensor, group: int) -> bool:
    """Dense rows, integer codes, a scale a row or block."""
    if g.dtype not in HALVES or not g.numel() or (g.shape[1] > 1 and g.stride(1) != 1):
        return False
    return _fits_codes(codes, scale, group)


def _fits_codes(codes: Tensor, scale: Tensor, group: int) -> bool:
    """Integer codes, a scale a row or block."""
    if codes.dtype not in (torch.int8, torch.uint8) or not (codes.is_contiguous() and scale.is_contiguous()):
        return False
    return not is_tiled(codes, scale, group) and (group > 0 or scale.shape[1] == 1)


def _scale_row(scale: Tensor) -> int:
    return scale.shape[1] if scale.shape[0] > 1 else 0


def _serves_values(
    codes: Tensor, scale: Tensor, group: int, length: int, function: str, dtype: torch.dtype
) -> bool:  # fmt: skip
    return dtype in HALVES and codes.numel() > 0 and function in FUNCTIONS and _fits_codes(codes, scale, group)


@register_kernel("activation", backend="triton", supports=_serves_values)
def activation(codes: Tensor, scale: Tensor, group: int, length: int, function: str, dtype: torch.dtype) -> Tensor:
    out = torch.empty((codes.shape[0], length), dtype=dtype, device=codes.device)
    packed = codes.dtype == torch.uint8
    key, launches = _activations(*out.shape, None, packed, group, _scale_row(scale), function, dtype)
    with on_device(codes):
        launch(ACTIVATION, key, codes.device, lambda settings: launches(settings)(codes, scale, out))
    return out


def _serves_activation(g: Tensor, codes: Tensor, scale: Tensor, group: int, function: str) -> bool:
    return function in FUNCTIONS and _fits(g, codes, scale, group)


@register_kernel("activation_backward", backend="triton", supports=_serves_activation)
def activation_backward(g: Tensor, codes: Tensor, scale: Tensor, group: int, function: str) -> Tensor:
    out = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    packed = codes.dtype == torch.uint8
    key, launches = _activations(*g.shape, g.stride(0), packed, group, _scale_row(scale), function, g.dtype)
    with on_device(g):
        launch(ACTIVATION, key, g.device, lambda settings: launches(settings)(g, codes, scale, out))
    return out


@lru_cache(maxsize=4096)
def _activations(
    rows: int, k: int, g_row: int | None, packed: bool, group: int, scale_row: int, function: str, dtype: torch.dtype
) -> tuple[Key, Callable[[Config], Launch]]:
    """The shape class of one size, and its launch by settings. g_row: None where there is no gradient."""
    numbers = rows, k, cdiv(k, 2) if packed else k, scale_row, *(() if g_row is None else (g_row,))
    kernel = values_kernel if g_row is None else activation_kernel

    def make(settings: Config) -> Launch:
        r, c = tile(rows, k, settings["ELEMENTS"], False)
        return Launch(
            kernel, cdiv(rows, r) * cdiv(k, c), numbers,
            R=r, C=c, PACKED=packed, GROUP=group, FUNCTION=function, num_warps=settings["num_warps"],
        )  # fmt: skip

    way = "values" if g_row is None else "gradient"
    return (way, bucket(k), str(dtype), "packed" if packed else "bytes", function), by_settings(make)


def _serves_norm(
    g: Tensor, codes: Tensor, scale: Tensor, group: int, weight: Tensor | None, eps: float, centered: bool, dtype: torch.dtype
) -> bool:  # fmt: skip
    weighs = weight is None or (weight.dtype in HALVES and weight.is_contiguous())
    return _fits(g, codes, scale, group) and weighs and dtype in HALVES and g.shape[1] <= LONGEST


@register_kernel("norm_backward", backend="triton", supports=_serves_norm)
def norm_backward(
    g: Tensor, codes: Tensor, scale: Tensor, group: int, weight: Tensor | None, eps: float, centered: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = torch.empty(g.shape, dtype=dtype, device=g.device)
    how = codes.dtype == torch.uint8, group, _scale_row(scale), eps, centered, weight is not None
    dtypes = g.dtype, dtype, torch.float32 if weight is None else weight.dtype
    key, programs, launches = _norms(*g.shape, g.stride(0), *how, *dtypes, multiprocessors(g.device))
    found: list[Tensor] = []

    def run(settings: Config) -> None:
        sums = torch.empty((2, programs(settings), g.shape[1]), dtype=torch.float32, device=g.device)
        launches(settings)(g, codes, scale, scale if weight is None else weight, out, sums)
        found[:] = sums.sum(1).unbind()

    with on_device(g):
        launch(NORM, key, g.device, run)
    return out, found[0], found[1]


@lru_cache(maxsize=4096)
def _norms(
    rows: int, k: int, g_row: int, packed: bool, group: int, scale_row: int, eps: float, centered: bool, weighted: bool,
    g_dtype: torch.dtype, dtype: torch.dtype, weight_dtype: torch.dtype, many: int,
) -> tuple[Key, Callable[[Config], int], Callable[[Config], Launch]]:  # fmt: skip
    """The shape class of one size, how many programs it has, and its launch, by settings."""
    columns = max(power_of_2(k), 2)

    def at_once(settings: Config) -> int:
        return min(power_of_2(rows), max(settings["ELEMENTS"] // columns, 1))

    def programs(settings: Config) -> int:
        return min(cdiv(rows, at_once(settings)), settings["PROGRAMS"] * many)

    def make(settings: Config) -> Launch:
        r, count = at_once(settings), programs(settings)
        share = cdiv(cdiv(rows, r), count)
        numbers = rows, k, cdiv(k, 2) if packed else k, scale_row, g_row, count, share, eps
        return Launch(
            norm_kernel, count, numbers, R=r, C=columns, PACKED=packed, GROUP=group, CENTERED=centered,
            WEIGHTED=weighted, num_warps=settings["num_warps"],
        )  # fmt: skip

    key: Key = (bucket(k), str(g_dtype), str(dtype), str(weight_dtype), "packed" if packed else "bytes")
    return key, programs, by_settings(make)


def _activation(g: str, codes: str, function: str, blocks: bool) -> Specimen:
    how = {"R": 8, "C": 512, "PACKED": codes == "*u8", "GROUP": 64 * blocks, "FUNCTION": function}
    return specimen(activation_kernel, {"g": g, "codes": codes, "scale": "*fp32", "out": g}, **how)


def _values(codes: str, function: str, out: str) -> Specimen:
    how = {"R": 8, "C": 512, "PACKED": codes == "*u8", "GROUP": 64 * (codes == "*u8"), "FUNCTION": function}
    return specimen(values_kernel, {"codes": codes, "scale": "*fp32", "out": out}, **how)


def _norm(g: str, codes: str, out: str, centered: bool, weighted: bool) -> Specimen:
    how = {"R": 2, "C": 1024, "PACKED": codes == "*u8", "GROUP": 64 * (codes == "*u8")}
    pointers = {"g": g, "codes": codes, "scale": "*fp32", "weight": "*fp32", "out": out, "sums": "*fp32", "eps": "fp32"}
    return specimen(norm_kernel, pointers, CENTERED=centered, WEIGHTED=weighted, **how)


SPECIMENS = [
    _activation("*bf16", "*u8", "gelu", True),
    _activation("*fp32", "*i8", "gelu_tanh", False),
    _activation("*fp16", "*i8", "silu", False),
    _values("*u8", "gelu", "*bf16"),
    _values("*i8", "gelu_tanh", "*fp16"),
    _values("*i8", "silu", "*fp32"),
    _norm("*bf16", "*i8", "*fp32", True, True),
    _norm("*fp32", "*u8", "*bf16", False, False),
]
