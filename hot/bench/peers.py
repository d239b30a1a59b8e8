"""What else makes a linear layer's backward cheap, to be measured beside HOT where it is installed.

What a peer misses (a package, a capability, a multiple of 16) is an exception of its own while it is set up, which `measure`
turns into a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Operands(NamedTuple):
    """One input set of a layer: x, weight and bias are trained, g is the gradient of the output."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    g: Tensor


class Run(NamedTuple):
    """A layer on one input set: its forward pass, and what backward gives the gradients of."""

    forward: Callable[[], Tensor]
    trained: tuple[Tensor, ...]


PRODUCTS = "torch._int_mm"


def int8_products(t: Operands) -> Callable[[], object]:
    """The two products of a backward by torch._int_mm, of codes that are there already: no rounding, no scales, no transform.

    The tokens are filled up to a multiple of 8, and to 24 at least, as torch._int_mm wants them.
    """

    def codes(t: Tensor) -> Tensor:
        matrix = t.detach().reshape(-1, t.shape[-1])
        return (matrix * (127 / matrix.abs().amax())).to(torch.int8)

    missing = max(-t.x.shape[:-1].numel() % 8, 24 - t.x.shape[:-1].numel())
    x, g = (F.pad(codes(rows), (0, 0, 0, missing)) for rows in (t.x, t.g))
    w_rows, g_columns, x_columns = (m.T.contiguous() for m in (codes(t.weight), g, x))
    return lambda: (torch._int_mm(g, w_rows.T), torch._int_mm(g_columns, x_columns.T))


def _torchao_int8(layer: nn.Module) -> nn.Module:
    """torchao's int8 mixed precision training: all three products in int8, scales a row."""
    training = import_module("torchao.prototype.quantized_training")
    import_module("torchao.quantization").quantize_(layer, training.int8_mixed_precision_training())
    return layer


def _torchao_float8(layer: nn.Module) -> nn.Module:
    """torchao's float8 training, one scale a tensor: all three products in float8."""
    float8 = import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    converted: nn.Module = float8.convert_to_float8_training(layer, config=config)
    return converted


LIBRARIES = {"torchao int8": _torchao_int8, "torchao float8": _torchao_float8}
"""Conversions of a module that holds an nn.Linear."""


def library(name: str) -> Callable[[Operands], Run]:
    """A library's layer, compiled, on any input set of one shape; the sets share its weight."""

    @cache
    def build(
        outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        layer = LIBRARIES[name](nn.Sequential(nn.Linear(inputs, outputs, dtype=dtype, device=device)))
        torch._dynamo.reset()  # beside a shape that was compiled before, this one would count as a recompilation
        return layer, torch.compile(layer, dynamic=False)

    def run(t: Operands) -> Run:
        layer, compiled = build(*t.weight.shape, t.weight.dtype, t.weight.device)
        return Run(lambda: compiled(t.x), (t.x, *layer.parameters()))

    return run
