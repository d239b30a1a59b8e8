"""matmul: the product of two quantized operands, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hot.backends.ops import INT32_TERMS, is_tiled
from hot.backends.reference.quantization import dequantize
from hot.backends.table import REFERENCE, register_kernel

FLOAT32_TERMS = 2**24 // 128**2
"""So many sum exactly in float32."""

SHORTEST_RUN = 64
"""Where scales change more often along K than this, and always on CUDA, dequantized floats are the faster product."""

STRIP = 2**20
"""So many elements of a product a CPU works on at once: they stay in its cache from pass to pass."""


def _int_mm_is_exact() -> bool:
    """Whether torch._int_mm is right on this CPU: without VNNI its sums of two products saturate at 16 bits."""
    codes = torch.full((32, 64), 127, dtype=torch.int8, device="cpu")
    return bool((torch._int_mm(codes, codes.T) == 64 * 127**2).all())


INT_MM_ON_CPU = _int_mm_is_exact()


def integer_product(a: Tensor, b: Tensor, out: Tensor, spare: Tensor | None = None) -> Tensor:
    """(M, K) int8 @ (N, K) int8ᵀ, exact, into out (M, N) float32 or float64, to which the exact sum is rounded.

    spare: (M, N) int32, contiguous: memory that is then used instead of new memory.

    Equals: out.copy_(a.double() @ b.double().T)
    """
    # a longer contraction than fits is summed in pieces
    product, terms = (int32_product, INT32_TERMS) if a.is_cuda or INT_MM_ON_CPU else (_float32_product, FLOAT32_TERMS)
    if a.shape[1] <= terms:
        return out.copy_(product(a, b, spare))
    pieces = map(product, a.split(terms, 1), b.split(terms, 1))
    total = next(pieces).double()
    for piece in pieces:
        total += piece
    return out.copy_(total)


def _float32_product(a: Tensor, b: Tensor, spare: Tensor | None = None) -> Tensor:
    return a.float() @ b.float().T


def int32_product(a: Tensor, b: Tensor, spare: Tensor | None = None) -> Tensor:
    """(M, K) int8 @ (N, K) int8ᵀ → (M, N) int32, exact for K up to INT32_TERMS; on CUDA a row may be longer in memory.

    spare: as of `integer_product`; on the CPU only.
    """
    # torch._int_mm has limits of its own: on CUDA M > 16 and K, N multiples of 8, so zeros are added and cut off again; on the
    # CPU it is wrong for K = 1, and where a stride is smaller than the row (pytorch/pytorch#195066)
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    if a.is_cuda:
        a = F.pad(a, (0, -k % 8, 0, max(17 - m, 0)))
        b = F.pad(b, (0, -k % 8, 0, -n % 8))
    elif k == 1:
        a, b = F.pad(a, (0, 1)), F.pad(b, (0, 1))
    a, b = (codes.reshape(-1).view(codes.shape) for codes in (a, b))  # contiguous() leaves the stride of a single row
    return torch._int_mm(a, b.T)[:m, :n] if spare is None else torch._int_mm(a, b.T, out=spare)


@register_kernel("matmul", backend=REFERENCE)
def matmul(
    a: Tensor, a_scale: Tensor, a_group: int, b: Tensor, b_scale: Tensor, b_group: int, dtype: torch.dtype
) -> Tensor:
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    run = _common(_run(a_scale, a_group), _run(b_scale, b_group))
    integers = a.dtype == b.dtype == torch.int8 and a.numel() and b.numel()
    if integers and (not run or (run >= SHORTEST_RUN and not a.is_cuda)):
        left, right = _runs(a, a_scale, a_group, run), _runs(b, b_scale, b_group, run)
        return _sum_of_runs(left, right, compute).to(dtype)
    if a.dtype == b.dtype and not run:
        return (a.to(compute) @ b.to(compute).T).mul_(a_scale).mul_(b_scale.T).to(dtype)
    return (dequantize(a, a_scale, a_group, compute) @ dequantize(b, b_scale, b_group, compute).T).to(dtype)


def _run(scale: Tensor, group: int) -> int:
    """Over how many elements of K a scale is constant; 0: over all of them."""
    return group or int(scale.shape[1] > 1)


def _common(run: int, other: int) -> int:
    """The greatest common divisor, where 0 is a multiple of all; torch.compile knows no math.gcd of dynamic numbers."""
    while other:
        run, other = other, run % other
    return run


Runs = list[tuple[Tensor, Tensor]]
"""An operand in runs of K along which its scale is constant: the codes of each, contiguous, and its scale (rows, 1)."""


def _runs(codes: Tensor, scale: Tensor, group: int, run: int) -> Runs:
    """An operand in runs of that length, which divides group; 0: in one."""
    rows = codes.shape[0]
    if is_tiled(codes, scale, group):
        scale = scale.repeat_interleave(group, 0)[:rows]
    parts = codes.split(run, 1) if run else (codes,)
    columns = [i * run // group if group else 0 for i in range(len(parts))]
    return [
        (part.contiguous(), scale[:, at, None].contiguous().expand(rows, 1))
        for part, at in zip(parts, columns, strict=True)
    ]


def _sum_of_runs(left: Runs, right: Runs, compute: torch.dtype) -> Tensor:
    """The sum over the runs of integer product · left scale · right scale: (M, N) in compute.

    Each run is three passes over a product. An eager CPU makes them for a strip of rows at a time, in memory that its cache
    holds: over the whole product, or in new memory for each run, they take longer than the integer products themselves.
    """
    codes, m, n = left[0][0], left[0][0].shape[0], right[0][0].shape[0]
    total = codes.new_empty((m, n), dtype=compute)
    rows, starts, sums = m, range(1), None
    if codes.device.type == "cpu" and not torch.compiler.is_compiling():
        rows = min(max(STRIP // n, 1), m)
        starts, sums = range(0, m, rows), codes.new_empty((rows, n), dtype=torch.int32)
    later = codes.new_empty((rows if len(left) > 1 else 0, n), dtype=compute)
    for at in starts:
        strip = slice(at, at + rows)
        own = total[strip]
        spare = None if sums is None else sums[: own.shape[0]]
        for number, ((x, x_scale), (y, y_scale)) in enumerate(zip(left, right, strict=True)):
            product = later[: own.shape[0]] if number else own
            integer_product(x[strip], y, product, spare).mul_(x_scale[strip])
            if number:
                own.addcmul_(product, y_scale.T)
            else:
                own.mul_(y_scale.T)
    return total
