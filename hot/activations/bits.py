"""Ops whose backward asks only which elements passed, and that keep a bit of each: exact."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def relu(function: Any, input: Tensor, inplace: bool = False) -> Tensor:
    inplace = inplace or function in (torch.relu_, Tensor.relu_)
    if type(input) is not Tensor or not input.requires_grad:
        return torch.relu_(input) if inplace else torch.relu(input)
    result: Tensor = Relu.apply(input, inplace)
    return result


class Relu(torch.autograd.Function):
    """torch.relu, which keeps a bit an element instead of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        y = torch.relu_(x) if inplace else torch.relu(x)
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(pack_bits((y <= 0).logical_not_()))  # a NaN passes, as it does in torch
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        return torch.where(unpack_bits(bits, g.shape), g, 0.0), None


def dropout(function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or inplace or not 0 < p < 1 or type(input) is not Tensor or not input.requires_grad:
        result: Tensor = function(input, p, training, inplace)
        return result
    result = Dropout.apply(input, p)
    return result


class Dropout(torch.autograd.Function):
    """F.dropout, which keeps a bit an element instead of its factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        if x.is_cuda:
            y, passed = torch.native_dropout(x, p, True)
        else:  # what torch does on other devices, in the same order
            factors = torch.empty_like(x).bernoulli_(1 - p)
            passed = factors != 0
            y = x * factors.div_(1 - p)
        ctx.save_for_backward(pack_bits(passed))
        ctx.factor = 1 / (1 - p) if x.is_cuda else torch.ones((), dtype=x.dtype).div_(1 - p).item()  # rounded, there
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        return torch.where(unpack_bits(bits, g.shape), g * ctx.factor, 0.0), None


def pack_bits(mask: Tensor) -> Tensor:
    """mask, bool, any shape, in its contiguous order → uint8, eight elements to a byte, the first in the lowest bit."""
    flat = mask.flatten().view(torch.uint8)
    flat = F.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    packed = flat[:, 0].clone()
    for bit in range(1, 8):
        packed |= flat[:, bit] << bit
    return packed


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `pack_bits`."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> bits & 1).flatten()[: shape.numel()].view(shape).bool()
