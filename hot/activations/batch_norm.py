"""Batch norm whose input is kept as codes, where channels are neighbours in memory: channels_last, or (samples, channels)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hot.backends import get_ops
from hot.executor import as_written
from hot.kept import Kept, Layout, layout_of
from hot.policies.buffers import Quantized
from hot.recipes import remember


def lies_by_channels(x: Tensor) -> bool:
    """Whether the rows of x in memory are its channels, one pixel after the other."""
    return x.dim() >= 2 and x.stride(1) == 1 and _layout(x) is not None


def _layout(x: Tensor) -> Layout | None:
    order = layout_of(x.shape, x.stride()).order
    dense = order[-1] == 1 and all(
        x.stride(a) == x.stride(b) * x.shape[b] for a, b in pairwise(order) if x.shape[a] > 1
    )
    return Layout(x.shape, order, x.shape[1]) if dense else None


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    buffer: Quantized,
    backend: str,
) -> Tensor:
    """F.batch_norm in training. A ReLU behind it, and a convolution behind that, are told how their inputs are made again."""
    with as_written(x):
        kept = Kept.of(x, buffer, backend, _layout(x))
    statistics: list[Tensor] = []
    y: Tensor = BatchNorm.apply(x, weight, bias, (running_mean, running_var, momentum, eps), kept, statistics)
    own = tuple(t for t in (weight, bias) if t is not None)
    made = kept.without_tensors(), weight is not None, bias is not None
    remember(y, (*kept.tensors, *statistics, *own), _Given(*made, rectify=False), _Given(*made, rectify=True))
    return y


@dataclass(frozen=True)
class _Given:
    """What the batch norm gave, from the codes of its input; rectify: what a ReLU made of that."""

    kept: Kept
    weighted: bool
    biased: bool
    rectify: bool

    def __call__(self, tensors: tuple[Tensor, ...]) -> Tensor:
        kept, ops = self.kept, get_ops(self.kept.backend, tensors[0].device.type)
        codes, scale, mean, factor, *own = tensors
        weight = own[0] if self.weighted else None
        bias = own[-1] if self.biased else None
        values = ops.batch_norm(codes, scale, kept.group, mean, factor, weight, bias, self.rectify, kept.dtype)
        return kept.layout.tensor(values)


class BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        how: tuple[Tensor | None, Tensor | None, float, float],
        kept: Kept,
        statistics: list[Tensor],
    ) -> Tensor:
        running_mean, running_var, momentum, eps = how
        y, mean, factor, *_ = torch.ops.aten._batch_norm_impl_index(
            x, weight, bias, running_mean, running_var, True, momentum, eps, torch.backends.cudnn.enabled
        )
        statistics += [mean, factor]
        ctx.save_for_backward(weight, mean, factor, *kept.tensors)
        ctx.kept, ctx.bias_dtype = kept.without_tensors(), None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, mean, factor, codes, scale = ctx.saved_tensors
        kept, ops = ctx.kept, get_ops(ctx.kept.backend, g.device.type)
        with as_written(g):
            rows = kept.layout.matrix(g)
            made = ops.batch_norm_backward(rows, codes, scale, kept.group, weight, mean, factor, kept.dtype)
        grad, of_weight, of_bias = made
        needs = ctx.needs_input_grad
        return (
            kept.layout.tensor(grad) if needs[0] else None,
            of_weight.to(weight.dtype) if needs[1] else None,
            of_bias.to(ctx.bias_dtype) if needs[2] else None,
            None,
            None,
            None,
        )
