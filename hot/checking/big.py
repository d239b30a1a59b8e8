"""More than 2³¹ elements: offsets must be 64 bits wide, so the last rows must equal a call on them alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hot.backends.table import Kernel
from hot.checking.compare import Verdict

ROWS, COLUMNS, LAST = 2**17 + 24, 2**14, 24
"""Slightly more than 2³¹ elements, and how many of its last rows are looked at."""

INT8 = {"format": "int8", "granularity": "row", "group": 0, "rounding": "nearest", "clip": ()}
HADAMARD = {"block": 16, "rows": tuple(range(16)), "signs": (), "prefix": 0, "tail": "pad", "draw": None}


def _normal(rows: int, device: torch.device) -> Tensor:
    return torch.randn(rows, COLUMNS, device=device, dtype=torch.bfloat16)


def _codes(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.randint(-7, 8, (rows, columns), device=device, dtype=torch.int8)


def _matmul(device: torch.device) -> tuple[dict[str, Any], str]:
    a, b = _codes(ROWS, 64, device), _codes(COLUMNS, 64, device)
    ones = torch.ones(1, 1, device=device)
    operands = {"a": a, "a_scale": ones, "a_group": 0, "b": b, "b_scale": ones, "b_group": 0}
    return {**operands, "dtype": torch.bfloat16}, "a"


CASES: dict[str, Callable[[torch.device], tuple[dict[str, Any], str]]] = {
    "hadamard": lambda device: ({"x": _normal(ROWS, device), "block": 16}, "x"),
    "quantize": lambda device: ({"x": _normal(ROWS, device), **INT8}, "x"),
    "pack4": lambda device: ({"codes": _codes(ROWS, COLUMNS, device)}, "codes"),
    "transform_quantize": lambda device: ({"x": _normal(ROWS, device).unsqueeze(1), **HADAMARD, **INT8}, "x"),
    "matmul": _matmul,
}
"""Per op its arguments, and the one whose rows are the rows of every result."""


def check(kernel: Kernel, device: torch.device) -> Verdict:
    """The verdict on one large call: 0, or infinite where its last rows are others than those of a small call."""
    args, name = CASES[kernel.op](device)
    if not kernel.supports(*args.values()):
        return Verdict(0.0, 0.0, "not supported")
    whole = kernel.call(*args.values())
    few = kernel.call(*{**args, name: args[name][-LAST:].clone()}.values())
    pairs = zip(whole, few, strict=True) if isinstance(whole, tuple) else [(whole, few)]
    same = all(torch.equal(large[-LAST:], small) for large, small in pairs)
    return Verdict(0.0 if same else math.inf, 0.0, f"the last {LAST} rows of {ROWS} × {COLUMNS}")
