"""The calls that `hot bench kernels` times: what the preset `hot` asks of every op, and block scales beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from hot.backends import OPS
from hot.backends.ops import bits_of, code_dtype, in_float8, scale_shape
from hot.policies.quantizers import Int, Rounding
from hot.policies.transforms import Hadamard, HadamardLowRank, NoTransform

Args = dict[str, Any]
Case = tuple[str, Callable[[], tuple[Any, ...]]]
"""What a call stands for in a step, and what makes its arguments, in the order of the op's signature."""

FULL, LOW = Hadamard().spec, HadamardLowRank().spec
BLOCK = Int(bits=8, granularity="block", block=128).spec
BLOCK4 = Int(bits=4, granularity="block", block=64, rounding="hashed").spec


def integer(bits: int, rounding: Rounding = "hashed") -> Args:
    """The arguments of a quantizer with a scale a row."""
    return Int(bits=bits, granularity="row", rounding=rounding).spec


def as_float8(how: Args) -> Args:
    """The same integer codes, held as float8."""
    return {**how, "format": in_float8(how["format"])}


class Inputs:
    """Random tensors of one size on a device: a gradient (tokens, width) of so many megabytes, and what is made of it."""

    def __init__(self, megabytes: float, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.width = 4096 if device.type == "cuda" else 256
        self.tokens = max(int(megabytes * 2**20) // (self.width * self.dtype.itemsize) // 16 * 16, 16)

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers in the dtype of the run, unless another is named."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def grad(self) -> Tensor:
        """(tokens, width)."""
        return self.values(self.tokens, self.width)

    def images(self) -> Tensor:
        """About as many values as (samples, 197, width)."""
        return self.values(max(self.tokens // 197, 1), 197, self.width)

    def codes(self, rows: int, k: int, bits: int) -> Tensor:
        limit = 2 ** (bits - 1) - 1
        return torch.randint(-limit, limit + 1, (rows, k), device=self.device, dtype=torch.int8)

    def operand(self, name: str, rows: int, k: int, how: Args) -> Args:
        """Codes, scale and group of one operand of a product."""
        scale = torch.rand(scale_shape(rows, k, how["granularity"], how["group"]), device=self.device) + 0.01
        codes = self.codes(rows, k, bits_of(how["format"])).to(code_dtype(how["format"]))
        return {name: codes, f"{name}_scale": scale, f"{name}_group": how["group"]}


def _product(s: Inputs, m: int, n: int, k: int, how: Args) -> Args:
    return {**s.operand("a", m, k, how), **s.operand("b", n, k, how), "dtype": s.dtype}


def _both(g: Tensor, rows: Args, tokens: Args) -> Args:
    """The arguments of `grad_output_operands`, with quantizers for grad_input and grad_weight."""
    i_spec = {name: value for name, value in FULL.items() if name not in ("prefix", "tail")} | rows
    w_spec = LOW | tokens
    prefixed = {f"i_{name}": value for name, value in i_spec.items()} | {f"w_{name}": v for name, v in w_spec.items()}
    return {"g": g, **prefixed, "w_draw": None, "bias": True}


def _dequantize(s: Inputs, how: Args) -> Args:
    codes, scale, group = s.operand("x", s.tokens * s.dtype.itemsize, s.width, how).values()
    return {"codes": codes, "scale": scale, "group": group, "dtype": s.dtype}


def cases(op: str, s: Inputs) -> list[Case]:
    """What the preset `hot` calls an op with, and block scales beside it; none for an op that is not known here."""
    t, w = s.tokens, s.width
    draw: Args = {"draw": None}
    float32 = torch.float32
    known: dict[str, list[tuple[str, Callable[[], Args]]]] = {
        "hadamard": [("outputs", lambda: {"x": s.grad(), "block": 16})],
        "project": [
            ("outputs", lambda: {"x": s.grad(), **FULL, **draw}),
            ("tokens, 8 of 16", lambda: {"x": s.grad().T, **LOW, **draw}),
        ],
        "expand": [
            ("tokens, 8 of 16", lambda: {"c": s.values(w, t // 2, dtype=float32), "length": t, **LOW, **draw})
        ],
        "quantize": [
            ("int4 row hashed", lambda: {"x": s.values(t // 2, w, dtype=float32), **integer(4)}),
            ("int8 row nearest", lambda: {"x": s.values(t // 2, w, dtype=float32), **integer(8, "nearest")}),
            ("int8 block 128", lambda: {"x": s.values(t // 2, w, dtype=float32), **BLOCK}),
        ],
        "dequantize": [
            ("int8 row", lambda: _dequantize(s, integer(8))),
            ("int8 block 128", lambda: _dequantize(s, BLOCK)),
        ],
        "quantize_pack4": [("int4 block 64 hashed", lambda: {"x": s.grad(), **BLOCK4})],
        "activation": [
            ("GELU, int4 block 64", lambda: _kept(s, BLOCK4, function="gelu", dtype=s.dtype)),
            ("SiLU, int8 row", lambda: _kept(s, integer(8), function="silu", dtype=s.dtype)),
        ],
        "activation_backward": [
            ("GELU, int4 block 64", lambda: {"g": s.grad(), **_kept(s, BLOCK4, function="gelu")}),
            ("SiLU, int8 row", lambda: {"g": s.grad(), **_kept(s, integer(8), function="silu")}),
        ],
        "norm_backward": [
            ("layer norm, int4 block 64", lambda: {"g": s.grad(), **_kept(s, BLOCK4, **_norm(s, True))}),
            ("RMS norm, int8 row", lambda: {"g": s.grad(), **_kept(s, integer(8), **_norm(s, False))}),
        ],
        "batch_norm_backward": [
            ("int4 block 64", lambda: {"g": s.grad(), **_kept(s, BLOCK4, **_statistics(s), weight=None, dtype=s.dtype)})
        ],
        "batch_norm": [
            (
                "with a ReLU, int4 block 64",
                lambda: _kept(s, BLOCK4, **_statistics(s), weight=None, bias=None, rectify=True, dtype=s.dtype),
            )
        ],
        "pack1": [("ReLU", lambda: {"x": s.grad()})],
        "pass1": [("ReLU", lambda: {"g": s.grad(), "bits": _bits(s), "factor": 1.0})],
        "pack4": [("int4", lambda: {"codes": s.codes(t * s.dtype.itemsize, w, 4)})],
        "unpack4": [("int4", lambda: {"packed": s.codes(t * s.dtype.itemsize, w, 8).view(torch.uint8), "length": 2 * w})],
        "matmul": [
            ("grad_input, int4 row", lambda: _product(s, t, w, w, integer(4))),
            ("grad_input, int4 in float8 row", lambda: _product(s, t, w, w, as_float8(integer(4)))),
            ("grad_weight, int8 row", lambda: _product(s, w, w, t // 2, integer(8))),
            ("grad_weight, int8 block 128", lambda: _product(s, w, w, t // 2, BLOCK)),
        ],
        "transform_quantize": [
            ("grad_output for grad_input, int4", lambda: {"x": s.grad().unsqueeze(1), **FULL, **draw, **integer(4)}),
            ("grad_output, int4 in float8", lambda: {"x": s.grad().unsqueeze(1), **FULL, **draw, **as_float8(integer(4))}),
            ("grad_output for grad_weight, int8", lambda: {"x": s.grad().T.unsqueeze(1), **LOW, **draw, **integer(8)}),
            ("input, int8, 197 tokens", lambda: {"x": s.images().permute(2, 0, 1), **LOW, **draw, **integer(8, "nearest")}),
            ("weight, int4", lambda: {"x": s.grad().T.unsqueeze(1), **FULL, **draw, **integer(4, "nearest")}),
            ("grad_output, int8 block 128", lambda: {"x": s.grad().unsqueeze(1), **FULL, **draw, **BLOCK}),
            ("no transform, int8", lambda: {"x": s.grad().unsqueeze(1), **NoTransform().spec, **draw, **integer(8)}),
        ],
        "grad_output_operands": [
            ("hot", lambda: _both(s.grad().unsqueeze(0), integer(4), integer(8))),
            ("hot, int4 in float8", lambda: _both(s.grad().unsqueeze(0), as_float8(integer(4)), integer(8))),
            ("hot, 197 tokens", lambda: _both(s.images(), integer(4), integer(8))),
            ("block 128", lambda: _both(s.grad().unsqueeze(0), BLOCK, BLOCK)),
        ],
    }  # fmt: skip
    return [(name, partial(_in_order, op, make)) for name, make in known.get(op, [])]


def _kept(s: Inputs, how: Args, **more: Any) -> Args:
    """An activation's input as large as the gradient, which is kept as codes; those of 4 bits two a byte."""
    bits = bits_of(how["format"])
    scale = torch.rand(scale_shape(s.tokens, s.width, how["granularity"], how["group"]), device=s.device) + 0.01
    codes = s.codes(s.tokens, s.width, bits) if bits > 4 else s.codes(s.tokens, s.width // 2, 8).view(torch.uint8)
    return {"codes": codes, "scale": scale, "group": how["group"], "length": s.width, **more}


def _norm(s: Inputs, centered: bool) -> Args:
    weight = s.values(s.width, dtype=torch.float32)
    return {"weight": weight, "eps": 1e-6, "centered": centered, "dtype": torch.float32}


def _statistics(s: Inputs) -> Args:
    mean, factor = s.values(s.width, dtype=torch.float32), s.values(s.width, dtype=torch.float32).abs() + 0.1
    return {"mean": mean, "factor": factor}


def _bits(s: Inputs) -> Tensor:
    return torch.randint(0, 256, (s.tokens * s.width // 8,), device=s.device, dtype=torch.uint8)


def _in_order(op: str, make: Callable[[], Args]) -> tuple[Any, ...]:
    args = make()
    return tuple(args[name] for name in signature(OPS[op].fake).parameters)
