"""Ops with a backward of their own, straight from codes: activations, norms and products of two."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hot.backends import get_ops
from hot.executor import as_written, unviewed
from hot.kept import Kept, rows_of
from hot.policies.buffers import Quantized
from hot.recipes import Recipe, recipe_of, remember


def activation(call: Callable[[Tensor], Tensor], x: Tensor, name: str, buffer: Quantized, backend: str) -> Tensor:
    """An activation by the name that the op `activation_backward` has for it. Whoever would keep its result is told of the
    codes that it can be made of again."""
    kept = Kept.of(x, buffer, backend)
    made: list[Tensor] = []
    y: Tensor = Activation.apply(x, call, name, kept, made)
    remember(y, tuple(made), _Again(name, kept))
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
    """made: filled with what is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, call: Callable[[Tensor], Tensor], name: str, kept: Kept, made: list[Tensor]
    ) -> Tensor:
        with as_written(x):
            made += kept.save(x)
        ctx.save_for_backward(*made)
        ctx.kept, ctx.name = kept, name
        return unviewed(call(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kept, ops = ctx.kept, get_ops(ctx.kept.backend, g.device.type)
        with as_written(g):
            grad = ops.activation_backward(kept.layout.matrix(g), *ctx.saved_tensors, kept.group, ctx.name)
        return kept.layout.tensor(grad).to(kept.dtype), *[None] * 4


def product(a: Tensor, b: Tensor, buffer: Quantized, backend: str) -> Tensor:
    """a · b, of one shape and dtype, element by element: what of each is needed for the other's gradient is made again of the
    codes that it came from, or kept as codes."""
    with as_written(a):
        parts = tuple(recipe_of(t) or Kept.of(t, buffer, backend).recipe(t) for t in (a, b))
    y: Tensor = Product.apply(a, b, parts)
    split, of_a, of_b = len(parts[0].tensors), parts[0].make, parts[1].make
    remember(y, (*parts[0].tensors, *parts[1].tensors), lambda t: of_a(t[:split]) * of_b(t[split:]))
    return y


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, parts: tuple[Recipe, Recipe]) -> Tensor:
        ctx.save_for_backward(*parts[0].tensors, *parts[1].tensors)
        ctx.split, ctx.makes = len(parts[0].tensors), tuple(part.make for part in parts)
        return a * b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, (of_a, of_b), needs = ctx.saved_tensors, ctx.makes, ctx.needs_input_grad
        with as_written(g):
            grad_a = g * of_b(saved[ctx.split :]) if needs[0] else None
            grad_b = g * of_a(saved[: ctx.split]) if needs[1] else None
        return grad_a, grad_b, None


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
        with as_written(x):
            ctx.save_for_backward(weight, *kept.save(x))
        ctx.kept, ctx.eps, ctx.centered = kept, eps, centered
        ctx.bias_dtype = None if bias is None else bias.dtype
        return unviewed(call())

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
