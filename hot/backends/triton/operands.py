"""Operands by tensor cores: the kernels of transform_quantize and grad_output_operands, which `fused` launches.

They look at a matrix with one dense axis. Its other axis is `samples` times `length`, cut into blocks that straddle no two
samples. An operand is made of it in one of two ways, or, of a gradient, in both from one read:

    along    K is the dense axis: codes lie as the matrix does     (grad_input's gradient)
    across   K is the blocked axis: codes lie transposed           (grad_weight's gradient and input, grad_input's weight)

A transform is a product with a small matrix of ±1, which is exact in bfloat16 and float16 with float32 sums. One scale a row
or tensor needs the largest magnitude first: `largest_kernel` reads for it, `scales_kernel` makes scales of it, and
`quantize_kernel` reads again and writes codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hot.backends.triton.rounding import column_hash, float_bits, mantissa_noise, pair_noise, row_hash, scale_of

MAGIC = tl.constexpr(1.5 * 2.0**23)  # added to a small float it rounds it, and leaves the whole number in the low bits
MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _program(columns, row_tiles, C: tl.constexpr):
    """(first column, tile of rows, piece) of this program; neighbours along the columns run together."""
    program = tl.program_id(0)
    column_tiles = tl.cdiv(columns, C)
    rest = program // column_tiles
    return program % column_tiles * C, rest % row_tiles, rest // row_tiles


@triton.jit
def _place(first, per, length, samples, j, N: tl.constexpr, WRAPS: tl.constexpr):
    """(sample, first element in it, elements left of it) of block `first` + j, where a sample has `per` blocks of N."""
    sample = first // per
    block = first - sample * per + j
    if WRAPS:  # a tile may reach over several samples
        sample = sample + block // per
        start = (block % per) * N
    else:
        over = (block >= per).to(tl.int32)
        sample = sample + over
        start = (block - over * per) * N
    return sample, start, tl.where(sample < samples, length - start, 0)


@triton.jit
def _load(
    x, first, column, samples, length, per, columns, stride, step,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """A tile (M blocks, N, C columns) of the matrix from block `first` and `column` on; zeros outside."""
    i = tl.arange(0, N)
    c = tl.arange(0, C)
    sample, start, left = _place(first, per, length, samples, tl.arange(0, M), N, WRAPS)
    block = x + column + (sample.to(tl.int64) * stride + start.to(tl.int64) * step)
    inside = (i[None, :, None] < left[:, None, None]) & (c < columns - column)[None, None, :]
    return tl.load(block[:, None, None] + (i * step)[None, :, None] + c[None, None, :], mask=inside, other=0.0)


@triton.jit
def _basis(matrix, RANK: tl.constexpr, N: tl.constexpr, R: tl.constexpr):
    """The transposed basis (N, R) of a matrix (RANK, N), zeros beyond its rank."""
    r = tl.arange(0, R)
    return tl.load(matrix + r[None, :] * N + tl.arange(0, N)[:, None], mask=(r < RANK)[None, :], other=0.0)


@triton.jit
def _along(x, basis):
    """Coefficients (C / N, rows, R), without their gain, of the blocks of N columns of a tile (…, C).

    Rows of the product run along the matrix's rows: a thread then holds many columns of few rows, and a row's scale is worked
    out by few threads.
    """
    C: tl.constexpr = x.shape[2]
    ROWS: tl.constexpr = x.shape[0] * x.shape[1]
    N: tl.constexpr = basis.shape[0]
    blocks = tl.reshape(tl.permute(tl.reshape(x, (ROWS, C // N, N)), (1, 0, 2)), (C // N * ROWS, N))
    y = tl.dot(blocks, basis, input_precision="ieee")
    return tl.reshape(y, (C // N, ROWS, basis.shape[1]))


@triton.jit
def _columns(x):
    """The blocks of N rows of a tile (M, N, C), as rows (M · C, N)."""
    return tl.reshape(tl.permute(x, (0, 2, 1)), (x.shape[0] * x.shape[2], x.shape[1]))


@triton.jit
def _across(x, basis):
    """Coefficients (M, C, R), without their gain, of the blocks of N rows of a tile (M, N, C)."""
    y = tl.dot(_columns(x), basis, input_precision="ieee")
    return tl.reshape(y, (x.shape[0], x.shape[2], basis.shape[1]))


@triton.jit
def _extremes(y):
    """The bits of floats (m, rows, R), reduced to (rows, R) for `_magnitude`: the largest as int32, and as uint32."""
    bits = float_bits(y)
    return tl.max(bits, 0), tl.max(bits.to(tl.uint32, bitcast=True), 0)


@triton.jit
def _magnitude(upper, lower):
    """The bits of the largest magnitude of every row of `_extremes`: as integers they order like floats, NaN on top."""
    # as int32 the largest bits are those of the largest float, if any is not negative; as uint32 those of the least, if any is
    # negative: two integer maxima, of three operands each on Hopper, cost less than |x| and a float maximum that keeps NaN
    lower = (tl.max(lower, 1) & 0x7FFFFFFF).to(tl.int32, bitcast=True)
    return tl.maximum(tl.max(upper, 1) & 0x7FFFFFFF, lower)


@triton.jit
def _largest(y, GAIN: tl.constexpr):
    """The bits of the largest magnitude of every row of coefficients (m, rows, R), once these are multiplied by GAIN."""
    upper, lower = _extremes(y)
    return _gained(_magnitude(upper, lower), GAIN)


@triton.jit
def _gained(top, GAIN: tl.constexpr):
    """The bits of a magnitude times GAIN: rounding keeps order, so that of the products it is the largest."""
    return float_bits(top.to(tl.float32, bitcast=True) * GAIN)


@triton.jit
def _codes(y, factor, pairs, rows, ROUNDING: tl.constexpr, HOLDER: tl.constexpr):
    """Codes of y (m, rows, R): whole numbers in float32 for a float8 HOLDER, else int32. factor (rows,): as of `scale_of`.

    For the noise, pairs (m, R / 2): ⌊k / 2⌋ of each two neighbours along K; rows (rows,): indices.
    """
    # v = y · (1 / scale). MAGIC rounds v·2¹⁵; the noise is added to the bits, and what stands above bit 15 is the code.
    # |v| ≤ LIMIT (1 + 2⁻²³), which rounds to LIMIT·2¹⁵, so nothing is clamped.
    finite = factor > 0
    if ROUNDING == "nearest":
        t = tl.where(finite[None, :, None], (y * factor[None, :, None] + MAGIC) - MAGIC, 0.0)
        codes = t if tl.float8e4nv == HOLDER else t.to(tl.int32)
    else:
        t = tl.fma(y * factor[None, :, None], 32768.0, MAGIC).to(tl.int32, bitcast=True)
        if ROUNDING == "hashed":
            half: tl.constexpr = y.shape[2] // 2
            first, second = tl.split(tl.reshape(float_bits(y), (y.shape[0], y.shape[1], half, 2)))
            one, two = pair_noise(first, second, row_hash(rows)[None, :, None] * column_hash(pairs)[:, None, :])
            t += tl.reshape(tl.join(one, two), y.shape)
        else:
            t += mantissa_noise(float_bits(y))
        if tl.float8e4nv == HOLDER:  # without what is below bit 15 it is the float MAGIC + code·2¹⁵
            kept = tl.where(finite, -32768, 0)[None, :, None]
            offset = tl.where(finite, -MAGIC / 32768, 0.0)[None, :, None]
            codes = tl.fma((t & kept).to(tl.float32, bitcast=True), 2.0**-15, offset)
        else:
            codes = ((t - MAGIC_BITS) >> 15) & tl.where(finite, -1, 0)[None, :, None]
    return codes


@triton.jit
def scales_kernel(
    tops, factors, along_scale, across_scale, along_count, count,
    ALONG_LIMIT: tl.constexpr, ACROSS_LIMIT: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Scales, and what elements are multiplied by, from the tops of both operands: once a row, not once a row and tile."""
    i = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    top = tl.load(tops + i, mask=i < count, other=0)
    is_along = i < along_count
    along, along_factor = scale_of(top, ALONG_LIMIT)
    across, across_factor = scale_of(top, ACROSS_LIMIT)
    tl.store(along_scale + i, along, mask=is_along)
    tl.store(across_scale + i - along_count, across, mask=(i < count) & (i >= along_count))
    tl.store(factors + i, tl.where(is_along, along_factor, across_factor), mask=i < count)


@triton.jit
def largest_kernel(
    x, along_matrix, across_matrix, along_top, across_top, sums,
    samples, length, per, columns, stride, step, piece_stride, row_tiles,
    ALONG: tl.constexpr, ACROSS: tl.constexpr, SUMS: tl.constexpr, ALONG_GAIN: tl.constexpr, ACROSS_GAIN: tl.constexpr,
    A: tl.constexpr, AR: tl.constexpr, R: tl.constexpr, ALONG_RANK: tl.constexpr, ACROSS_RANK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of coefficients, as bits, into zeroed tops; the sums over TILES tiles of rows of each column.

    ALONG, ACROSS: ``row`` or ``tensor`` where that operand needs a top, else empty.
    """
    column, group, piece = _program(columns, row_tiles, C)
    c = column + tl.arange(0, C)
    x += piece.to(tl.int64) * piece_stride
    along = _basis(along_matrix, ALONG_RANK, A, AR)
    across = _basis(across_matrix, ACROSS_RANK, N, R)
    upper, lower = tl.zeros((C, R), tl.int32), tl.zeros((C, R), tl.uint32)
    total = tl.zeros((M * C, 8), tl.float32)
    for tile in range(TILES):
        first = (group * TILES + tile) * M
        t = _load(x, first, column, samples, length, per, columns, stride, step, M, N, C, WRAPS)
        if ACROSS != "":
            more, less = _extremes(_across(t, across))
            upper, lower = tl.maximum(upper, more), tl.maximum(lower, less)
        if ALONG != "":
            top = _largest(_along(t, along), ALONG_GAIN)
            if ALONG == "tensor":
                tl.atomic_max(along_top, tl.max(top, 0), sem="relaxed")
            else:
                r = tl.arange(0, M * N)
                sample, start, left = _place(first, per, length, samples, r // N, N, WRAPS)
                tl.atomic_max(along_top + sample * length + start + r % N, top, mask=r % N < left, sem="relaxed")
        if SUMS:  # a column of ones sums what `across` multiplies as it lies
            total = tl.dot(_columns(t), tl.full((N, 8), 1.0, t.dtype), total, input_precision="ieee")
    if ACROSS != "":
        top = _gained(_magnitude(upper, lower), ACROSS_GAIN)
        if ACROSS == "tensor":
            tl.atomic_max(across_top, tl.max(top, 0), sem="relaxed")
        else:
            tl.atomic_max(across_top + c, top, mask=c < columns, sem="relaxed")
    if SUMS:
        total = tl.sum(tl.reshape(total, (M, C, 8)), 0)
        tl.store(sums + group.to(tl.int64) * columns + c, tl.max(total, 1), mask=c < columns)


@triton.jit
def _write_along(
    x, basis, factors, out, scales, first, column, piece, samples, length, per, k, in_piece,
    GRANULARITY: tl.constexpr, GAIN: tl.constexpr, LIMIT: tl.constexpr, ROUNDING: tl.constexpr, RANK: tl.constexpr,
    WRAPS: tl.constexpr,
):  # fmt: skip
    """Codes of a tile's rows. k: K; in_piece: the part of K that one piece of the columns makes."""
    N: tl.constexpr = x.shape[1]
    A: tl.constexpr = basis.shape[0]
    R: tl.constexpr = basis.shape[1]
    BLOCKS: tl.constexpr = x.shape[2] // A
    r = tl.arange(0, x.shape[0] * N)
    sample, start, left = _place(first, per, length, samples, r // N, N, WRAPS)
    row = (sample * length + start + r % N).to(tl.int64)
    inside = r % N < left
    y = _along(x, basis) * GAIN
    at = column // A * RANK  # of this tile, in its piece
    if GRANULARITY == "block":
        scale, factor = scale_of(_largest(y, 1.0), LIMIT)
        group = (piece * in_piece + at) // (BLOCKS * R)
        tl.store(scales + row * tl.cdiv(k, BLOCKS * R) + group, scale, mask=inside)
    elif GRANULARITY == "row":
        factor = tl.load(factors + row, mask=inside, other=1.0)
    else:
        factor = tl.load(factors + tl.zeros_like(row))
    pairs = ((piece * in_piece + at) // 2 + tl.arange(0, BLOCKS) * (RANK // 2))[:, None] + tl.arange(0, R // 2)[None, :]
    codes = _codes(y, factor, pairs, row, ROUNDING, out.dtype.element_ty)
    codes = tl.reshape(tl.permute(codes, (1, 0, 2)), (x.shape[0] * N, BLOCKS * R)).to(out.dtype.element_ty)
    j = tl.arange(0, BLOCKS * R)
    at += j if RANK == R else j // R * RANK + j % R
    held = (at < in_piece) & (j % R < RANK)
    place = out + (row * k + piece * in_piece)[:, None] + at[None, :]
    tl.store(place, codes, mask=inside[:, None] & held[None, :])


@triton.jit
def _write_across(
    x, basis, factors, out, scales, first, column, samples, length, per, columns, k, in_sample,
    GRANULARITY: tl.constexpr, GAIN: tl.constexpr, LIMIT: tl.constexpr, ROUNDING: tl.constexpr, RANK: tl.constexpr,
    FLAT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Codes of a tile's columns. k: K; in_sample: the part of K that one sample makes; FLAT: every block makes RANK of it, so
    that samples need no attention."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    R: tl.constexpr = basis.shape[1]
    row = column + tl.arange(0, C)
    inside = row < columns
    row = row.to(tl.int64)
    y = _across(x, basis) * GAIN
    if GRANULARITY == "tile":
        top = tl.max(_largest(y, 1.0), 0)  # of whole tiles, columns beyond the last being zeros
        scale, factor = scale_of(top + tl.zeros((C,), tl.int32), LIMIT)
        tl.store(
            scales + column // C * tl.cdiv(k, M * R) + first // M + tl.arange(0, C), scale, mask=tl.arange(0, C) < 1
        )
    elif GRANULARITY == "block":
        scale, factor = scale_of(_largest(y, 1.0), LIMIT)
        tl.store(scales + row * tl.cdiv(k, M * R) + first // M, scale, mask=inside)
    elif GRANULARITY == "row":
        factor = tl.load(factors + row, mask=inside, other=1.0)
    else:
        factor = tl.load(factors + tl.zeros_like(row))
    j = tl.arange(0, M * R)
    if FLAT:
        starts = (first + tl.arange(0, M)) * RANK
        at = first * RANK + (j if RANK == R else j // R * RANK + j % R)
        held = (at < k) & (j % R < RANK)
    else:
        sample, start, left = _place(first, per, length, samples, tl.arange(0, M), N, WRAPS)
        starts = sample * in_sample + start // N * RANK
        sample, start, left = _place(first, per, length, samples, j // R, N, WRAPS)
        within = start // N * RANK + j % R
        at = sample * in_sample + within
        held = (left > 0) & (within < in_sample) & (j % R < RANK)
    pairs = (starts // 2)[:, None] + tl.arange(0, R // 2)[None, :]
    codes = _codes(y, factor, pairs, row, ROUNDING, out.dtype.element_ty)
    codes = tl.reshape(tl.permute(codes, (1, 0, 2)), (C, M * R)).to(out.dtype.element_ty)
    tl.store(out + (row * k)[:, None] + at[None, :], codes, mask=inside[:, None] & held[None, :])


@triton.jit
def quantize_kernel(
    x, along_matrix, across_matrix, along_factor, across_factor, along_codes, along_scale, across_codes, across_scale,
    samples, length, per, columns, stride, step, piece_stride, row_tiles,
    along_k, along_piece, across_k, across_sample,
    ALONG: tl.constexpr, ACROSS: tl.constexpr, ALONG_GAIN: tl.constexpr, ACROSS_GAIN: tl.constexpr,
    ALONG_LIMIT: tl.constexpr, ACROSS_LIMIT: tl.constexpr, ALONG_ROUNDING: tl.constexpr, ACROSS_ROUNDING: tl.constexpr,
    A: tl.constexpr, AR: tl.constexpr, R: tl.constexpr, ALONG_RANK: tl.constexpr, ACROSS_RANK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, FLAT: tl.constexpr, WRAPS: tl.constexpr,
):  # fmt: skip
    """Codes of one tile, M blocks of N rows × C columns.

    ALONG, ACROSS: granularity of that operand, empty for none; ``block`` has one group a row of a tile and
    ``tile`` one a tile, whose scales are made here.
    """
    column, tile, piece = _program(columns, row_tiles, C)
    first = tile * M
    x += piece.to(tl.int64) * piece_stride
    t = _load(x, first, column, samples, length, per, columns, stride, step, M, N, C, WRAPS)
    if ALONG != "":
        basis = _basis(along_matrix, ALONG_RANK, A, AR)
        _write_along(
            t, basis, along_factor, along_codes, along_scale, first, column, piece, samples, length, per, along_k, along_piece,
            ALONG, ALONG_GAIN, ALONG_LIMIT, ALONG_ROUNDING, ALONG_RANK, WRAPS,
        )  # fmt: skip
    if ACROSS != "":
        basis = _basis(across_matrix, ACROSS_RANK, N, R)
        _write_across(
            t, basis, across_factor, across_codes, across_scale, first, column, samples, length, per, columns,
            across_k, across_sample, ACROSS, ACROSS_GAIN, ACROSS_LIMIT, ACROSS_ROUNDING, ACROSS_RANK, FLAT, WRAPS,
        )  # fmt: skip
