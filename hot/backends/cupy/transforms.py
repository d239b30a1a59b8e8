"""hadamard, project, expand: how the kernel of kernels/transforms.cu is launched.

Every element is read once and written once, whatever the strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from hot.backends.cupy.launch import NUMBERS, Kernel, fits
from hot.backends.devices import on_device
from hot.backends.layouts import Rows, cdiv, positions, rows_of
from hot.backends.transforms import register_transforms

LAYOUT = "@4Q10qd3i"
"""Of struct Transform."""


@cache
def _kernel(dtype: torch.dtype, block: int, expand: bool, mapped: bool, innermost: bool) -> Kernel:
    flags = [str(flag).lower() for flag in (expand, mapped, innermost)]
    return Kernel("transforms.cu", "transform_kernel", (NUMBERS[dtype], str(block), *flags), LAYOUT)


def _program(block: int, innermost: bool) -> tuple[int, int, int]:
    """Columns of a warp's piece, rows of a program, and its threads: SPAN, ROWS and 32 · WARPS of the kernel."""
    span = max(block, 256)
    rows = 8192 // span if span > 1024 or innermost else 8
    return span, rows, 32 * min(rows, 8)


def _as_one_row(view: Rows, length: int, out_length: int) -> Rows:
    """Rows that lie behind one another, of whole blocks each, as a single long one: no block is short, no lane idle."""
    dense = view.step == 1 and view.fast == view.number and view.stride == length and view.out_stride == out_length
    if not dense or view.number == 1:
        return view
    return view._replace(number=1, fast=1, stride=0, far=0, out_stride=0, out_far=0, innermost=False)


def _launch(
    x: Tensor, out: Tensor, first: int, last: int, block: int, rank: int, mapped: bool,
    rows: Sequence[int], signs: Sequence[int], draw: Tensor | None, expand: bool,
) -> None:  # fmt: skip
    length, blocks = x.shape[-1], cdiv(last - first, block)
    view = rows_of(x, out.shape[-1])
    if first == 0 and last == (out.shape[-1] if expand else length) == blocks * block:
        whole = _as_one_row(view, length, out.shape[-1])
        times = view.number // whole.number
        view, blocks, last = whole, blocks * times, last * times
    x = view.x
    span, each, threads = _program(block, view.innermost)
    pieces = cdiv(blocks, span // block)
    programs = pieces * cdiv(view.number, each) if view.innermost else cdiv(pieces * view.number, each)
    pitch = (span + 4) * out.element_size()
    position, sign = positions(block, rows, signs, draw, x.device)
    chunk = 16 // out.element_size()
    strides = (view.stride, view.far), (view.out_stride, view.out_far)
    dense = [fits(t, chunk, first, *steps) for t, steps in zip((x, out), strides, strict=True)]
    with on_device(x):
        _kernel(x.dtype, block, expand, mapped, view.innermost)(
            programs, threads,
            x.data_ptr(), out.data_ptr(), position.data_ptr(), sign.data_ptr() if signs else 0,
            view.number, view.fast, view.stride, view.far, view.step, view.out_stride, view.out_far, first, last, blocks,
            (block if draw is None else rank) ** -0.5, rank if mapped else block, view.step == 1 and dense[0], dense[1],
            shared=each * pitch if mapped or view.innermost else 0,
        )  # fmt: skip


register_transforms("cupy", _launch)

SPECIMENS = [
    _kernel(torch.bfloat16, 16, False, False, False),
    _kernel(torch.bfloat16, 16, False, True, True),
    _kernel(torch.float32, 16, True, True, False),
    _kernel(torch.float16, 1, True, False, True),
    _kernel(torch.float64, 256, False, True, False),
]
