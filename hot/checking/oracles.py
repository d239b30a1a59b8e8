"""What every op means, written out in float64 on the CPU: explicit matrices, loops over groups, tables of levels.

Nothing here is shared with the reference backend, so that checking the reference means something. Slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

TINY = 2.0**-126
"""The least scale: the smallest normal float32."""
FLOAT8_LAYOUT = {"e4m3": (3, 7, 127), "e5m2": (2, 15, 124)}
"""Bits of the mantissa, bias of the exponent, how many non-negative bit patterns are finite."""


def exact(t: Tensor) -> Tensor:
    """t in float64 on the CPU."""
    return t.detach().cpu().double()


@lru_cache(maxsize=64)
def hadamard_rows(block: int, rows: tuple[int, ...]) -> Tensor:
    """Rows of the Hadamard matrix: entry (i, j) is (-1)^popcount(i & j)."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in rows], dtype=torch.float64)


def _map(block: int, rows: Sequence[int], signs: Sequence[int], draw: Tensor | None) -> Tensor:
    """The (rank, block) matrix of a projection, gain included."""
    chosen = tuple(rows) if draw is None else tuple(rows[i] for i in draw.tolist())
    matrix = hadamard_rows(block, chosen) / math.sqrt(block if draw is None else len(chosen))
    return matrix * torch.tensor(signs, dtype=torch.float64) if signs else matrix


def project(
    x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str, draw: Tensor | None,
    absolute: bool = False,
) -> Tensor:  # fmt: skip
    """The op `project`, block by block. absolute: of |x| and the absolute matrix, what rounding errors go by."""
    x, matrix = exact(x), _map(block, rows, signs, draw)
    if absolute:
        x, matrix = x.abs(), matrix.abs()
    parts = [x[..., :prefix]]
    for at in range(prefix, x.shape[-1], block):
        run = x[..., at : at + block]
        kept = tail == "keep" and run.shape[-1] < block
        parts.append(run if kept else run @ matrix[:, : run.shape[-1]].T)
    return torch.cat(parts, -1)


def expand(
    c: Tensor, length: int, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str,
    draw: Tensor | None, absolute: bool = False,
) -> Tensor:  # fmt: skip
    """The op `expand`, block by block; absolute as in `project`."""
    c, matrix = exact(c), _map(block, rows, signs, draw)
    if absolute:
        c, matrix = c.abs(), matrix.abs()
    at = min(prefix, length)
    parts = [c[..., :at]]
    for start in range(prefix, length, block):
        width = min(block, length - start)
        kept = tail == "keep" and width < block
        taken = c[..., at : at + (width if kept else matrix.shape[0])]
        parts.append(taken if kept else taken @ matrix[:, :width])
        at += taken.shape[-1]
    return torch.cat(parts, -1)


@lru_cache(maxsize=16)
def levels(format: str) -> Tensor:
    """The values of all codes of a format, ascending; symmetric about zero."""
    if format in FLOAT8_LAYOUT:
        mantissa, bias, finite = FLOAT8_LAYOUT[format]
        one = 2**mantissa
        positive = [
            math.ldexp(bits % one + (one if bits >= one else 0), max(bits >> mantissa, 1) - bias - mantissa)
            for bits in range(1, finite)
        ]
    else:
        count = 2 ** (int(format[3]) - 1) - 1
        positive = [2.0**i if format.startswith("log") else i + 1.0 for i in range(count)]
    return torch.tensor([*(-p for p in reversed(positive)), 0.0, *positive], dtype=torch.float64)


def between(v: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """The nearest level at or below every v, and the nearest at or above it, inside the range of the format."""
    table = levels(format)
    v = v.clamp(table[0], table[-1]).contiguous()
    upper = torch.searchsorted(table, v)
    return torch.where(table[upper] == v, v, table[(upper - 1).clamp_min(0)]), table[upper]


def nearest(v: Tensor, format: str) -> Tensor:
    """v to its nearest level. Ties: to even; away from zero for the logarithmic formats."""
    low, high = between(v, format)
    v = v.clamp(levels(format)[0], levels(format)[-1])
    if format.startswith("log"):
        up_on_tie = v > 0
    else:
        zero = len(levels(format)) // 2
        up_on_tie = (torch.searchsorted(levels(format), high) - zero) % 2 == 0
    below, above = v - low, high - v
    return torch.where((above < below) | ((above == below) & up_on_tie), high, low)


def with_noise(v: Tensor, u: Tensor, format: str) -> Tensor:
    """v rounded by noise u ∈ (0, 1), in the arithmetic of v's dtype: integers ⌊v + u⌋ with v on a grid of 2⁻¹⁵; else up
    where share + u ≥ 1."""
    if format.startswith("int"):
        return ((v * 2**15).round() / 2**15 + u).floor().double().clamp(levels(format)[0], levels(format)[-1])
    size = v.double().abs() if format.startswith("log") else v.double()
    low, high = between(size, format)
    share = ((size - low) / (high - low).where(high > low, 1.0)).to(v.dtype)
    rounded = torch.where((share + u >= 1) & (high > low), high, low)
    return rounded.copysign(v.double()) if format.startswith("log") else rounded


def noise(x: Tensor, rounding: str) -> Tensor:
    """The noise of the roundings without state: ``hashed`` from bits and index, ``pseudo_stochastic`` from bits."""
    bits = x.float().view(torch.int32).long() & 0xFFFFFFFF
    if rounding == "pseudo_stochastic":
        return ((2 * (bits & 0x7FF) + 1).double() / 2**12).float()
    rows, k = bits.shape
    bits = torch.cat([bits, torch.zeros(rows, k % 2, dtype=torch.int64)], 1).unflatten(1, (-1, 2))
    first, second = bits[..., 0], bits[..., 1]
    places = _mixed(torch.arange(rows) ^ 0x27D4EB2F)[:, None] * _mixed(torch.arange(first.shape[1]) ^ 0x165667B1)
    h = (first * 0x9E3779B1 + second * 0x85EBCA77 + places) & 0xFFFFFFFF  # int64 wraps around: the low bits are right
    shares = torch.stack([h >> 17, ((h * 0xC2B2AE3D) & 0xFFFFFFFF) >> 17], 2).flatten(1)[:, :k]
    return ((2 * shares + 1).double() / 2**16).float()


def _mixed(h: Tensor) -> Tensor:
    h = (h * 0x9E3779B1) & 0xFFFFFFFF
    return ((h ^ (h >> 15)) * 0x85EBCA77) & 0xFFFFFFFF | 1


def per_group(x: Tensor, granularity: str, group: int, clip: Sequence[float]) -> Tensor:
    """For every scale group of x (rows, K) the magnitude that maps to the largest code, in the shape of the scale."""
    x, (rows, k) = exact(x), x.shape
    height = {"row": 1, "block": 1, "tile": group}.get(granularity)
    each = [slice(r, r + height) for r in range(0, rows, height)] if height else [slice(None)]
    width = {"token": 1, "block": group, "tile": group}.get(granularity)
    runs = [slice(c, c + width) for c in range(0, k, width)] if width else [slice(None)]
    tops = [_top(x[r, c].abs(), clip) for r in each for c in runs]
    return torch.tensor(tops, dtype=torch.float64).view(len(each), len(runs))


def _top(magnitude: Tensor, clip: Sequence[float]) -> float:
    if not magnitude.numel():
        return 0.0
    top = magnitude.max().item()
    if not clip:
        return top
    clipped = clip[0] * magnitude.square().mean().sqrt().item() - clip[1] * magnitude.mean().item()
    return clipped if 0 < clipped < top else top


def scale_of(top: Tensor, format: str) -> Tensor:
    """Scales in float64 from the magnitudes of `per_group`: at least TINY, NaN for a group that is not finite."""
    scale = (top / levels(format)[-1]).clamp_min(TINY)
    return torch.where(scale.float().isfinite(), scale, torch.nan)


def spread(scale: Tensor, shape: torch.Size, group: int) -> Tensor:
    """A scale with an entry for every element of the shape where it is one of blocks or tiles (group > 0), else as it is."""
    if not group:
        return scale
    rows, k = shape
    down = torch.arange(rows) // group if scale.shape[0] < rows else torch.arange(rows)
    return scale[down][:, torch.arange(k) // group]


def codes_of(x: Tensor, scale: Tensor, format: str, granularity: str, group: int, rounding: str) -> Tensor:
    """The codes of x, float64, given its scale: v = x · (1 / scale) in x's own float32 or float64, then rounded."""
    inverse = spread((1 / scale.float()).to(x.dtype), x.shape, group)
    limit = levels(format)[-1].item()
    v = (x * inverse).clamp(-limit, limit)
    v = torch.where(v.isnan(), 0.0, v)
    return nearest(v.double(), format) if rounding == "nearest" else with_noise(v, noise(x, rounding), format)


def dequantize(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """Codes times scale, in float64."""
    return exact(codes) * spread(exact(scale), codes.shape, group)


def pack4(codes: Tensor) -> Tensor:
    """The bytes: low half the even column, high half the odd one, each mod 16."""
    half = codes.cpu().long() % 16
    half = torch.cat([half, torch.zeros(half.shape[0], half.shape[1] % 2, dtype=torch.int64)], 1)
    return half[:, 0::2] + 16 * half[:, 1::2]


def unpack4(packed: Tensor, length: int) -> Tensor:
    """The codes: the halves of every byte, those from 8 on minus 16."""
    p = packed.cpu().long()
    half = torch.stack([p % 16, p // 16], 2).flatten(1)[:, :length]
    return torch.where(half < 8, half, half - 16)


def kept(codes: Tensor, scale: Tensor, group: int, length: int) -> Tensor:
    """The values (rows, length) of an input that is kept as codes; uint8 ones are two a byte."""
    return dequantize(unpack4(codes, length) if codes.dtype == torch.uint8 else codes, scale, group)


def activation(x: Tensor, function: str) -> Tensor:
    """GELU, its approximation by tanh, or SiLU, in float64."""
    if function == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if function == "gelu_tanh" else "none")


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, centered: bool) -> Tensor:
    """Layer norm or RMS norm of rows, in float64."""
    if centered:
        return torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias, eps)
    return x / (x.square().mean(1, keepdim=True) + eps).sqrt() * weight + bias
