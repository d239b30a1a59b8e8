"""Attention that a model writes out itself: softmax, and matrix products of two activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hot.executor import as_written, unviewed
from hot.kept import Kept
from hot.policies.buffers import Quantized
from hot.recipes import Recipe, recipe_of


def softmax(call: Callable[[], Tensor], x: Tensor, dim: int, buffer: Quantized, backend: str) -> Tensor:
    """F.softmax, which keeps codes of its result; a product behind it shares them. `call` runs it."""
    result: Tensor = Softmax.apply(x, call, dim, buffer, backend)
    return result


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], Tensor], dim: int, buffer: Quantized, backend: str) -> Tensor:
        y = unviewed(call())
        ctx.kept, ctx.dim, ctx.dtype = Kept.of(y, buffer, backend), dim, x.dtype
        with as_written(y):
            ctx.save_for_backward(*ctx.kept.save(y))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with as_written(g):
            y = ctx.kept.values(ctx.saved_tensors, g.dtype)
            grad = torch._softmax_backward_data(g, y, ctx.dim, g.dtype)
        return grad.to(ctx.dtype), *[None] * 4


def matmul(call: Callable[[], Tensor], a: Tensor, b: Tensor, buffer: Quantized, backend: str) -> Tensor:
    """torch.matmul of a (…, n, k) and b (…, k, m), with the same axes in front; each is kept, as codes, if the other is
    differentiated. `call` runs it."""
    with as_written(a):
        parts = tuple(
            (recipe_of(t) or Kept.of(t, buffer, backend).recipe(t)) if other.requires_grad else None
            for t, other in ((a, b), (b, a))
        )
    result: Tensor = Matmul.apply(a, b, call, parts)
    return result


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, call: Callable[[], Tensor], parts: tuple[Recipe | None, Recipe | None]
    ) -> Tensor:
        of_a, of_b = ((() if part is None else part.tensors) for part in parts)
        ctx.save_for_backward(*of_a, *of_b)
        ctx.split, ctx.makes = len(of_a), tuple(part and part.make for part in parts)
        ctx.dtypes = a.dtype, b.dtype
        return unviewed(call())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, (of_a, of_b) = ctx.saved_tensors, ctx.makes
        needs = ctx.needs_input_grad
        grad_a = grad_b = None
        with as_written(g):
            if needs[0]:
                grad_a = g @ of_b(saved[ctx.split :]).to(g.dtype).transpose(-2, -1)
            if needs[1]:
                grad_b = of_a(saved[: ctx.split]).to(g.dtype).transpose(-2, -1) @ g
        return (
            None if grad_a is None else grad_a.to(ctx.dtypes[0]),
            None if grad_b is None else grad_b.to(ctx.dtypes[1]),
            None,
            None,
        )
