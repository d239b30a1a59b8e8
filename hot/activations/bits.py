"""Ops whose backward asks only which elements passed, and that keep a bit of each, or a byte of each that did: exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hot.backends import get_ops
from hot.kept import layout_of
from hot.recipes import recipe_of, remember


def relu(function: Any, backend: str, input: Tensor, inplace: bool = False) -> Tensor:
    inplace = inplace or function in (torch.relu_, Tensor.relu_)
    if type(input) is not Tensor or not input.requires_grad:
        return torch.relu_(input) if inplace else torch.relu(input)
    recipe = recipe_of(input)
    y: Tensor = Relu.apply(input, inplace, backend)
    if recipe is not None:
        remember(y, recipe.tensors, recipe.rectified or _Rectified(recipe.make))
    return y


class _Rectified:
    def __init__(self, make: Any) -> None:
        self.make = make

    def __call__(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.relu(self.make(tensors))


class Relu(torch.autograd.Function):
    """torch.relu, which keeps a bit an element instead of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, backend: str) -> Tensor:
        y = torch.relu_(x) if inplace else torch.relu(x)
        if inplace:
            ctx.mark_dirty(x)
        ctx.layout, ctx.backend = layout_of(y.shape, y.stride()), backend
        ctx.save_for_backward(get_ops(backend, y.device.type).pack1(ctx.layout.matrix(y)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _passed(ctx, g, 1.0), None, None


def leaky_relu(
    function: Any, backend: str, input: Tensor, negative_slope: float = 0.01, inplace: bool = False
) -> Tensor:
    call = partial(function, negative_slope=negative_slope, inplace=inplace)
    return _split(call, input, lambda x: x > 0, negative_slope, inplace, backend)


def hardtanh(
    function: Any, backend: str, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Tensor:
    call = partial(function, min_val=min_val, max_val=max_val, inplace=inplace)
    return _split(call, input, partial(_between, min_val, max_val), 0.0, inplace, backend)


def relu6(function: Any, backend: str, input: Tensor, inplace: bool = False) -> Tensor:
    return _split(partial(function, inplace=inplace), input, partial(_between, 0.0, 6.0), 0.0, inplace, backend)


def _between(low: float, high: float, x: Tensor) -> Tensor:
    """Where x is between the bounds, or NaN. torch compares halves as float32 with them, so here the bounds are the outermost
    halves that are still within."""
    low, high = _bound(low, x.dtype, -math.inf), _bound(high, x.dtype, math.inf)
    return ((x <= low) | (x >= high)).logical_not_()


@lru_cache(maxsize=256)
def _bound(value: float, dtype: torch.dtype, beyond: float) -> float:
    """The number of a dtype that is nearest to a bound, from the bound itself on towards `beyond`."""
    wide = torch.tensor(value, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device="cpu")
    found = wide.to(dtype)
    if (found > wide) if beyond < 0 else (found < wide):
        found = torch.nextafter(found, torch.tensor(beyond, dtype=dtype, device="cpu"))
    return found.item()


def _split(
    call: Callable[[Tensor], Tensor],
    x: Tensor,
    passes: Callable[[Tensor], Tensor],
    rest: float,
    inplace: bool,
    backend: str,
) -> Tensor:
    if type(x) is not Tensor or not x.requires_grad:
        return call(x)
    result: Tensor = Split.apply(x, call, passes, rest, inplace, backend)
    return result


class Split(torch.autograd.Function):
    """A function whose gradient is that of its result where an element passes, and `rest` times that elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        call: Callable[[Tensor], Tensor],
        passes: Callable[[Tensor], Tensor],
        rest: float,
        inplace: bool,
        backend: str,
    ) -> Tensor:
        passed = passes(x)  # before x changes
        ctx.layout, ctx.backend, ctx.rest = layout_of(passed.shape, passed.stride()), backend, rest
        ctx.save_for_backward(get_ops(backend, x.device.type).pack1(ctx.layout.matrix(passed)))
        y = call(x)
        if inplace:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        grad = _passed(ctx, g, 1.0)
        if ctx.rest:  # one of both is zero
            grad = grad + _passed(ctx, g, ctx.rest, others=True)
        return grad, *[None] * 5


def _passed(ctx: Any, g: Tensor, factor: float, others: bool = False) -> Tensor:
    """g times a factor where an element passed, or where it did not; zero elsewhere."""
    (bits,) = ctx.saved_tensors
    bits = ~bits if others else bits
    grad = get_ops(ctx.backend, g.device.type).pass1(ctx.layout.matrix(g).contiguous(), bits, factor)
    return ctx.layout.tensor(grad)


def dropout(
    function: Any, backend: str, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or inplace or not 0 < p < 1 or type(input) is not Tensor or not input.requires_grad:
        result: Tensor = function(input, p, training, inplace)
        return result
    result = Dropout.apply(input, p, backend)
    return result


class Dropout(torch.autograd.Function):
    """F.dropout, which keeps a bit an element instead of its factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, backend: str) -> Tensor:
        if x.is_cuda:
            y, passed = torch.native_dropout(x, p, True)
        else:  # what torch does on other devices, in the same order
            factors = torch.empty_like(x).bernoulli_(1 - p)
            passed = factors != 0
            y = x * factors.div_(1 - p)
        ctx.layout, ctx.backend = layout_of(passed.shape, passed.stride()), backend
        ctx.save_for_backward(get_ops(backend, x.device.type).pack1(ctx.layout.matrix(passed)))
        ctx.factor = 1 / (1 - p) if x.is_cuda else torch.ones((), dtype=x.dtype).div_(1 - p).item()  # rounded, there
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _passed(ctx, g, ctx.factor), None, None


def max_pool2d(
    function: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    kernel, pads, gaps = _pair(kernel_size), _pair(padding), _pair(dilation)
    steps = _pair(stride) if stride else kernel
    plain = type(input) is Tensor and input.requires_grad and input.dim() == 4 and not return_indices
    if not plain or kernel[0] * kernel[1] > 256:
        return function(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return MaxPool.apply(input, kernel, steps, pads, gaps, ceil_mode)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class MaxPool(torch.autograd.Function):
    """F.max_pool2d, which keeps where in its window a maximum is, in a byte, instead of its input and where in all of that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        y, index = torch.ops.aten.max_pool2d_with_indices(x, *how)
        ctx.how, ctx.like = how, (x.shape, x.is_contiguous(memory_format=torch.channels_last))
        down, right = MaxPool.corners(index, how)
        _, gaps, width = how[0], how[3], x.shape[3]
        row, column = (index // width - down) // gaps[0], (index % width - right) // gaps[1]
        ctx.save_for_backward((row * how[0][1] + column).to(torch.uint8))
        return y

    @staticmethod
    def corners(like: Tensor, how: Any) -> tuple[Tensor, Tensor]:
        """First row and first column of every window."""
        _, steps, pads, *_ = how
        down = torch.arange(like.shape[2], device=like.device) * steps[0] - pads[0]
        right = torch.arange(like.shape[3], device=like.device) * steps[1] - pads[1]
        return down[:, None], right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (offset,), how, (shape, last) = ctx.saved_tensors, ctx.how, ctx.like
        down, right = MaxPool.corners(offset, how)
        kernel, gaps = how[0], how[3]
        place = offset.to(torch.int64)
        index = (place // kernel[1] * gaps[0] + down) * shape[3] + place % kernel[1] * gaps[1] + right
        x = (
            g.new_empty(1)
            .expand(shape)
            .contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        )
        return torch.ops.aten.max_pool2d_with_indices_backward(g, x, *how, index), *[None] * 5
