"""Batch norm whose input is kept as codes, where channels are neighbours in memory: channels_last, or (samples, channels)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hot.backends import get_ops
from hot.executor import as_written
from hot.kept import Kept
from hot.recipes import remember


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    kept: Kept,
) -> Tensor:
    """F.batch_norm in training, of an x that is kept by channels. A ReLU behind it, and a convolution behind that, are told
    how their inputs are made again."""
    made: list[Tensor] = []
    y: Tensor = BatchNorm.apply(x, weight, bias, (running_mean, running_var, momentum, eps), kept, made)
    own = tuple(t for t in (weight, bias) if t is not None)
    remember(y, (*made, *own), *_again(kept, weight is not None, bias is not None))
    return y


@dataclass(frozen=True)
class _Again:
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


@lru_cache(maxsize=4096)
def _again(kept: Kept, weighted: bool, biased: bool) -> tuple[_Again, _Again]:
    """Without and with a ReLU."""
    return _Again(kept, weighted, biased, False), _Again(kept, weighted, biased, True)


class BatchNorm(torch.autograd.Function):
    """made: filled with what is kept, codes, scale and the statistics of the batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        how: tuple[Tensor | None, Tensor | None, float, float],
        kept: Kept,
        made: list[Tensor],
    ) -> Tensor:
        running_mean, running_var, momentum, eps = how
        with as_written(x):
            made += kept.save(x)
        y, mean, factor, *_ = torch._batch_norm_impl_index(
            x, weight, bias, running_mean, running_var, True, momentum, eps, torch.backends.cudnn.enabled
        )
        made += mean, factor
        ctx.save_for_backward(weight, *made)
        ctx.kept, ctx.bias_dtype = kept, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, codes, scale, mean, factor = ctx.saved_tensors
        kept, ops = ctx.kept, get_ops(ctx.kept.backend, g.device.type)
        with as_written(g):
            rows = kept.layout.matrix(g)
            found = ops.batch_norm_backward(rows, codes, scale, kept.group, weight, mean, factor, kept.dtype)
        grad, of_weight, of_bias = found
        needs = ctx.needs_input_grad
        return (
            kept.layout.tensor(grad) if needs[0] else None,
            of_weight.to(weight.dtype) if needs[1] else None,
            of_bias.to(ctx.bias_dtype) if needs[2] else None,
            None,
            None,
            None,
        )
