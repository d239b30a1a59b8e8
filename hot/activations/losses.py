"""Cross-entropy over many classes: logits as codes instead of float32 log-probabilities, some rows at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hot.executor import as_written
from hot.kept import Kept, rows_of
from hot.policies.buffers import Quantized

ELEMENTS = 2**25
"""Log-probabilities that exist at once (128 MiB in float32)."""


def cross_entropy(
    logits: Tensor, target: Tensor, ignore: int, reduction: str, buffer: Quantized, backend: str
) -> Tensor:
    """F.cross_entropy of logits (N, classes) and class indices (N,). The loss is torch's to the bit: it adds up in the same
    order."""
    device = logits.device.type
    wide = torch.float32 if torch.is_autocast_enabled(device) and logits.dtype != torch.float64 else logits.dtype
    kept = Kept.of(logits, buffer, backend, rows_of(logits.shape, logits.shape[1]))
    with as_written(logits):
        result: Tensor = CrossEntropy.apply(logits, target, ignore, reduction, wide, kept)
    return result


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore: int, reduction: str, wide: torch.dtype, kept: Kept
    ) -> Tensor:
        valid = target != ignore
        picked = torch.empty(target.shape, dtype=wide, device=logits.device)
        at_once = _rows(logits.shape[1])
        for part in range(0, len(target), at_once):
            rows = slice(part, part + at_once)
            chances = F.log_softmax(logits[rows].to(wide), 1)
            picked[rows] = chances.gather(1, target[rows].where(valid[rows], 0)[:, None])[:, 0]
        ctx.save_for_backward(target, *kept.save(logits))
        ctx.kept, ctx.ignore, ctx.mean, ctx.wide = kept, ignore, reduction == "mean", wide
        # one class, whose chance is that of the target: what is left to do is to add up
        only = torch.where(valid, 0, -100)
        return F.nll_loss(picked[:, None], only, reduction=reduction, ignore_index=-100)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        target, *saved = ctx.saved_tensors
        kept: Kept = ctx.kept
        valid = target != ctx.ignore
        factor = torch.where(valid, g / valid.sum() if ctx.mean else g, 0.0).to(ctx.wide)[:, None]
        grad = torch.empty(kept.layout.shape, dtype=kept.dtype, device=g.device)
        at_once = _rows(kept.layout.k)
        for part in range(0, len(target), at_once):
            rows = slice(part, part + at_once)
            # softmax − one at the target
            some = F.softmax(kept.rows(tuple(saved), rows, ctx.wide), 1)
            at = target[rows].where(valid[rows], 0)[:, None]
            some.scatter_add_(1, at, torch.full_like(at, -1, dtype=some.dtype))
            grad[rows] = some.mul_(factor[rows])
        return grad, None, None, None, None, None


def _rows(classes: int) -> int:
    return max(ELEMENTS // classes, 1)
