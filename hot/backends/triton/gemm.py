"""Products of codes on tensor cores: the kernels of matmul, which `products` launches."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile_of(program, m_tiles, n_tiles, GROUP: tl.constexpr):
    """(row of tiles, column of tiles): GROUP rows of tiles run together, so that what they read stays in the L2 cache."""
    group = program // (GROUP * n_tiles)
    height = min(m_tiles - group * GROUP, GROUP)
    inside = program % (GROUP * n_tiles)
    return group * GROUP + inside % height, inside // height


@triton.jit
def integer_kernel(
    a, b, out, a_scale, b_scale, m, n, units, a_step, b_step,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """out = (a bᵀ) · a_scale · b_scaleᵀ for a (m, k), b (n, k) int8, whatever their sizes. …_step: 0 for one scale in all.

    k is `units` times UNIT, a power of two: so many codes are loaded at a time. Triton itself looks for multiples of 16 alone.
    """
    k = units * UNIT
    tile_m, tile_n = _tile_of(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    a += (rows % m).to(tl.int64)[:, None] * k + i[None, :]  # rows beyond the last read others again
    b += (columns % n).to(tl.int64)[None, :] * k + i[:, None]
    total = tl.zeros((BM, BN), tl.int32)
    for at in range(0, k, BK):
        if EVEN_K:
            left, right = tl.load(a), tl.load(b)
        else:
            inside = i < k - at
            left = tl.load(a, mask=inside[None, :], other=0)
            right = tl.load(b, mask=inside[:, None], other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        a += BK
        b += BK
    product = total.to(tl.float32) * tl.load(a_scale + rows * a_step, mask=rows < m)[:, None]
    product *= tl.load(b_scale + columns * b_step, mask=columns < n)[None, :]
    out += rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(out, product.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def copied_kernel(
    a, b, out, a_scale, b_scale, m, n, k, a_step, b_step,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`integer_kernel` for chips with a copy engine: a, b, out are descriptors of tiles."""
    tile_m, tile_n = _tile_of(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    total = tl.zeros((BM, BN), tl.int32)
    for step in range(tl.cdiv(k, BK)):
        left = a.load([tile_m * BM, step * BK])
        right = b.load([tile_n * BN, step * BK])
        total = tl.dot(left, right.T, total, out_dtype=tl.int32)
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    scale = tl.load(a_scale + rows * a_step, mask=rows < m, other=0.0)[:, None]
    product = total.to(tl.float32) * scale * tl.load(b_scale + columns * b_step, mask=columns < n, other=0.0)[None, :]
    out.store([tile_m * BM, tile_n * BN], product.to(out.dtype))


@triton.jit
def streamed_kernel(
    a, b, sums, m, n, k, programs,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """sums += a bᵀ, int32, for few tiles and a long K: every program takes an equal run of all steps of all tiles, one after
    the other, so that none waits for another (Stream-K, M. Osama et al. 2023). Whole numbers add up the same in any order."""
    steps = tl.cdiv(k, BK)
    m_tiles = tl.cdiv(m, BM)
    n_tiles = tl.cdiv(n, BN)
    every = (m_tiles * n_tiles * steps).to(tl.int64)
    at = (tl.program_id(0) * every // programs).to(tl.int32)
    end = ((tl.program_id(0) + 1) * every // programs).to(tl.int32)
    while at < end:
        tile = at // steps
        first = at - tile * steps
        last = min(steps, first + end - at)
        tile_m, tile_n = _tile_of(tile, m_tiles, n_tiles, GROUP)
        total = tl.zeros((BM, BN), tl.int32)
        for step in range(first, last):
            left = a.load([tile_m * BM, step * BK])
            right = b.load([tile_n * BN, step * BK])
            total = tl.dot(left, right.T, total, out_dtype=tl.int32)
        rows = tile_m * BM + tl.arange(0, BM)
        columns = tile_n * BN + tl.arange(0, BN)
        place = sums + rows.to(tl.int64)[:, None] * n + columns[None, :]
        tl.atomic_add(place, total, mask=(rows < m)[:, None] & (columns < n)[None, :], sem="relaxed")
        at += last - first


@triton.jit
def rescale_kernel(total, out, a_scale, b_scale, n, count, a_step, b_step, ELEMENTS: tl.constexpr):
    """out = total · a_scale · b_scaleᵀ for int32 sums (m, n)."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < count
    value = tl.load(total + at, mask=inside).to(tl.float32)
    value *= tl.load(a_scale + at // n * a_step, mask=inside)
    value *= tl.load(b_scale + at % n * b_step, mask=inside)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def block_kernel(
    a, b, out, a_scale, b_scale, m, n, k, a_rows, a_step, a_block, a_group, b_rows, b_step, b_block, b_group,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """out = Σ over K-blocks of (a bᵀ) · a_scale · b_scaleᵀ. BK divides both groups.

    A scale is at ⌊row / _rows⌋ · _step + ⌊k / _group⌋ · _block. HALF: in float16, which holds every code of 8 bits; else in
    int8. BLOCKS: some scale changes along K; else sums of whole numbers stay exact, and scales come last.
    """
    m_tiles = tl.cdiv(m, BM)
    n_tiles = tl.cdiv(n, BN)
    tile_m, tile_n = _tile_of(tl.program_id(0), m_tiles, n_tiles, GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    a += rows.to(tl.int64)[:, None] * k + i[None, :]
    b += columns.to(tl.int64)[None, :] * k + i[:, None]
    a_scale += (rows // a_rows).to(tl.int64) * a_step
    b_scale += (columns // b_rows).to(tl.int64) * b_step
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k, BK):
        inside = i < k - at
        left = tl.load(a, mask=inside[None, :] & (rows < m)[:, None], other=0.0)
        right = tl.load(b, mask=inside[:, None] & (columns < n)[None, :], other=0.0)
        if HALF:
            product = tl.dot(left.to(tl.float16), right.to(tl.float16))
        else:
            product = tl.dot(left, right, out_dtype=tl.int32).to(tl.float32)
        if BLOCKS:
            scale = tl.load(a_scale + at // a_group * a_block, mask=rows < m)[:, None]
            product *= scale * tl.load(b_scale + at // b_group * b_block, mask=columns < n)[None, :]
        total += product
        a += BK
        b += BK
    if not BLOCKS:
        total *= tl.load(a_scale, mask=rows < m)[:, None]
        total *= tl.load(b_scale, mask=columns < n)[None, :]
    out += rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])
