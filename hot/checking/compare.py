"""How far a kernel's result is from the meaning of its op, and how far it may be.

Errors are in units that make the limits constants:

    transforms  eps · Σ|x|·|h| of the element; the reference stays under 2 + √block, others under twice its own error
    codes       codes that are not what the op says: none may be. A quantizer alone sees what the oracle sees, bit for
                bit; behind a transform, a code must be a legal rounding of the float64 value, give or take its error
    noise       standard deviations by which the sum of all rounding errors is off zero: 6
    products    eps of the result; integer products with unit scales must be exact; see FLOAT8_SUMS

A result must be finite exactly where the oracle is, in every op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hot.backends.ops import compute_dtype
from hot.checking import oracles
from hot.checking.oracles import TINY, exact

EPS32 = torch.finfo(torch.float32).eps
SIGMAS = 6.0
UNBIASED = ("hashed", "stochastic")
FLOAT8_SUMS = 2.0**12
"""So much coarser than float32 may the sums of a product of float8 values be: tensor cores keep about 13 bits of a partial sum
on Hopper (DeepSeek-V3 Technical Report, 2024, section 3.3). Whole numbers of few bits stay exact."""
Verdicts = Iterator["Verdict"]


@dataclass(frozen=True)
class Verdict:
    """One measured error beside its limit; `what` says of what, and where it is worst."""

    error: float
    limit: float
    what: str

    @property
    def ok(self) -> bool:
        return self.error <= self.limit

    @property
    def ratio(self) -> float:
        """Error over limit: above 1 is too much. NaN counts as infinitely far."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.limit if self.limit else (math.inf if self.error else 0.0)


def measure(what: str, got: Tensor, want: Tensor, unit: Tensor | float, limit: float) -> Verdict:
    """The largest |got − want| in units; infinite where shapes differ, or where only one of the two is finite."""
    if got.shape != want.shape:
        return Verdict(math.inf, limit, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    got, want = exact(got), exact(want)
    error = ((got - want).abs() / unit).where(want.isfinite(), 0.0)
    error = torch.where(got.isfinite() == want.isfinite(), error, math.inf)
    error = torch.where(got == want, 0.0, error)  # 0 / 0 otherwise, where the unit is zero
    return _worst(what, error, limit, got, want)


def _worst(what: str, error: Tensor, limit: float, got: Tensor, want: Tensor) -> Verdict:
    if not error.numel():
        return Verdict(0.0, limit, what)
    flat = int(error.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
    return Verdict(
        error.flatten()[flat].item(), limit, f"{what} at {index}: {got[index]:.9g}, expected {want[index]:.9g}"
    )


def transform_error(op: str, args: dict[str, Any], got: Tensor) -> tuple[float, Verdict]:
    """The error of `hadamard`, `project` or `expand`, and the verdict by the reference's own limit."""
    if op == "hadamard":
        args = {**args, "rows": range(args["block"]), "signs": (), "prefix": 0, "tail": "pad", "draw": None}
    oracle: Callable[..., Tensor] = oracles.expand if op == "expand" else oracles.project
    x = next(iter(args.values()))
    unit = _rounding_unit(oracle(**args, absolute=True), x)
    verdict = measure(op, got, oracle(**args), unit, reference_limit(args["block"]))
    return verdict.error, verdict


def _rounding_unit(size: Tensor, x: Tensor) -> Tensor:
    """eps times the size of the terms that were summed; denormals may be flushed."""
    return torch.finfo(compute_dtype(x)).eps * size.nan_to_num(posinf=0.0) + TINY


def reference_limit(block: int) -> float:
    """Roundings of a sum of `block` terms, and of the gain; the oracle's own where both are float64."""
    return 2 + math.sqrt(block)


def quantize(args: dict[str, Any], got: Sequence[Tensor]) -> Verdicts:
    """Codes and scale of `quantize`, which sees the same values as the oracle."""
    codes, scale = got
    quantizer = {name: args[name] for name in ("format", "granularity", "group", "rounding")}
    x = args["x"].detach().cpu()
    x = x.to(compute_dtype(x))
    top = oracles.per_group(x, args["granularity"], args["group"], args["clip"])
    want = oracles.scale_of(top, args["format"])
    if args["clip"]:
        yield measure("scale", scale, want, _clip_unit(x.double(), args) + EPS32 * want, 8.0)
    else:
        yield measure("scale", scale, want.float(), TINY, 0.0)
    if scale.shape != want.shape:
        return
    if args["rounding"] != "stochastic":
        known = oracles.spread(scale.cpu().isfinite(), x.shape, args["group"])
        expected = oracles.codes_of(x, scale.cpu(), **quantizer).where(known, 0.0)
        if args["rounding"] == "hashed" and codes.shape == x.shape:  # what bits a NaN has is nobody's promise
            codes = torch.where(known & _shares_with_nan(x), expected, exact(codes))
        yield _codes_equal(codes, expected, known, args["format"])
    else:
        yield from _legal_codes(codes, scale, x.double(), torch.zeros(x.shape, dtype=torch.float64), args)


def quantize_pack4(args: dict[str, Any], got: Sequence[Tensor]) -> Verdicts:
    """The codes in the bytes, as those of `quantize`."""
    length = args["x"].shape[1]
    if length % 2 and got[0].numel():  # nothing is in the last half
        yield measure("spare half", got[0][:, -1] >> 4, torch.zeros(got[0].shape[0]), 1.0, 0.0)
    yield from quantize(args, (oracles.unpack4(got[0], length).to(torch.int8), got[1]))


def _shares_with_nan(x: Tensor) -> Tensor:
    """Where one of the two neighbours along K that share a hash is NaN."""
    pairs = torch.nn.functional.pad(x.isnan(), (0, x.shape[1] % 2)).unflatten(1, (-1, 2)).any(2, keepdim=True)
    return pairs.expand(-1, -1, 2).flatten(1)[:, : x.shape[1]]


def _codes_equal(codes: Tensor, want: Tensor, known: Tensor, format: str) -> Verdict:
    """Codes as expected, zeros where the group is not finite (float8 codes are free there)."""
    got = exact(codes)
    if format in oracles.FLOAT8_LAYOUT and got.shape == want.shape:
        got = got.where(known, 0.0)
    return measure("codes", got, want, 1.0, 0.0)


def _clip_unit(x: Tensor, args: dict[str, Any]) -> Tensor:
    """The unit of a clipped scale, per group: an eps of its two terms, which cancel in part."""
    largest = oracles.per_group(x, args["granularity"], args["group"], ())
    return EPS32 * sum(args["clip"]) * largest.nan_to_num(posinf=0.0) / oracles.levels(args["format"])[-1]


def transform_quantize(args: dict[str, Any], got: Sequence[Tensor]) -> Verdicts:
    """Codes and scale behind a transform: legal roundings of the float64 coefficients."""
    if args["block"] == 1:
        yield from quantize({**args, "x": args["x"].reshape(args["x"].shape[0], -1)}, got)
        return
    codes, scale = got
    transform = {name: args[name] for name in ("x", "block", "rows", "signs", "prefix", "tail", "draw")}
    y = oracles.project(**transform).flatten(1)
    unit = _rounding_unit(oracles.project(**transform, absolute=True).flatten(1), args["x"])
    slack = 2 * reference_limit(args["block"]) * unit
    groups = args["granularity"], args["group"]
    want = oracles.scale_of(oracles.per_group(y, *groups, args["clip"]), args["format"])
    spill = oracles.per_group(slack, *groups, ()) * (sum(args["clip"]) or 1.0) / oracles.levels(args["format"])[-1]
    allowed = spill + 4 * EPS32 * want + (8 * _clip_unit(y, args) if args["clip"] else 0.0)
    yield measure("scale", scale, want, allowed, 1.0)
    if scale.shape == want.shape and codes.shape == y.shape:
        yield from _legal_codes(codes, scale, y, slack, args)


def _legal_codes(codes: Tensor, scale: Tensor, y: Tensor, slack: Tensor, args: dict[str, Any]) -> Verdicts:
    """Every code is a rounding of y ± slack by its scale, and noise is unbiased over all of them."""
    format, rounding = args["format"], args["rounding"]
    own = oracles.spread(exact(scale), y.shape, args["group"]).expand(y.shape)
    known = own.isfinite()
    v = torch.where(known, y / own, 0.0)
    wide = torch.where(known, slack / own, 0.0) + 4 * torch.finfo(compute_dtype(args["x"])).eps * v.abs()
    if rounding == "nearest":
        least, most = oracles.nearest(v - wide, format), oracles.nearest(v + wide, format)
    else:
        least, most = oracles.between(v - wide, format)[0], oracles.between(v + wide, format)[1]
    got = exact(codes)
    legal = ((got >= least) & (got <= most)) | ~known
    if format not in oracles.FLOAT8_LAYOUT:
        legal &= known | (got == 0)
    yield _worst("illegal codes", (~legal).double(), 0.0, got, v)
    if rounding in UNBIASED and bool(legal.all()):
        limit = oracles.levels(format)[-1]
        v = v.clamp(-limit, limit)
        low, high = oracles.between(v, format)
        gap = (high - low).where(high > low, 1.0)
        share = (v - low) / gap
        off = torch.where(known, (got - v) / gap, 0.0).sum().abs() - torch.where(known, wide / gap, 0.0).sum()
        deviation = (
            share * (1 - share)
        ).sum().sqrt() + 1.0  # one more: a handful of elements is no normal distribution
        yield Verdict(max(off.item(), 0.0) / deviation.item(), SIGMAS, "bias of the noise, in standard deviations")


def grad_output_operands(args: dict[str, Any], got: Sequence[Tensor]) -> Verdicts:
    """Both operands as in `transform_quantize`, and the bias gradient."""
    g = args["g"]
    whole = {"i_prefix": 0, "i_tail": "pad", "i_draw": None, **args}
    paths = (("grad_input", g.reshape(-1, 1, g.shape[2]), got[:2]), ("grad_weight", g.permute(2, 0, 1), got[2:4]))
    for name, x, operand in paths:
        letter = name[len("grad_")]
        own = {key[2:]: value for key, value in whole.items() if key.startswith(f"{letter}_")}
        for verdict in transform_quantize({"x": x, **own}, operand):
            yield Verdict(verdict.error, verdict.limit, f"{name} {verdict.what}")
    values = exact(g) if args["bias"] else exact(g).new_zeros(0, 0, 0)
    total = values.sum((0, 1))
    terms = math.sqrt(max(g.shape[0] * g.shape[1], 1))
    unit = terms * torch.finfo(compute_dtype(g)).eps * values.abs().sum((0, 1)) + torch.finfo(g.dtype).eps * total.abs()
    yield measure("grad_bias", got[4], _as_stored(total, g.dtype), unit.nan_to_num(posinf=0.0) + TINY, 2.0)


def _as_stored(want: Tensor, dtype: torch.dtype) -> Tensor:
    """What float64 becomes in a narrower dtype: overflow is infinite there."""
    return want.to(dtype).double()


def dequantize(args: dict[str, Any], got: Tensor) -> Verdicts:
    want = oracles.dequantize(args["codes"], args["scale"], args["group"])
    yield measure("dequantize", got, _as_stored(want, args["dtype"]), _result_unit(want, args["dtype"]), 1.0)


def _result_unit(want: Tensor, dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    return info.eps * want.abs().nan_to_num(posinf=0.0) + max(info.eps * info.smallest_normal, TINY)


def matmul(args: dict[str, Any], got: Tensor) -> Verdicts:
    a, a_scale, b, b_scale, dtype = (args[name] for name in ("a", "a_scale", "b", "b_scale", "dtype"))
    left, right = oracles.dequantize(a, a_scale, args["a_group"]), oracles.dequantize(b, b_scale, args["b_group"])
    want = left @ right.T
    wide = dtype in (torch.float32, torch.float64)
    stored = _result_unit(want, dtype)
    factors_out = args["a_group"] == args["b_group"] == 0 and a_scale.shape[1] == b_scale.shape[1] == 1
    if factors_out and a.dtype == b.dtype and _whole(a) and _whole(b):
        want = (exact(a).long() @ exact(b).long().T).double() * exact(a_scale) * exact(b_scale).T
        terms = 4 * want.abs()
        if bool((a_scale == 1).all() and (b_scale == 1).all()):
            terms, stored = torch.zeros_like(want), torch.zeros_like(want) if wide else stored
    else:
        terms = 2 * math.sqrt(a.shape[1]) * (left.abs() @ right.abs().T)
        if factors_out and a.dtype == b.dtype == torch.float8_e4m3fn:
            terms *= FLOAT8_SUMS
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    yield measure("product", got, _as_stored(want, dtype), eps * terms.nan_to_num(posinf=0.0) + stored, 1.0)


def _whole(codes: Tensor) -> bool:
    """Whether all codes are whole numbers of few bits, whatever holds them."""
    values = exact(codes)
    return codes.dtype == torch.int8 or bool((values == values.round()).all() and (values.abs() <= 64).all())


def pack4(args: dict[str, Any], got: Tensor) -> Verdicts:
    yield measure("bytes", got, oracles.pack4(args["codes"]), 1.0, 0.0)


def unpack4(args: dict[str, Any], got: Tensor) -> Verdicts:
    yield measure("codes", got, oracles.unpack4(**args), 1.0, 0.0)


def activation(args: dict[str, Any], got: Tensor) -> Verdicts:
    codes, scale, group, length, function, dtype = args.values()
    x = oracles.kept(codes, scale, group, length)
    want = oracles.activation(x, function)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    unit = ACTIVATION * torch.finfo(wide).eps * x.abs().nan_to_num(posinf=0.0) + _result_unit(want, dtype)
    yield measure("activation", got, _as_stored(want, dtype), unit, 1.0)


def activation_backward(args: dict[str, Any], got: Tensor) -> Verdicts:
    """What autograd makes of the activation in float64."""
    g, codes, scale, group, function = args.values()
    x, grad = oracles.kept(codes, scale, group, g.shape[1]).requires_grad_(), exact(g)
    with torch.enable_grad():
        (want,) = torch.autograd.grad(oracles.activation(x, function), x, grad)
    unit = ACTIVATION * torch.finfo(compute_dtype(g)).eps * grad.abs() * (1 + x.detach().abs())
    yield measure(
        "gradient", got, _as_stored(want, g.dtype), unit.nan_to_num(posinf=0.0) + _result_unit(want, g.dtype), 1.0
    )


ACTIVATION = 8.0
"""How many eps the derivative of an activation may be off, which is of the size of one."""


def norm_backward(args: dict[str, Any], got: Sequence[Tensor]) -> Verdicts:
    """What autograd makes of the norm in float64. Errors of float32 go by the size of the row's gradient over its deviation."""
    g, codes, scale, group, weight, eps, centered, _ = args.values()
    x, grad = oracles.kept(codes, scale, group, g.shape[1]).requires_grad_(), exact(g)
    factor = torch.ones(g.shape[1], dtype=torch.float64) if weight is None else exact(weight)
    parameters = x, factor.requires_grad_(), torch.zeros_like(factor).requires_grad_()
    with torch.enable_grad():
        wants = torch.autograd.grad(oracles.norm(*parameters, eps, centered), parameters, grad)
    x, factor = x.detach(), factor.detach()
    spread = (x - x.mean(1, keepdim=True) if centered else x).square().mean(1, keepdim=True)
    inner, normed = (grad * factor).abs(), (x.abs() / (spread + eps).sqrt())
    terms = math.sqrt(max(g.shape[1], 1)) * 8 * torch.finfo(compute_dtype(g)).eps
    row = (
        (inner + inner.mean(1, keepdim=True))
        * (1 + normed) ** 2
        * (1 + normed.amax(1, keepdim=True))
        / (spread + eps).sqrt()
    )
    units = row, (grad.abs() * (1 + normed) ** 2).sum(0), grad.abs().sum(0)
    for what, each, want, unit in zip(("gradient", "of weight", "of bias"), got, wants, units, strict=True):
        stored = _result_unit(want, each.dtype)
        yield measure(what, each, _as_stored(want, each.dtype), (terms * unit).nan_to_num(posinf=0.0) + stored, 1.0)


def batch_norm_backward(args: dict[str, Any], got: Sequence[Tensor]) -> Verdicts:
    """(g − mean g − n · mean g·n) · factor · weight with n = (x − mean) · factor, centered, in float64."""
    g, codes, scale, group, weight, mean, factor, _ = args.values()
    x, grad, times = oracles.kept(codes, scale, group, g.shape[1]), exact(g), exact(factor)
    normed, own = (x - exact(mean)) * times, torch.ones_like(times) if weight is None else exact(weight)
    normed = normed - normed.mean(0)
    of_weight, of_bias = (grad * normed).sum(0), grad.sum(0)
    want = own * times * (grad - (of_bias + normed * of_weight) / len(grad))
    eps = math.sqrt(len(grad)) * 16 * torch.finfo(compute_dtype(g)).eps
    large = 1 + (x.abs() + exact(mean).abs()) * times
    row = (own * times).abs() * (grad.abs() + large * (grad.abs() * large).sum(0) / len(grad))
    for what, each, wanted, unit in (
        ("gradient", got[0], want, row),
        ("of weight", got[1], of_weight, (grad.abs() * large).sum(0)),
        ("of bias", got[2], of_bias, grad.abs().sum(0)),
    ):
        limit = (eps * unit).nan_to_num(posinf=0.0) + _result_unit(wanted, each.dtype)
        yield measure(what, each, _as_stored(wanted, each.dtype), limit, 1.0)


def batch_norm(args: dict[str, Any], got: Tensor) -> Verdicts:
    codes, scale, group, mean, factor, weight, bias, rectify, dtype = args.values()
    times = exact(factor) if weight is None else exact(factor) * exact(weight)
    shift = torch.zeros_like(times) if bias is None else exact(bias)
    x = oracles.kept(codes, scale, group, len(mean))
    want = (x - exact(mean)) * times + shift
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    large = (x.abs() + exact(mean).abs()) * times.abs() + shift.abs()
    unit = 8 * torch.finfo(wide).eps * large.nan_to_num(posinf=0.0)
    want = torch.where(want <= 0, 0.0, want) if rectify else want
    yield measure("values", got, _as_stored(want, dtype), unit + _result_unit(want, dtype), 1.0)


def pack1(args: dict[str, Any], got: Tensor) -> Verdicts:
    flags = [not value <= 0 for value in exact(args["x"]).flatten().tolist()]
    want = [sum(flag << i for i, flag in enumerate(flags[at : at + 8])) for at in range(0, len(flags), 8)]
    yield measure("bits", got, torch.tensor(want, dtype=torch.float64), 1.0, 0.0)


def pass1(args: dict[str, Any], got: Tensor) -> Verdicts:
    g, bits, factor = args.values()
    flags = [byte >> i & 1 for byte in bits.tolist() for i in range(8)][: g.numel()]
    passed = torch.tensor(flags, dtype=torch.bool).view(g.shape)
    want = torch.where(passed, exact(g) * factor, 0.0)
    yield measure("passed", got, _as_stored(want, g.dtype), _result_unit(want, g.dtype), 1.0)
