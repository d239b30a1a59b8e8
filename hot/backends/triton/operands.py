"""Operands by tensor cores: the kernels of transform_quantize and grad_output_operands, which `fused` launches.

They look at a matrix with one dense axis. Its other axis is `samples` times `length`, cut into blocks that straddle no two
samples. An operand is made of it in one of two ways, or, of a gradient, in both from one read:

    along    K is the dense axis: codes lie as the matrix does     (grad_input's gradient)
    across   K is the blocked axis: codes lie transposed           (grad_weight's gradient and input, grad_input's weight)

A transform is a product with a small matrix of ±1, which is exact in bfloat16 and float16 with float32 sums. One scale a row
or tensor needs the largest magnitude first: `largest_kernel` reads for it, `scales_kernel` makes scales of it, and
`quantize_kernel` reads again and writes codes. What they tell each other lies in `work`, float32, which nobody has to clear:

    factors, along's then across's   what coefficients are multiplied by, one a row or one in all
    parts of along, of across        largest magnitudes: of what a program saw of each row, or of all that it saw
    parts of the sums                of what a program saw of each column
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
def _place(first, per, length, samples, j, N: tl.constexpr, MEETS: tl.constexpr):
    """(sample, first element in it, elements left of it) of block `first` + j, where a sample has `per` blocks of N.

    MEETS: how many samples a tile meets: 1, there is no other; 2 at most; 3, any number.
    """
    if MEETS == 1:
        start = (first + j) * N
        return j * 0, start, length - start
    else:
        sample = first // per
        block = first - sample * per + j
        if MEETS == 3:
            sample = sample + block // per
            start = (block % per) * N
        else:
            over = (block >= per).to(tl.int32)
            sample = sample + over
            start = (block - over * per) * N
        return sample, start, tl.where(sample < samples, length - start, 0)


@triton.jit
def _load(
    x, piece, first, column, samples, length, per, columns, stride, step, piece_stride,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, MEETS: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """A tile (M blocks, N, C columns) of the matrix from block `first` and `column` on; zeros outside.

    COPIED: x is a descriptor of tiles (sample or piece, rows, columns), and no tile reaches over two samples.
    """
    if COPIED:
        sample = 0 if MEETS == 1 else first // per
        return tl.reshape(x.load([sample + piece, (first - sample * per) * N, column]), (M, N, C))
    else:
        i = tl.arange(0, N)
        c = tl.arange(0, C)
        sample, start, left = _place(first, per, length, samples, tl.arange(0, M), N, MEETS)
        block = (
            x + piece.to(tl.int64) * piece_stride + column + (sample.to(tl.int64) * stride + start.to(tl.int64) * step)
        )
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
def _largest(y):
    """The bits of the largest magnitude of every row of coefficients (m, rows, R)."""
    upper, lower = _extremes(y)
    return _magnitude(upper, lower)


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
def _scales(
    scales, factors, tops, first, rows, parts,
    GAIN: tl.constexpr, LIMIT: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scales and factors of ROWS rows from the `first` on, from `parts` largest magnitudes of each, (parts, rows)."""
    row = first + tl.arange(0, ROWS)
    top = tl.zeros((P, ROWS), tl.int32)
    for at in range(0, parts, P):
        part = at + tl.arange(0, P)
        inside = (part < parts)[:, None] & (row < rows)[None, :]
        top = tl.maximum(
            top, float_bits(tl.load(tops + part.to(tl.int64)[:, None] * rows + row[None, :], mask=inside, other=0.0))
        )
    # rounding keeps order: what multiplies every coefficient multiplies the largest
    top = float_bits(tl.max(top, 0).to(tl.float32, bitcast=True) * GAIN)
    scale, factor = scale_of(top, LIMIT)
    tl.store(scales + row, scale, mask=row < rows)
    tl.store(factors + row, factor, mask=row < rows)


@triton.jit
def _sums(sums, work, first, columns, parts, P: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of COLUMNS columns from the `first` on, from `parts` sums of each, (parts, columns)."""
    c = first + tl.arange(0, COLUMNS)
    total = tl.zeros((P, COLUMNS), tl.float32)
    for at in range(0, parts, P):
        part = at + tl.arange(0, P)
        inside = (part < parts)[:, None] & (c < columns)[None, :]
        total += tl.load(work + part.to(tl.int64)[:, None] * columns + c[None, :], mask=inside, other=0.0)
    tl.store(sums + c, tl.sum(total, 0).to(sums.dtype.element_ty), mask=c < columns)


@triton.jit
def scales_kernel(
    work, along_scale, across_scale, sums,
    along_rows, along_parts, along_at, across_rows, across_parts, across_at, across_factors, columns, sums_parts, sums_at,
    ALONG_GAIN: tl.constexpr, ALONG_LIMIT: tl.constexpr, ALONG_P: tl.constexpr, ALONG_ROWS: tl.constexpr,
    ACROSS_GAIN: tl.constexpr, ACROSS_LIMIT: tl.constexpr, ACROSS_P: tl.constexpr, ACROSS_ROWS: tl.constexpr,
    P: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scales, and what coefficients are multiplied by, once a row rather than once a row and tile; the sums of columns.

    Programs are for rows of along, then of across, then for columns. …_rows: 0 for an operand without.
    """
    program = tl.program_id(0)
    along_programs = tl.cdiv(along_rows, ALONG_ROWS)
    across_programs = tl.cdiv(across_rows, ACROSS_ROWS)
    if program < along_programs:
        _scales(
            along_scale, work, work + along_at, program * ALONG_ROWS, along_rows, along_parts,
            ALONG_GAIN, ALONG_LIMIT, ALONG_P, ALONG_ROWS,
        )  # fmt: skip
    elif program < along_programs + across_programs:
        _scales(
            across_scale, work + across_factors, work + across_at, (program - along_programs) * ACROSS_ROWS, across_rows,
            across_parts, ACROSS_GAIN, ACROSS_LIMIT, ACROSS_P, ACROSS_ROWS,
        )  # fmt: skip
    else:
        program -= along_programs + across_programs
        _sums(sums, work + sums_at, program * COLUMNS, columns, sums_parts, P, COLUMNS)


@triton.jit
def largest_kernel(
    x, along_matrix, across_matrix, work,
    samples, length, per, columns, stride, step, piece_stride, row_tiles, along_at, across_at, sums_at,
    ALONG: tl.constexpr, ACROSS: tl.constexpr, SUMS: tl.constexpr,
    A: tl.constexpr, AR: tl.constexpr, R: tl.constexpr, ALONG_RANK: tl.constexpr, ACROSS_RANK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, MEETS: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of coefficients without their gain, and the sums of columns, of TILES tiles of rows.

    ALONG, ACROSS: ``row`` or ``tensor`` where that operand is scaled by them, else empty.
    """
    column, group, piece = _program(columns, row_tiles, C)
    c = column + tl.arange(0, C)
    along = _basis(along_matrix, ALONG_RANK, A, AR)
    across = _basis(across_matrix, ACROSS_RANK, N, R)
    upper, lower = tl.zeros((C, R), tl.int32), tl.zeros((C, R), tl.uint32)
    total = tl.zeros((M * C, 8), tl.float32)
    every = tl.zeros((M * N,), tl.int32)
    along_tops = work + along_at + (piece * tl.cdiv(columns, C) + column // C).to(tl.int64) * (samples * length)
    for tile in range(TILES):
        first = (group * TILES + tile) * M
        t = _load(
            x, piece, first, column, samples, length, per, columns, stride, step, piece_stride, M, N, C, MEETS, COPIED
        )  # fmt: skip
        if ACROSS != "":
            more, less = _extremes(_across(t, across))
            upper, lower = tl.maximum(upper, more), tl.maximum(lower, less)
        if ALONG != "":
            top = _largest(_along(t, along))
            if ALONG == "tensor":
                every = tl.maximum(every, top)
            else:
                r = tl.arange(0, M * N)
                sample, start, left = _place(first, per, length, samples, r // N, N, MEETS)
                top = top.to(tl.float32, bitcast=True)
                tl.store(along_tops + sample * length + start + r % N, top, mask=r % N < left)
        if SUMS:  # a column of ones sums what `across` multiplies as it lies
            total = tl.dot(_columns(t), tl.full((N, 8), 1.0, t.dtype), total, input_precision="ieee")
    if ALONG == "tensor":
        tl.store(work + along_at + tl.program_id(0), tl.max(every, 0).to(tl.float32, bitcast=True))
    if ACROSS != "":
        top = _magnitude(upper, lower)
        if ACROSS == "tensor":
            tl.store(work + across_at + tl.program_id(0), tl.max(top, 0).to(tl.float32, bitcast=True))
        else:
            place = work + across_at + group.to(tl.int64) * columns + c
            tl.store(place, top.to(tl.float32, bitcast=True), mask=c < columns)
    if SUMS:
        total = tl.sum(tl.reshape(total, (M, C, 8)), 0)
        tl.store(work + sums_at + group.to(tl.int64) * columns + c, tl.max(total, 1), mask=c < columns)


@triton.jit
def _write_along(
    x, basis, factors, out, scales, first, column, piece, samples, length, per, k, in_piece,
    GRANULARITY: tl.constexpr, GAIN: tl.constexpr, LIMIT: tl.constexpr, ROUNDING: tl.constexpr, RANK: tl.constexpr,
    MEETS: tl.constexpr,
):  # fmt: skip
    """Codes of a tile's rows. k: K; in_piece: the part of K that one piece of the columns makes."""
    N: tl.constexpr = x.shape[1]
    A: tl.constexpr = basis.shape[0]
    R: tl.constexpr = basis.shape[1]
    BLOCKS: tl.constexpr = x.shape[2] // A
    r = tl.arange(0, x.shape[0] * N)
    sample, start, left = _place(first, per, length, samples, r // N, N, MEETS)
    row = (sample * length + start + r % N).to(tl.int64)
    inside = r % N < left
    y = _along(x, basis) * GAIN
    at = column // A * RANK  # of this tile, in its piece
    if GRANULARITY == "block":
        scale, factor = scale_of(_largest(y), LIMIT)
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
    FLAT: tl.constexpr, MEETS: tl.constexpr,
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
        top = tl.max(_largest(y), 0)  # of whole tiles, columns beyond the last being zeros
        scale, factor = scale_of(top + tl.zeros((C,), tl.int32), LIMIT)
        tl.store(
            scales + column // C * tl.cdiv(k, M * R) + first // M + tl.arange(0, C), scale, mask=tl.arange(0, C) < 1
        )
    elif GRANULARITY == "block":
        scale, factor = scale_of(_largest(y), LIMIT)
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
        sample, start, left = _place(first, per, length, samples, tl.arange(0, M), N, MEETS)
        starts = sample * in_sample + start // N * RANK
        sample, start, left = _place(first, per, length, samples, j // R, N, MEETS)
        within = start // N * RANK + j % R
        at = sample * in_sample + within
        held = (left > 0) & (within < in_sample) & (j % R < RANK)
    pairs = (starts // 2)[:, None] + tl.arange(0, R // 2)[None, :]
    codes = _codes(y, factor, pairs, row, ROUNDING, out.dtype.element_ty)
    codes = tl.reshape(tl.permute(codes, (1, 0, 2)), (C, M * R)).to(out.dtype.element_ty)
    tl.store(out + (row * k)[:, None] + at[None, :], codes, mask=inside[:, None] & held[None, :])


@triton.jit
def quantize_kernel(
    x, along_matrix, across_matrix, work, along_codes, along_scale, across_codes, across_scale,
    samples, length, per, columns, stride, step, piece_stride, row_tiles,
    along_k, along_piece, across_k, across_sample, across_factors,
    ALONG: tl.constexpr, ACROSS: tl.constexpr, ALONG_GAIN: tl.constexpr, ACROSS_GAIN: tl.constexpr,
    ALONG_LIMIT: tl.constexpr, ACROSS_LIMIT: tl.constexpr, ALONG_ROUNDING: tl.constexpr, ACROSS_ROUNDING: tl.constexpr,
    A: tl.constexpr, AR: tl.constexpr, R: tl.constexpr, ALONG_RANK: tl.constexpr, ACROSS_RANK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, FLAT: tl.constexpr, MEETS: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Codes of one tile, M blocks of N rows × C columns.

    ALONG, ACROSS: granularity of that operand, empty for none; ``block`` has one group a row of a tile and
    ``tile`` one a tile, whose scales are made here.
    """
    column, tile, piece = _program(columns, row_tiles, C)
    first = tile * M
    t = _load(
        x, piece, first, column, samples, length, per, columns, stride, step, piece_stride, M, N, C, MEETS, COPIED
    )
    if ALONG != "":
        basis = _basis(along_matrix, ALONG_RANK, A, AR)
        _write_along(
            t, basis, work, along_codes, along_scale, first, column, piece, samples, length, per, along_k, along_piece,
            ALONG, ALONG_GAIN, ALONG_LIMIT, ALONG_ROUNDING, ALONG_RANK, MEETS,
        )  # fmt: skip
    if ACROSS != "":
        basis = _basis(across_matrix, ACROSS_RANK, N, R)
        _write_across(
            t, basis, work + across_factors, across_codes, across_scale, first, column, samples, length, per, columns,
            across_k, across_sample, ACROSS, ACROSS_GAIN, ACROSS_LIMIT, ACROSS_ROUNDING, ACROSS_RANK, FLAT, MEETS,
        )  # fmt: skip
