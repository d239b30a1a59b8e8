"""How tensors lie in memory, for launchers of every backend: rows with two strides, the places of chosen coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉. Triton's own, made for kernels too, costs a step many microseconds; so does its next_power_of_2."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()


class Rows(NamedTuple):
    """A tensor (…, L) as `number` rows of its last axis: row r at (r % fast)·stride + (r // fast)·far, elements `step` apart.

    `out_stride` and `out_far` are the same for a contiguous result of another length; `innermost` says that neighbouring rows
    are nearer in memory than neighbouring elements, as in the transposed view of a matrix.
    """

    x: Tensor
    number: int
    fast: int
    stride: int
    far: int
    step: int
    out_stride: int
    out_far: int
    innermost: bool


def rows_of(x: Tensor, out_length: int) -> Rows:
    """x (…, L) as rows; x is copied, once, only where its leading axes do not merge into two."""
    lead = _merged(x)
    if len(lead) > 2:
        x = x.contiguous()
        lead = _merged(x)
    (far_count, far), (fast, stride) = [(1, 0)] * (2 - len(lead)) + lead
    out_stride, out_far = out_length, out_length * fast
    if far_count > 1 and (fast == 1 or 0 < far < stride):  # the tile runs along the nearer rows
        far_count, far, fast, stride = fast, stride, far_count, far
        out_stride, out_far = out_far, out_stride
    step = x.stride(-1) if x.shape[-1] > 1 else 1
    return Rows(x, far_count * fast, fast, stride, far, step, out_stride, out_far, 0 < stride < step and fast > 1)


def _merged(x: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of x's leading axes, outermost first, neighbours that are evenly spaced as one."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


def is_across(x: Tensor) -> bool:
    """Whether the rows of x (rows, samples, length) are its dense axis."""
    return x.stride(0) == 1 and x.stride(2) != 1


@lru_cache(maxsize=256)
def _tables(
    block: int, rows: tuple[int, ...], signs: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """On the device: where each natural coefficient goes among the kept, −1 for none (int32); rows (int64); signs (int8)."""
    position = torch.full((block,), -1, dtype=torch.int32)
    chosen = torch.tensor(rows, dtype=torch.int64)
    position[chosen] = torch.arange(len(rows), dtype=torch.int32)
    sign = torch.tensor(signs or (1,), dtype=torch.int8)
    return position.to(device), chosen.to(device), sign.to(device)


def positions(
    block: int, rows: Sequence[int], signs: Sequence[int], draw: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The positions and signs of a call; those of a draw are made on the device, for the host does not know it."""
    with torch.device("cpu"):  # whatever the default device is
        position, chosen, sign = _tables(block, tuple(rows), tuple(signs), device)
    if draw is not None:
        position = torch.full((block,), -1, dtype=torch.int32, device=device)
        position[chosen[draw]] = torch.arange(draw.shape[0], dtype=torch.int32, device=device)
    return position, sign
