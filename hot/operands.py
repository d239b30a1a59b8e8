"""Both sides of a layer's products, and the products: gradients, weights and inputs as codes, and what codes multiply to."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hot.backends import Ops
from hot.backends.ops import in_float8
from hot.policies.buffers import UNTRANSFORMED
from hot.policies.encode import encode
from hot.policies.plan import GradInputPlan, LayerPlan
from hot.policies.quantizers import Operand
from hot.policies.transforms import Transform
from hot.views import View


class Fused(NamedTuple):
    """What `grad_output_operands` is told of a plan: its arguments before and behind w_draw, and the K-block of each scale."""

    before: tuple[Any, ...]
    behind: tuple[Any, ...]
    groups: tuple[int, int]


def fused_arguments(plan: LayerPlan, held: str | None) -> Fused | None:
    """How both paths' operands are made from one read of g_y, or None where one of them has no spec that says so. held: the
    format of grad_input's codes, where it is not the plan's."""
    return _fuse(plan, held) if torch.compiler.is_compiling() else _fused_once(plan, held)


def _fuse(plan: LayerPlan, held: str | None) -> Fused | None:
    inputs, weights = plan.grad_input, plan.grad_weight
    if inputs.transform.axis == "tokens" or inputs.transform.draws:
        return None
    parts = inputs.transform, inputs.grad_output, weights.transform, weights.grad_output
    specs = [part.spec for part in parts if part.spec is not None]
    if len(specs) < len(parts) or specs[0]["prefix"] or specs[0]["tail"] != "pad":
        return None
    rows, columns = {**specs[1], "format": held or specs[1]["format"]}, specs[3]
    before = *_values(specs[0], *_TRANSFORM[:3]), *_values(rows, *_QUANTIZER), *_values(specs[2], *_TRANSFORM)
    return Fused(before, _values(columns, *_QUANTIZER), (rows["group"], columns["group"]))


def _values(spec: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(spec[name] for name in names)


_fused_once = lru_cache(maxsize=1024)(_fuse)
_TRANSFORM = "block", "rows", "signs", "prefix", "tail"
_QUANTIZER = "format", "granularity", "group", "rounding", "clip"
"""The arguments of the ops that say a transform and a quantizer, in their order."""


def holders(path: GradInputPlan, ops: Ops, numel: float = math.inf) -> tuple[str | None, str | None]:
    """The formats that hold grad_input's codes as float8 where the backend multiplies them so, exactly; else None for both.

    numel: elements of the product; without it, a large one. Nothing of this path is saved, so the holder is the backend's own
    business. Scales a block go with integers, but for blocks and tiles of 128, which float8 products know.
    """
    a, b = (quantizer.spec for quantizer in path.quantizers)
    if numel < ops.float8 or ops.float8 == math.inf or a is None or b is None:
        return None, None
    scales = (a["granularity"], a["group"]), (b["granularity"], b["group"])
    factors_out = all(granularity in ("row", "tensor") for granularity, _ in scales)
    if not factors_out and scales != (("block", 128), ("tile", 128)):
        return None, None
    formats = in_float8(a["format"]), in_float8(b["format"])
    return formats if all(formats) else (None, None)


def grad_output_operands(
    tokens: Tensor, fused: Fused, draw: Tensor | None, bias: bool, ops: Ops
) -> tuple[Operand, Operand, Tensor | None]:
    """grad_output's operand for each path and the exact bias gradient, from one read of g_y."""
    made = ops.grad_output_operands(tokens, *fused.before, draw, *fused.behind, bias)
    i_codes, i_scale, w_codes, w_scale, grad_bias = made
    i_group, w_group = fused.groups
    return Operand(i_codes, i_scale, i_group), Operand(w_codes, w_scale, w_group), grad_bias if bias else None


def _contracted(path: GradInputPlan, draw: Tensor | None) -> tuple[Transform, Tensor | None]:
    """The transform of O, the contracted axis, and its draw: none where the plan's is one of the tokens."""
    return (UNTRANSFORMED, None) if path.transform.axis == "tokens" else (path.transform, draw)


def weight_operand(
    weight: Tensor, path: GradInputPlan, held: str | None, draw: Tensor | None, view: View, ops: Ops
) -> Operand:
    """The weight's operand for grad_input."""
    transform, own = _contracted(path, draw)
    return encode(view.weight_rows(weight), transform, path.weight, ops, own, held)


def grad_output_operand(
    tokens: Tensor, path: GradInputPlan, held: str | None, draw: Tensor | None, ops: Ops
) -> Operand:
    """grad_output's operand for grad_input alone; a transform of the tokens projects them first, the LBP-WHT way."""
    transform, own = _contracted(path, draw)
    if path.transform.axis == "tokens":
        tokens = path.transform.project(tokens.permute(2, 0, 1), ops, draw).permute(1, 2, 0)
    rows = tokens.reshape(-1, 1, tokens.shape[2])
    return encode(rows, transform, path.grad_output, ops, own, held)


def product(a: Operand, b: Operand, dtype: torch.dtype, low: torch.dtype, ops: Ops) -> Tensor:
    """a bᵀ in dtype. An operand that is not quantized makes it a float product in low, the dtype of the gradient."""
    if a.scale is not None and b.scale is not None:
        return ops.matmul(a.codes, a.scale, a.group, b.codes, b.scale, b.group, dtype)
    left, right = (
        operand.codes.to(low)
        if operand.scale is None
        else ops.dequantize(operand.codes, operand.scale, operand.group, low)
        for operand in (a, b)
    )
    return (left @ right.T).to(dtype)


def some_rows(operand: Operand, at: int, step: int) -> Operand:
    """Some rows of an operand, with their scales."""
    codes, scale, group = operand
    own = scale[at : at + step] if scale is not None and scale.shape[0] > 1 else scale
    return Operand(codes[at : at + step], own, group)
