"""Block transforms, for launchers of every backend: the matrices that fused kernels multiply by."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hot.backends.layouts import power_of_2
from hot.backends.reference.transforms import basis

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

    Kept for good, for a CUDA graph that was captured reads it again and again.
    """
    if block == 1:
        return torch.eye(IDENTITY, dtype=dtype, device=device)
    matrix = basis(block, rows, signs, None, torch.empty(0, dtype=dtype, device=device))
    return (matrix * held_gain(block)).contiguous()
