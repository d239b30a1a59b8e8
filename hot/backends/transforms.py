"""Block transforms, for launchers of every backend: project, expand and hadamard but for the launch of a kernel, and the
matrices that fused kernels multiply by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from hot.backends.layouts import FLOATS, power_of_2
from hot.backends.ops import compute_dtype, projected_length
from hot.backends.reference.transforms import basis
from hot.backends.table import register_kernel
from hot.hadamard import is_power_of_two

LARGEST_BLOCK = 4096
IDENTITY = 16
"""The side of the blocks that fused kernels cut where nothing is transformed."""


def held_gain(size: int) -> float:
    """The gain 1/√size where that is a power of two, which a basis holds exactly, else 1."""
    return size**-0.5 if size == power_of_2(size) and size.bit_length() % 2 == 1 else 1.0


@cache
def held_basis(
    block: int, rows: tuple[int, ...], signs: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The matrix (rank, block) of a transform, contiguous: ±1 times its `held_gain`; block = 1: the identity.

    Kept for good, for a CUDA graph that was captured reads it again and again. It is there when this returns: who asks first is
    on one stream, and who asks next may be on another.
    """
    if block == 1:
        matrix = torch.eye(IDENTITY, dtype=dtype, device=device)
    else:
        matrix = basis(block, rows, signs, None, torch.empty(0, dtype=dtype, device=device))
        matrix = (matrix * held_gain(block)).contiguous()
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
    return matrix


Launch = Callable[[Tensor, Tensor, int, int, int, int, bool, Sequence[int], Sequence[int], Tensor | None, bool], None]
"""``launch(x, out, first, last, block, rank, mapped, rows, signs, draw, expand)``: fill the blocks of out (…, L') from those of
x (…, L), neither of them empty. On the side in natural order, which is x's, or out's with `expand`, the blocks are the elements
first … last, and the last block may be short; on the other they begin at `first` too, with `rank` coefficients each. mapped:
whether these are others than all of a block in natural order."""


def register_transforms(backend: str, launch: Launch) -> None:
    """Attach `project`, `expand` and `hadamard` to a backend."""

    @register_kernel("project", backend=backend, supports=lambda x, block, rows, *_, **__: _serves(x, block, rows))
    def project(
        x: Tensor, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str, draw: Tensor | None
    ) -> Tensor:
        rank = len(rows) if draw is None else draw.shape[0]
        length = projected_length(x.shape[-1], block, rank, prefix, tail)
        return _run(launch, x, length, x.shape[-1], block, rows, signs, prefix, tail, draw, False)

    @register_kernel(
        "expand", backend=backend, supports=lambda c, length, block, rows, *_, **__: _serves(c, block, rows)
    )
    def expand(
        c: Tensor, length: int, block: int, rows: Sequence[int], signs: Sequence[int], prefix: int, tail: str,
        draw: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return _run(launch, c, length, length, block, rows, signs, prefix, tail, draw, True)

    @register_kernel("hadamard", backend=backend, supports=lambda x, block: _serves(x, block, (0,)))
    def hadamard(x: Tensor, block: int) -> Tensor:
        return project(x, block, range(block), (), 0, "pad", None)


def _serves(x: Tensor, block: int, rows: Sequence[int]) -> bool:
    return x.dtype in FLOATS and is_power_of_two(block) and block <= LARGEST_BLOCK and 0 < len(set(rows)) == len(rows)


def _run(
    launch: Launch, x: Tensor, out_length: int, length: int, block: int, rows: Sequence[int], signs: Sequence[int],
    prefix: int, tail: str, draw: Tensor | None, expand: bool,
) -> Tensor:  # fmt: skip
    """x (…, L) → (…, out_length); length: of the side in natural order."""
    out = torch.empty((*x.shape[:-1], out_length), dtype=compute_dtype(x), device=x.device)
    if not out.numel():
        return out
    prefix = min(prefix, length)
    kept = (length - prefix) % block if tail == "keep" else 0
    for n, at in ((prefix, 0), (kept, -kept)):  # a few columns that no block has
        if n:
            out[..., at : at + n or None].copy_(x[..., at : at + n or None])
    if length > prefix + kept and x.numel():
        rank = len(rows) if draw is None else draw.shape[0]
        mapped = draw is not None or tuple(rows) != tuple(range(block))
        launch(x, out, prefix, length - kept, block, rank, mapped, rows, signs, draw, expand)
    return out
