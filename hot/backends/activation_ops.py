"""Ops of other layers' backward: what activations and norms differentiate to, given their input as codes.

Codes (rows, K) int8 with scales as in `dequantize`, or uint8 (rows, ⌈K/2⌉), two of 4 bits a byte as `pack4` makes them. All is
computed in float32, in float64 where the gradient is float64.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hot.backends.ops import compute_dtype
from hot.backends.table import Ops, declare_fused_op

FUNCTIONS = ("gelu", "gelu_tanh", "silu")
"""x Φ(x), its approximation (D. Hendrycks and K. Gimpel, 2016), x σ(x)."""


def _input(ops: Ops, codes: Tensor, scale: Tensor, group: int, length: int, dtype: torch.dtype) -> Tensor:
    """The input (rows, length) that the codes stand for, in float32, or float64 where dtype is."""
    whole = ops.unpack4(codes, length) if codes.dtype == torch.uint8 else codes
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values: Tensor = ops.dequantize(whole, scale, group, wide)
    return values


def _activation(
    ops: Ops, codes: Tensor, scale: Tensor, group: int, length: int, function: str, dtype: torch.dtype
) -> Tensor:
    x = _input(ops, codes, scale, group, length, dtype)
    if function == "silu":
        return F.silu(x).to(dtype)
    return F.gelu(x, approximate="tanh" if function == "gelu_tanh" else "none").to(dtype)


@declare_fused_op(_activation)
def activation(codes: Tensor, scale: Tensor, group: int, length: int, function: str, dtype: torch.dtype) -> Tensor:
    """What an activation gives for an input that is kept as codes: (rows, length) in dtype. function: one of FUNCTIONS.

    Equals: F.gelu(dequantize(codes, scale, group, torch.float32)).to(dtype)
    """
    return scale.new_empty((codes.shape[0], length), dtype=dtype)


def _derivative(x: Tensor, function: str) -> Tensor:
    if function == "gelu":
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) * math.sqrt(0.5 / math.pi)
    if function == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        t = torch.tanh(inner)
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    share = torch.sigmoid(x)
    return share * (1 + x * (1 - share))


def _activation_backward(ops: Ops, g: Tensor, codes: Tensor, scale: Tensor, group: int, function: str) -> Tensor:
    x = _input(ops, codes, scale, group, g.shape[1], g.dtype)
    return (g * _derivative(x, function)).to(g.dtype)


@declare_fused_op(_activation_backward)
def activation_backward(g: Tensor, codes: Tensor, scale: Tensor, group: int, function: str) -> Tensor:
    """The gradient of an activation's input, which is kept as codes: g (rows, K) float → (rows, K) in g's dtype.

    function: one of FUNCTIONS.

    Equals: torch.autograd.functional.vjp(F.gelu, dequantize(codes, scale, group, torch.float32), g.float())[1].to(g.dtype)
    """
    return g.new_empty(g.shape)


def _norm_backward(
    ops: Ops,
    g: Tensor,
    codes: Tensor,
    scale: Tensor,
    group: int,
    weight: Tensor | None,
    eps: float,
    centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    x = _input(ops, codes, scale, group, g.shape[1], g.dtype)
    if centered:
        x = x - x.mean(1, keepdim=True)
    factor = torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
    normed, g = x * factor, g.to(x.dtype)
    inner = g if weight is None else g * weight
    grad = inner - normed * (inner * normed).mean(1, keepdim=True)
    if centered:
        grad = grad - inner.mean(1, keepdim=True)
    return (grad * factor).to(dtype), (g * normed).sum(0), g.sum(0)


@declare_fused_op(_norm_backward)
def norm_backward(
    g: Tensor,
    codes: Tensor,
    scale: Tensor,
    group: int,
    weight: Tensor | None,
    eps: float,
    centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a norm over rows, whose input is kept as codes: g (rows, K) float, weight (K,) or None.

    centered: layer norm, (x − mean) / √(var + eps); else RMS norm, x / √(mean x² + eps). Statistics are those of what the codes
    say, so that the gradient is that of a norm exactly. Returns the gradient of x (rows, K) in dtype, and in float32 (float64)
    those of the weight and of a bias behind it, (K,) each.

    Equals: torch.autograd.functional.vjp(lambda x, w, b: F.layer_norm(x, (K,), w, b, eps), (dequantize(…), weight, bias), g)[1]
    """
    wide = compute_dtype(g)
    return g.new_empty(g.shape, dtype=dtype), g.new_empty(g.shape[1:], dtype=wide), g.new_empty(g.shape[1:], dtype=wide)


def _batch_norm_backward(
    ops: Ops,
    g: Tensor,
    codes: Tensor,
    scale: Tensor,
    group: int,
    weight: Tensor | None,
    mean: Tensor,
    factor: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    x = _input(ops, codes, scale, group, g.shape[1], g.dtype)
    normed, g = (x - mean) * factor, g.to(x.dtype)
    normed = normed - normed.mean(0)
    of_bias, of_weight = g.sum(0), (g * normed).sum(0)
    rest = g - (of_bias + normed * of_weight) / max(g.shape[0], 1)
    return (rest * factor * (1.0 if weight is None else weight)).to(dtype), of_weight, of_bias


@declare_fused_op(_batch_norm_backward)
def batch_norm_backward(
    g: Tensor,
    codes: Tensor,
    scale: Tensor,
    group: int,
    weight: Tensor | None,
    mean: Tensor,
    factor: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a batch norm, whose input is kept as codes: g (samples, C) float; weight (C,) or None.

    mean, factor (C,): of the batch, as forward found them; factor = 1 / √(var + eps). What the codes say is centered anew, so
    that the gradient of x adds up to nothing in every channel, as a batch norm's does. Returns that gradient (samples, C) in
    dtype, and in float32 (float64) those of the weight and of a bias behind it, (C,) each.

    Equals: torch.ops.aten.native_batch_norm_backward(g, dequantize(…), weight, None, None, mean, factor, True, eps, [True] * 3)
    """
    wide = compute_dtype(g)
    return g.new_empty(g.shape, dtype=dtype), g.new_empty(g.shape[1:], dtype=wide), g.new_empty(g.shape[1:], dtype=wide)


def _batch_norm(
    ops: Ops,
    codes: Tensor,
    scale: Tensor,
    group: int,
    mean: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rectify: bool,
    dtype: torch.dtype,
) -> Tensor:
    y = (_input(ops, codes, scale, group, mean.shape[0], dtype) - mean) * factor
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (y.relu() if rectify else y).to(dtype)


@declare_fused_op(_batch_norm)
def batch_norm(
    codes: Tensor,
    scale: Tensor,
    group: int,
    mean: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rectify: bool,
    dtype: torch.dtype,
) -> Tensor:
    """What a batch norm gives for an input that is kept as codes, and with `rectify` a ReLU behind it: (samples, C) in dtype.

    mean, factor (C,): as in `batch_norm_backward`; weight, bias (C,) or None.

    Equals: F.relu((dequantize(codes, scale, group, torch.float32) - mean) * factor * weight + bias).to(dtype)
    """
    return scale.new_empty((codes.shape[0], mean.shape[0]), dtype=dtype)


def _pack1(ops: Ops, x: Tensor) -> Tensor:
    passed = (x <= 0).logical_not_().flatten().view(torch.uint8)  # a NaN passes
    eight = F.pad(passed, (0, -passed.numel() % 8)).view(-1, 8)
    return (eight << torch.arange(8, dtype=torch.uint8, device=x.device)).sum(1, dtype=torch.uint8)


@declare_fused_op(_pack1)
def pack1(x: Tensor) -> Tensor:
    """A bit an element: whether it is above zero, or NaN. x (rows, K) → uint8 (⌈rows·K/8⌉,), the first in the lowest bit.

    Equals: (F.pad((x <= 0).logical_not().flatten().byte(), …).view(-1, 8) << torch.arange(8)).sum(1)
    """
    return x.new_empty((-(-x.numel() // 8),), dtype=torch.uint8)


def _pass1(ops: Ops, g: Tensor, bits: Tensor, factor: float) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=g.device)
    passed = (bits[:, None] >> places & 1).flatten()[: g.numel()].view(g.shape).bool()
    return torch.where(passed, g * factor, 0.0)


@declare_fused_op(_pass1)
def pass1(g: Tensor, bits: Tensor, factor: float) -> Tensor:
    """g (rows, K) times a factor where its bit of `pack1` is set, else zero; in g's dtype.

    Equals: torch.where(bits, g * factor, 0.0)
    """
    return g.new_empty(g.shape)
