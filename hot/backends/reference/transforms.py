"""hadamard, project, expand: block transforms of the last axis, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hot.backends.ops import compute_dtype
from hot.backends.table import REFERENCE, register_kernel
from hot.hadamard import hadamard_matrix

_bases: dict[tuple[object, ...], Tensor] = {}


def basis(block: int, rows: Sequence[int], signs: Sequence[int], draw: Tensor | None, like: Tensor) -> Tensor:
    """The (rank, block) matrix of a projection, of ±1 (to be multiplied by the gain), in like's dtype and on its device.

    Kept per device, so that no step copies constants to the GPU; under torch.compile it is a constant of the graph.
    """
    if torch.compiler.is_compiling():
        full = _basis(block, rows, signs, like)
    elif (key := (block, tuple(rows), tuple(signs), like.dtype, like.device)) in _bases:
        full = _bases[key]
    else:
        full = _basis(block, rows, signs, like)
        if type(full) is Tensor and not full.is_inference():  # a fake or inference tensor serves this call alone
            _bases[key] = full
    return full if draw is None else full[draw]


def _basis(block: int, rows: Sequence[int], signs: Sequence[int], like: Tensor) -> Tensor:
    matrix = hadamard_matrix(block)[list(rows)]
    if signs:
        matrix = matrix * torch.tensor(signs, dtype=matrix.dtype, device=matrix.device)
    return matrix.to(like.device, like.dtype)


def _rows_innermost(x: Tensor) -> bool:
    """Whether the first axis is the dense one, as in the transposed view of a matrix: then work along the second last."""
    return x.dim() > 1 and x.stride(0) == 1 and x.stride(-1) != 1


def _split(x: Tensor, dim: int, block: int, prefix: int, tail: str) -> tuple[Tensor, Tensor, Tensor]:
    """An axis as (prefix, body, rest): the body padded to whole blocks, or cut to them and the rest kept."""
    length = x.shape[dim]
    prefix = min(prefix, length)
    whole = (length - prefix) // block * block
    ragged = length - prefix - whole
    head, body, rest = x.split([prefix, whole, ragged], dim)
    if ragged and tail == "pad":
        body = F.pad(x.narrow(dim, prefix, whole + ragged), (0, 0) * (-1 - dim) + (0, block - ragged))
        rest = rest.narrow(dim, 0, 0)
    return head, body, rest


def _join(head: Tensor, body: Tensor, rest: Tensor, dim: int) -> Tensor:
    return torch.cat([head, body, rest], dim) if head.shape[dim] or rest.shape[dim] else body


def _along(x: Tensor, h: Tensor, dim: int) -> Tensor:
    """Every run of h.shape[1] elements along dim (-1 or -2), times h: runs of h.shape[0] elements."""
    rank, block = h.shape
    if dim == -1:  # one flat product: torch is several times slower on the same blocks with more leading axes
        return (x.reshape(-1, block) @ h.T).view(*x.shape[:-1], x.shape[-1] // block * rank)
    return (h @ x.unflatten(dim, (x.shape[dim] // block, block))).flatten(dim - 1, dim)


@register_kernel("project", backend=REFERENCE)
def project(
    x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str, draw: Tensor | None
) -> Tensor:
    if _rows_innermost(x):
        return _project(x.movedim(0, -1), block, rows, signs, prefix, tail, draw, -2).movedim(-1, 0)
    return _project(x, block, rows, signs, prefix, tail, draw, -1)


def _project(
    x: Tensor,
    block: int,
    rows: Sequence[int],
    signs: Sequence[int],
    prefix: int,
    tail: str,
    draw: Tensor | None,
    dim: int,
) -> Tensor:
    x = x.to(compute_dtype(x))
    h = basis(block, rows, signs, draw, x)
    head, body, rest = _split(x, dim, block, prefix, tail)
    gain = (block if draw is None else h.shape[0]) ** -0.5
    return _join(head, _along(body, h, dim).mul_(gain), rest, dim)


@register_kernel("expand", backend=REFERENCE)
def expand(
    c: Tensor,
    length: int,
    block: int,
    rows: Sequence[int],
    signs: Sequence[int],
    prefix: int,
    tail: str,
    draw: Tensor | None,
) -> Tensor:
    c = c.to(compute_dtype(c))
    h = basis(block, rows, signs, draw, c)
    rank = h.shape[0]
    prefix = min(prefix, length)
    kept = (length - prefix) % block if tail == "keep" else 0
    head, body, rest = c.split([prefix, c.shape[-1] - prefix - kept, kept], -1)
    gain = (block if draw is None else rank) ** -0.5
    return _join(head, _along(body, h.T, -1).mul_(gain), rest, -1)[..., :length]


@register_kernel("hadamard", backend=REFERENCE)
def hadamard(x: Tensor, block: int) -> Tensor:
    return project(x, block, range(block), (), 0, "pad", None)
