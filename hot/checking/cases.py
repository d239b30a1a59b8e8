"""The arguments that kernels are tried with: per op, every layout and dtype, sizes that do not fit, values that hurt.

`cases("project", "float32", "sliced", device)` is the same list every time: a failing case is found again by its name.
A new op joins with `register_cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from hot.backends.activation_ops import FUNCTIONS
from hot.backends.ops import projected_length, scale_shape
from hot.checking import oracles
from hot.checking.oracles import levels
from hot.checking.sources import EDGES, Args, Source, quantizer
from hot.errors import HotError
from hot.registry import Registry


@dataclass(frozen=True)
class Case:
    """One call of an op: its arguments in the order of the signature, and a name to find it again by."""

    name: str
    edge: str
    args: Args

    def __str__(self) -> str:
        return f"{self.name} ({self.edge}): " + ", ".join(
            f"{name}={_short(value)}" for name, value in self.args.items()
        )


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        strides = "" if value.is_contiguous() else f", strides {tuple(value.stride())}"
        return f"<{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{strides}>"
    text = repr(tuple(value) if isinstance(value, range) else value)
    return text if len(text) <= 40 else f"{text[:37]}…)"


Generator = Callable[[Source], Iterator[tuple[str, Args]]]
generators: Registry[Generator] = Registry("case generator")
register_cases = generators.register


def cases(op: str, dtype: str, layout: str, device: torch.device) -> list[Case]:
    """Every case of an op in one dtype and layout. Raises UnknownNameError for an op that has no generator."""
    made = generators[op](Source(dtype, layout, device))
    return [Case(f"{op}/{dtype}/{layout}/{number}", edge, args) for number, (edge, args) in enumerate(made)]


def find_case(name: str, device: str | torch.device = "cpu") -> Case:
    """The case of that name, as `hot check` prints it: ``find_case("project/float32/sliced/7").args``."""
    try:
        op, dtype, layout, number = name.split("/")
        return cases(op, dtype, layout, torch.device(device))[int(number)]
    except (AttributeError, IndexError, ValueError) as error:
        raise HotError(f"no case {name!r}; names look like project/float32/sliced/7") from error


def transforms(s: Source) -> list[tuple[tuple[int, ...], Args]]:
    """Shapes and block transforms: the first ones take every edge, the rest are sizes that do not fit."""
    return [
        ((3, 64), s.transform(16)),
        ((2, 3, 41), s.transform(16, 8)),
        ((4, 137), s.transform(32, 5, signs=True)),
        ((2, 2, 197), s.transform(16, 8, prefix=1, tail="keep")),
        ((5, 341), s.transform(64, signs=True, prefix=5)),
        ((3, 2, 197), s.transform(16, 4, drawn=True, tail="keep")),
        ((20, 256), s.transform(256)),
        ((2, 2, 2, 16), s.transform(2, 1)),
        ((1, 1), s.transform(16, 8)),
        ((2, 3), s.transform(4, 2, prefix=5)),
        ((0, 64), s.transform(16)),
        ((3, 0), s.transform(16)),
    ]


@register_cases("hadamard")
def _hadamard(s: Source) -> Iterator[tuple[str, Args]]:
    sizes = [((3, 64), 16), ((2, 3, 32), 32), ((197, 8), 2), ((41, 128), 128), ((2, 2, 2, 4), 1), ((5, 512), 256)]
    for shape, block in [*sizes, ((0, 16), 16), ((3, 0), 16)]:
        yield "normal", {"x": s.values(shape), "block": block}
    for edge, (shape, block) in zip(EDGES, cycle(sizes), strict=False):
        yield edge, {"x": s.values(shape, edge), "block": block}


@register_cases("project")
def _project(s: Source) -> Iterator[tuple[str, Args]]:
    for shape, transform in transforms(s):
        yield "normal", {"x": s.values(shape), **transform}
    for edge, (shape, transform) in zip(EDGES, cycle(transforms(s)[:7]), strict=False):
        yield edge, {"x": s.values(shape, edge), **transform}


@register_cases("expand")
def _expand(s: Source) -> Iterator[tuple[str, Args]]:
    edges = ["normal"] * 12 + list(EDGES)
    for edge, ((*lead, length), transform) in zip(edges, [*transforms(s), *transforms(s)[:8]], strict=True):
        rank = len(transform["rows"]) if transform["draw"] is None else len(transform["draw"])
        kept = projected_length(length, transform["block"], rank, transform["prefix"], transform["tail"])
        yield edge, {"c": s.values((*lead, kept), edge), "length": length, **transform}


QUANTIZERS = (
    ((3, 64), quantizer("int8")),
    ((5, 41), quantizer("int4", rounding="hashed")),
    ((4, 137), quantizer("int4", "block", 32)),
    ((3, 197), quantizer("e4m3", rounding="hashed")),
    ((2, 341), quantizer("log4", "token", rounding="hashed")),
    ((41, 7), quantizer("int8", "tensor", rounding="pseudo_stochastic")),
    ((3, 197), quantizer("int4", "row", 0, "nearest", (12.1, 12.2))),
    ((2, 197), quantizer("e5m2", "block", 128)),
    ((137, 16), quantizer("int8", "row", 0, "stochastic")),
    ((7, 64), quantizer("log2", rounding="stochastic")),
    ((4, 41), quantizer("e5m2", rounding="stochastic")),
    ((3, 41), quantizer("int2", "token")),
    ((5, 137), quantizer("int4.e4m3", rounding="hashed")),
    ((41, 137), quantizer("int4", "tile", 16)),
    ((32, 64), quantizer("int8", "tile", 32, "hashed")),
    ((3, 64), quantizer("log4.e4m3", "tensor")),
    ((3, 41), quantizer("log3", "block", 16)),
    ((4, 341), quantizer("int3", "block", 100, "hashed", (6.94, 6.31))),
    ((1, 1), quantizer("int8", rounding="hashed")),
    ((1, 1), quantizer("int4", "row", 0, "nearest", (12.1, 12.2))),
    ((0, 41), quantizer("int8", "block", 16)),
    ((3, 0), quantizer("int8", "row")),
    ((0, 5), quantizer("e4m3", "tensor")),
)


@register_cases("quantize")
def _quantize(s: Source) -> Iterator[tuple[str, Args]]:
    for shape, how in QUANTIZERS:
        yield "normal", {"x": s.values(shape), **how}
    for edge in EDGES:
        for shape, how in QUANTIZERS[:7]:
            yield edge, {"x": s.values(shape, edge), **how}
    for how in (
        quantizer("int8"),
        quantizer("int4", "block", 32),
        quantizer("int4", "token"),
        quantizer("int8", rounding="hashed"),
    ):
        limit = levels(how["format"])[-1].item()
        yield "ties", {"x": s.ties((4, 137), limit, how["group"]), **how}


@register_cases("quantize_pack4")
def _quantize_pack4(s: Source) -> Iterator[tuple[str, Args]]:
    ways = (
        quantizer("int4"),
        quantizer("int4", "block", 16, "hashed"),
        quantizer("int3", "row", 0, "pseudo_stochastic"),
        quantizer("int4", "block", 64),
        quantizer("int2", "tensor"),
    )
    for edge in ("normal", *EDGES):
        for shape, how in zip(((3, 64), (5, 41), (4, 137), (7, 198), (2, 1031)), ways, strict=True):
            yield edge, {"x": s.values(shape, edge), **how}
    yield "empty", {"x": s.values((0, 8)), **ways[0]}


@register_cases("transform_quantize")
def _transform_quantize(s: Source) -> Iterator[tuple[str, Args]]:
    shapes = ((5, 1, 64), (3, 2, 41), (4, 3, 137), (2, 2, 197), (41, 1, 341), (7, 3, 16))
    plans = [(shape, transform) for shape, (_, transform) in zip(shapes, transforms(s), strict=False)]
    plans.append(((6, 2, 41), s.transform(1)))
    for (shape, transform), (_, how) in zip(cycle(plans), QUANTIZERS[:18], strict=False):
        yield "normal", {"x": s.values(shape), **transform, **how}
    for shape, group in (((48, 1, 96), 32), ((137, 1, 341), 16), ((130, 1, 272), 128)):  # a weight, by tiles
        yield "normal", {"x": s.values(shape), **s.transform(16), **quantizer("int4", "tile", group)}
    for shape in ((1, 1, 1), (0, 1, 64), (3, 0, 41), (3, 2, 0)):
        yield "normal", {"x": s.values(shape), **s.transform(16, 8), **quantizer("int8", rounding="hashed")}
    for number, edge in enumerate(EDGES):
        for shift in (0, 3):
            shape, transform = plans[(number + shift) % len(plans)]
            yield edge, {"x": s.values(shape, edge), **transform, **QUANTIZERS[(number + 2 * shift) % 7][1]}


@register_cases("grad_output_operands")
def _grad_output_operands(s: Source) -> Iterator[tuple[str, Args]]:
    hot = (
        s.transform(16),
        quantizer("int4", rounding="hashed"),
        s.transform(16, 8),
        quantizer("int8", rounding="hashed"),
    )
    ragged = (
        s.transform(32, signs=True),
        quantizer("int4"),
        s.transform(16, 8, prefix=1, tail="keep"),
        quantizer("int8"),
    )
    blocks = (
        s.transform(16),
        quantizer("int8", "block", 32),
        s.transform(8, 4, drawn=True),
        quantizer("int4", "block", 16),
    )
    float8 = s.transform(16), quantizer("e4m3", "tensor"), s.transform(1), quantizer("e5m2", rounding="hashed")
    plans = (hot, ragged, blocks, float8)
    shapes = ((2, 64, 48), (2, 197, 41), (1, 137, 20), (3, 41, 17))

    def call(shape: tuple[int, ...], edge: str, plan: tuple[Args, Args, Args, Args], bias: bool) -> tuple[str, Args]:
        rows = {f"i_{name}": plan[0][name] for name in ("block", "rows", "signs")}
        quantize_rows = {f"i_{name}": value for name, value in plan[1].items()}
        tokens = {f"w_{name}": value for name, value in {**plan[2], **plan[3]}.items()}
        return edge, {"g": s.values(shape, edge), **rows, **quantize_rows, **tokens, "bias": bias}

    for shape, plan in zip(shapes, plans, strict=True):
        yield call(shape, "normal", plan, True)
    for shape in ((1, 1, 1), (2, 0, 16), (0, 5, 16)):
        yield call(shape, "normal", hot, True)
    for number, edge in enumerate(EDGES):
        yield call(shapes[number % 4], edge, plans[number % 4], number % 2 == 0)


def _coded(
    s: Source, rows: int, k: int, format: str, granularity: str, group: int, edge: str = "normal"
) -> tuple[Tensor, Tensor, int]:
    """Codes, scale and K-block of an operand."""
    scale = s.scales(scale_shape(rows, k, granularity, group))
    if edge == "unit":
        scale.fill_(1.0)
    if edge == "nan" and scale.numel() and k:
        scale[0, 0] = float("nan")
    return s.codes((rows, k), format, extreme=edge == "unit"), scale, group


@register_cases("dequantize")
def _dequantize(s: Source) -> Iterator[tuple[str, Args]]:
    for edge in ("normal", "nan"):
        for (rows, k), how in QUANTIZERS:
            codes, scale, group = _coded(s, rows, k, how["format"], how["granularity"], how["group"], edge)
            yield edge, {"codes": codes, "scale": scale, "group": group, "dtype": s.dtype}


@register_cases("matmul")
def _matmul(s: Source) -> Iterator[tuple[str, Args]]:
    row, tensor, token = ("row", 0), ("tensor", 0), ("token", 0)
    plans: list[tuple[tuple[int, int, int], str, str, tuple[str, int], tuple[str, int]]] = [
        ((16, 16, 64), "int8", "int8", row, row),
        ((17, 33, 41), "int4", "int8", tensor, row),
        ((3, 5, 197), "int8", "int8", row, tensor),
        ((41, 7, 341), "log4", "int4", row, row),
        ((20, 24, 137), "int8", "int8", ("block", 32), row),
        ((4, 9, 137), "int4", "int4", ("block", 16), ("block", 64)),
        ((20, 41, 137), "int4", "int8", ("block", 16), ("tile", 16)),
        ((140, 256, 384), "int4.e4m3", "int4.e4m3", ("block", 128), ("tile", 128)),
        ((5, 6, 41), "int8", "int8", token, row),
        ((17, 16, 64), "e4m3", "e4m3", row, row),
        ((3, 4, 197), "e5m2", "e4m3", row, ("block", 128)),
        ((17, 33, 341), "int4.e4m3", "int4.e4m3", row, row),
        ((9, 16, 128), "int4.e4m3", "int5.e4m3", row, tensor),
        ((1, 1, 1), "int8", "int8", row, row),
        ((0, 5, 16), "int8", "int8", row, row),
        ((5, 0, 16), "int8", "int8", row, row),
        ((5, 3, 0), "int8", "int8", row, row),
    ]
    for edge in ("normal", "unit", "nan"):
        for (m, n, k), a_format, b_format, a_how, b_how in plans:
            a, a_scale, a_group = _coded(s, m, k, a_format, *a_how, edge)
            b, b_scale, b_group = _coded(s, n, k, b_format, *b_how)
            if edge == "unit":
                b_scale.fill_(1.0)
            operands = {"a": a, "a_scale": a_scale, "a_group": a_group, "b": b, "b_scale": b_scale, "b_group": b_group}
            yield edge, {**operands, "dtype": s.dtype}


@register_cases("pack4")
def _pack4(s: Source) -> Iterator[tuple[str, Args]]:
    for shape in ((4, 64), (3, 41), (137, 5), (2, 197), (1, 1), (0, 6), (3, 0)):
        yield "normal", {"codes": s.codes(shape, "int4")}
        yield (
            "all sixteen",
            {"codes": s.place(torch.arange(shape[0] * shape[1], device="cpu").view(shape).to(torch.int8) % 16 - 8)},
        )


@register_cases("unpack4")
def _unpack4(s: Source) -> Iterator[tuple[str, Args]]:
    for rows, length in ((4, 64), (3, 41), (137, 5), (20, 197), (1, 1), (0, 6), (3, 0)):
        columns = -(-length // 2)
        packed = s.place((torch.arange(rows * columns, device="cpu") * 37 % 256).view(rows, columns).to(torch.uint8))
        yield "all bytes", {"packed": packed, "length": length}


def _kept(s: Source, rows: int, k: int, edge: str, packed: bool, group: int) -> Args:
    """An input (rows, k) that is kept as codes."""
    how = ("int4" if packed else "int8"), ("block" if group else "row"), group
    codes, scale, _ = _coded(s, rows, k, *how, edge)
    if packed:
        codes = s.place(oracles.pack4(codes).to(device=s.device, dtype=torch.uint8))
    return {"codes": codes, "scale": scale, "group": group}


KEPT = (((3, 64), False, 0), ((5, 41), True, 0), ((4, 137), False, 32), ((7, 198), True, 16), ((2, 1031), True, 64))
"""Shapes, 4 bits a code or 8, K-block of the scale."""


@register_cases("activation")
def _activation(s: Source) -> Iterator[tuple[str, Args]]:
    for edge in ("normal", "unit", "nan"):
        for (shape, packed, group), function in product(KEPT, FUNCTIONS):
            how = {"length": shape[1], "function": function, "dtype": s.dtype}
            yield edge, {**_kept(s, *shape, edge, packed, group), **how}
    yield "empty", {**_kept(s, 0, 8, "normal", False, 0), "length": 8, "function": "silu", "dtype": s.dtype}


@register_cases("activation_backward")
def _activation_backward(s: Source) -> Iterator[tuple[str, Args]]:
    for edge in ("normal", "unit", "nan"):
        for (shape, packed, group), function in product(KEPT, FUNCTIONS):
            kept = _kept(s, *shape, edge, packed, group)
            yield edge, {"g": s.values(shape), **kept, "function": function}
    for number, edge in enumerate(EDGES):
        shape, packed, group = KEPT[number % len(KEPT)]
        yield edge, {"g": s.values(shape, edge), **_kept(s, *shape, "normal", packed, group), "function": "gelu"}
    yield "empty", {"g": s.values((0, 8)), **_kept(s, 0, 8, "normal", False, 0), "function": "silu"}


@register_cases("norm_backward")
def _norm_backward(s: Source) -> Iterator[tuple[str, Args]]:
    for edge in ("normal", "nan"):
        for number, ((shape, packed, group), centered) in enumerate(product(KEPT, (True, False))):
            kept = _kept(s, *shape, edge, packed, group)
            weight = s.values(shape[1:]) if number % 3 else None
            how = {"weight": weight, "eps": 1e-5, "centered": centered, "dtype": s.dtype}
            yield edge, {"g": s.values(shape), **kept, **how}
    for number, edge in enumerate(EDGES):
        shape, packed, group = KEPT[number % len(KEPT)]
        how = {"weight": s.values(shape[1:]), "eps": 1e-6, "centered": number % 2 == 0, "dtype": s.dtype}
        yield edge, {"g": s.values(shape, edge), **_kept(s, *shape, "normal", packed, group), **how}
    how = {"weight": None, "eps": 1e-6, "centered": True, "dtype": s.dtype}
    yield "empty", {"g": s.values((0, 8)), **_kept(s, 0, 8, "normal", False, 0), **how}


@register_cases("batch_norm_backward")
def _batch_norm_backward(s: Source) -> Iterator[tuple[str, Args]]:
    def call(edge: str, number: int, kept_edge: str) -> tuple[str, Args]:
        (rows, k), packed, group = KEPT[number % len(KEPT)]
        rows *= 5
        statistics = {"mean": s.columns(k), "factor": s.columns(k).abs() + 0.1}
        how = {"weight": s.values((k,)) if number % 3 else None, **statistics, "dtype": s.dtype}
        return edge, {"g": s.values((rows, k), edge), **_kept(s, rows, k, kept_edge, packed, group), **how}

    for number in range(2 * len(KEPT)):
        yield call("normal", number, "normal")
        yield call("normal", number, "nan")
    for number, edge in enumerate(edge for edge in EDGES if edge != "huge"):  # of which float32 has no sums
        yield call(edge, number, "normal")


@register_cases("batch_norm")
def _batch_norm(s: Source) -> Iterator[tuple[str, Args]]:
    for edge in ("normal", "unit", "nan"):
        for number, (((rows, k), packed, group), rectify) in enumerate(product(KEPT, (False, True))):
            statistics = {"mean": s.columns(k), "factor": s.columns(k).abs() + 0.1}
            own = {"weight": s.values((k,)) if number % 3 else None, "bias": s.values((k,)) if number % 4 else None}
            how = {**statistics, **own, "rectify": rectify, "dtype": s.dtype}
            yield edge, {**_kept(s, rows, k, edge, packed, group), **how}


@register_cases("pack1")
def _pack1(s: Source) -> Iterator[tuple[str, Args]]:
    for edge in ("normal", *EDGES):
        for shape in ((3, 64), (5, 41), (1, 1), (137, 197)):
            yield edge, {"x": s.values(shape, edge)}
    yield "empty", {"x": s.values((0, 8))}


@register_cases("pass1")
def _pass1(s: Source) -> Iterator[tuple[str, Args]]:
    for number, edge in enumerate(("normal", *EDGES)):
        for shape in ((3, 64), (5, 41), (1, 1), (137, 197)):
            bits = (torch.arange(-(-shape[0] * shape[1] // 8), device="cpu") * 37 % 256).to(torch.uint8).to(s.device)
            yield edge, {"g": s.values(shape, edge), "bits": bits, "factor": (1.0, 1 / 0.7)[number % 2]}
