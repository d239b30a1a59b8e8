"""hadamard, project, expand: block transforms of the last axis.

One kernel: butterflies over tiles of whole blocks, between a load and a store of which one is in natural order and the other
goes through a table of positions. Every element is read once and written once, whatever the strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hot.backends.devices import on_device
from hot.backends.layouts import cdiv, positions, rows_of
from hot.backends.transforms import register_transforms
from hot.backends.triton.launch import Launch, Specimen, by_settings, specimen, tile
from hot.backends.triton.tuning import Config, Key, bucket, family, launch


@triton.jit
def butterflies(x, M: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr):
    """H x of every row of x (M, N), N = 2^BITS, H in natural order and without its gain: BITS sums and differences each."""
    # H_2n = [[H_n, H_n], [H_n, −H_n]], so each bit of the index takes (a, b) to (a + b, a − b), in any order: take the last
    # bit, put it first, and so on until all had their turn
    for _ in tl.static_range(BITS):
        a, b = tl.split(tl.reshape(x, (M, N // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (M, N))
    return x


@triton.jit
def transform_kernel(
    x, out, position, signs, number, fast, stride, far, step, out_stride, out_far, first, last, blocks, row_tiles, rank,
    GAIN: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    EXPAND: tl.constexpr, MAPPED: tl.constexpr, SIGNED: tl.constexpr, INNERMOST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """R rows × B blocks of N a program. Natural columns: first … last; the others: first + block·rank + position[j], if ≥ 0.
    EVEN: rows are evenly spaced."""
    # project: out = GAIN · (H (signs · x))[rows];  expand: out = GAIN · signs · H (x at rows, else 0)
    program = tl.program_id(0)  # divided in 32 bits, which costs a fifth, multiplied in 64
    block_tiles = tl.cdiv(blocks, B)
    if INNERMOST:
        row, block = program % row_tiles, program // row_tiles
    else:
        row, block = program // block_tiles, program % block_tiles
    row = row.to(tl.int64) * R + tl.arange(0, R)
    block = block.to(tl.int64) * B
    j = tl.arange(0, B * N)
    natural = first + block * N + j
    in_natural = (row < number)[:, None] & (natural < last)[None, :]
    if MAPPED:
        at = tl.load(position + j % N)
        block += j // N
        mapped = first + block * rank + at
        in_mapped = (row < number)[:, None] & ((at >= 0) & (block < blocks))[None, :]
    else:
        mapped = natural
        in_mapped = (row < number)[:, None] & (natural < first + blocks * N)[None, :]
    if EVEN:
        source = x + (row * stride)[:, None]
        target = out + (row * out_stride)[:, None]
    else:
        source = x + (row % fast * stride + row // fast * far)[:, None]
        target = out + (row % fast * out_stride + row // fast * out_far)[:, None]
    if EXPAND:
        y = tl.load(source + (mapped * step)[None, :], mask=in_mapped, other=0.0).to(out.dtype.element_ty)
    else:
        y = tl.load(source + (natural * step)[None, :], mask=in_natural, other=0.0).to(out.dtype.element_ty)
        if SIGNED:
            y *= tl.load(signs + j % N).to(y.dtype)[None, :]
    y = tl.reshape(butterflies(tl.reshape(y, (R * B, N)), R * B, N, BITS), (R, B * N)) * GAIN
    if EXPAND:
        if SIGNED:
            y *= tl.load(signs + j % N).to(y.dtype)[None, :]
        tl.store(target + natural[None, :], y, mask=in_natural)
    else:
        tl.store(target + mapped[None, :], y, mask=in_mapped)


def _candidates(key: Key) -> list[Config]:
    return [{"ELEMENTS": elements, "num_warps": warps} for elements in (1024, 2048, 4096, 8192) for warps in (2, 4, 8)]


TRANSFORM = family("transform", lambda key: {"ELEMENTS": 4096, "num_warps": 4}, _candidates)
"""Shape class: block, class of the length, rows innermost or not, dtype."""


def _launch(
    x: Tensor, out: Tensor, first: int, last: int, block: int, rank: int, mapped: bool,
    rows: Sequence[int], signs: Sequence[int], draw: Tensor | None, expand: bool,
) -> None:  # fmt: skip
    x, *places = rows_of(x, out.shape[-1])
    position, sign = positions(block, rows, signs, draw, x.device)
    gain = (block if draw is None else rank) ** -0.5
    key, launches = _launches(tuple(places), x.dtype, first, last, block, rank, gain, expand, mapped, bool(signs))
    with on_device(x):
        launch(TRANSFORM, key, x.device, lambda settings: launches(settings)(x, out, position, sign))


@lru_cache(maxsize=4096)
def _launches(
    places: tuple[int, ...], dtype: torch.dtype, first: int, last: int, block: int, rank: int, gain: float,
    expand: bool, mapped: bool, signed: bool,
) -> tuple[Key, Callable[[Config], Launch]]:  # fmt: skip
    """The shape class of one size, and its launch by settings. places: where the rows lie, as of `Rows`."""
    number, fast, stride, far, step, out_stride, out_far, innermost = places
    blocks = cdiv(last - first, block)

    def make(settings: Config) -> Launch:
        r, columns = tile(number, blocks * block, settings["ELEMENTS"], bool(innermost))
        columns = max(columns, block)
        r = max(min(r, settings["ELEMENTS"] // columns), 1)
        row_tiles, b = cdiv(number, r), columns // block
        return Launch(
            transform_kernel, row_tiles * cdiv(blocks, b),
            (number, fast, stride, far, step, out_stride, out_far, first, last, blocks, row_tiles, rank),
            GAIN=gain, N=block, BITS=block.bit_length() - 1, R=r, B=b, EXPAND=expand, MAPPED=mapped, SIGNED=signed,
            INNERMOST=innermost, EVEN=fast == number, num_warps=settings["num_warps"],
        )  # fmt: skip

    return (block, bucket(last), "rows" if innermost else "columns", str(dtype)), by_settings(make)


register_transforms("triton", _launch)


def _specimen(dtype: str, out: str, block: int, expand: bool, mapped: bool, innermost: bool) -> Specimen:
    return specimen(
        transform_kernel, {"x": f"*{dtype}", "out": f"*{out}", "position": "*i32", "signs": "*i8"},
        **{"stride" if innermost else "step": 1}, GAIN=block**-0.5, N=block, BITS=block.bit_length() - 1,
        R=32 if innermost else 8, B=max(256 // block, 1),
        EXPAND=expand, MAPPED=mapped, SIGNED=mapped, INNERMOST=innermost, EVEN=not innermost,
    )  # fmt: skip


SPECIMENS = [
    _specimen("bf16", "fp32", 16, False, False, False),
    _specimen("bf16", "fp32", 16, False, True, True),
    _specimen("fp32", "fp32", 16, True, True, False),
    _specimen("fp16", "fp32", 1, True, False, True),
    _specimen("fp64", "fp64", 256, False, True, False),
]
