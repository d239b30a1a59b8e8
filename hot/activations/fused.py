"""Ops with a backward of their own, straight from codes: activations and norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hot.backends import get_ops
from hot.executor import as_written
from hot.kept import Kept, rows_of
from hot.policies.buffers import Quantized
from hot.recipes import remember


def activation(call: Callable[[Tensor], Tensor], x: Tensor, name: str, buffer: Quantized, backend: str) -> Tensor:
    """An activation by the name that the op `activation_backward` has for it. Whoever would keep its result is told of the
    codes that it can be made of again."""
    with as_written(x):
        kept = Kept.of(x, buffer, backend)
    y: Tensor = Activation.apply(x, call, name, kept)
    remember(y, kept.tensors, _Again(name, kept.without_tensors()))
    return y


@dataclass(frozen=True)
class _Again:
    """What an activation gave, from the codes of its input."""

    name: str
    kept: Kept

    def __call__(self, tensors: tuple[Tensor, ...]) -> Tensor:
        kept, ops = self.kept, get_ops(self.kept.backend, tensors[0].device.type)
        return kept.layout.tensor(ops.activation(*tensors, kept.group, kept.layout.k, self.name, kept.dtype))


class Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[Tensor], Tensor], name: str, kept: Kept) -> Tensor:
        ctx.save_for_backward(*kept.tensors)
        ctx.kept, ctx.name = kept.without_tensors(), name
        y = call(x)
        return torch.ops.aten._unsafe_view(y, y.shape)  # no view: whoever gets it may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        kept, ops = ctx.kept, get_ops(ctx.kept.backend, g.device.type)
        with as_written(g):
            grad = ops.activation_backward(kept.layout.matrix(g), *ctx.saved_tensors, kept.group, ctx.name)
        return kept.layout.tensor(grad).to(kept.dtype), None, None, None


def norm(
    call: Callable[[], Tensor],
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    buffer: Quantized,
    backend: str,
) -> Tensor:
    """A norm over the last axes of x, of that shape, as `norm_backward` has it. `call` runs it."""
    with as_written(x):
        kept = Kept.of(x, buffer, backend, rows_of(x.shape, math.prod(shape)))
    result: Tensor = Norm.apply(x, weight, bias, call, kept, eps, centered)
    return result


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        call: Callable[[], Tensor],
        kept: Kept,
        eps: float,
        centered: bool,
    ) -> Tensor:
        ctx.save_for_backward(weight, *kept.tensors)
        ctx.kept, ctx.eps, ctx.centered = kept.without_tensors(), eps, centered
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = call()
        return torch.ops.aten._unsafe_view(y, y.shape)  # no view: whoever gets it may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, codes, scale = ctx.saved_tensors
        kept, ops = ctx.kept, get_ops(ctx.kept.backend, g.device.type)
        rows, flat = kept.layout.matrix(g), None if weight is None else weight.flatten()
        with as_written(g):
            made = ops.norm_backward(rows, codes, scale, kept.group, flat, ctx.eps, ctx.centered, kept.dtype)
        grad, of_weight, of_bias = made
        needs, shape = ctx.needs_input_grad, None if weight is None else weight.shape
        return (
            kept.layout.tensor(grad) if needs[0] else None,
            of_weight.view(shape).to(weight.dtype) if needs[1] else None,
            of_bias.view(shape).to(ctx.bias_dtype) if needs[2] else None,
            *[None] * 4,
        )
