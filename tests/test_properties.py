"""Any plan on any layer, shape, layout and dtype: the right result, or a named error. Never a crash, never NaN from finite input.

HOT_PROPERTY_CASES=2000 draws so many cases, others in every run; without it 300, the same in every run.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hot
from hot import HotError
from hot.executor import conv2d, linear
from hot.policies.buffers import Packed, Quantized, Raw
from hot.policies.plan import GradInputPlan, GradWeightPlan, LayerPlan
from hot.policies.quantizers import Float8, Int, Luq, NoQuantizer, Quantizer, Sawb
from hot.policies.transforms import Hadamard, HadamardLowRank, NoTransform

CASES = os.environ.get("HOT_PROPERTY_CASES")
settings.register_profile(
    "hot", max_examples=int(CASES or 300), derandomize=CASES is None, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
profile = settings.get_profile("hot")

scaled = {
    "granularity": st.sampled_from(["tensor", "row", "block", "token"]),
    "block": st.sampled_from([16, 20, 64]),
    "rounding": st.sampled_from(["nearest", "hashed", "pseudo_stochastic", "stochastic"]),
}
quantizers: st.SearchStrategy[Quantizer] = st.one_of(
    st.builds(NoQuantizer),
    st.builds(Int, bits=st.integers(2, 8), **scaled),
    st.builds(Sawb, bits=st.integers(2, 8), **scaled),
    st.builds(Luq, bits=st.integers(2, 4), **scaled),
    st.builds(Float8, format=st.sampled_from(["e4m3", "e5m2"]), **scaled),
)
hadamard = {
    "block": st.sampled_from([2, 4, 16, 64]),
    "signs": st.sampled_from(["none", "random"]),
    "prefix_tokens": st.sampled_from([0, 0, 1, 5]),
    "tail": st.sampled_from(["pad", "keep"]),
}


@st.composite
def low_rank(draw: st.DrawFn, axes: list[str]) -> HadamardLowRank:
    """A rank that fits its block, and the one that order lp_l1 asks for."""
    fields = {name: draw(strategy) for name, strategy in hadamard.items()}
    order = draw(
        st.sampled_from(["sequency", "random", "lp_l1"] if fields["block"] in (4, 16, 64) else ["sequency", "random"])
    )
    rank = {4: 3, 16: 10, 64: 36}[fields["block"]] if order == "lp_l1" else draw(st.integers(1, fields["block"]))
    return HadamardLowRank(**fields, order=order, rank=rank, axis=draw(st.sampled_from(axes)))


def transforms(*axes: str) -> st.SearchStrategy[Any]:
    return st.one_of(st.builds(NoTransform), st.builds(Hadamard, **hadamard), low_rank(list(axes)))


def plans_of(quantizers: st.SearchStrategy[Quantizer]) -> st.SearchStrategy[LayerPlan]:
    return st.builds(
        LayerPlan,
        st.builds(GradInputPlan, transforms("contracted", "tokens"), quantizers, quantizers),
        st.builds(GradWeightPlan, transforms("contracted"), quantizers, quantizers),
        st.one_of(st.builds(Packed), st.builds(Raw), st.builds(Quantized, quantizer=quantizers)),
    )


plans = st.one_of(plans_of(quantizers), plans_of(quantizers), plans_of(st.builds(NoQuantizer)))


class Case(NamedTuple):
    """A layer, its operands and the gradient that comes back."""

    kind: str
    options: dict[str, Any]
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    g: Tensor
    needs: tuple[bool, bool, bool]


@st.composite
def laid_out(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of seeded noise in some layout, now and then of zeros, or tiny."""
    layout = draw(st.sampled_from(["contiguous", "transposed", "sliced", "expanded", "channels_last"]))
    seed, size = draw(st.integers(0, 99)), draw(st.sampled_from([1.0, 1.0, 1.0, 0.0, 1e-4]))
    noise = lambda *shape: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)  # noqa: E731
    if layout == "transposed":
        return noise(*shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
    if layout == "sliced":
        return noise(*(2 * n for n in shape))[tuple(slice(0, 2 * n, 2) for n in shape)]
    if layout == "expanded" and shape:
        return noise(*shape[:-1], 1).expand(shape)
    x = noise(*shape)
    return x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" and len(shape) == 4 else x


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    size = st.sampled_from([1, 2, 3, 7, 16, 17, 33])
    needs = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any))
    if draw(st.booleans()):
        lead = draw(
            st.lists(st.sampled_from([0, 1, 2, 3, 5, 16, 18]), max_size=4).filter(lambda n: torch.Size(n).numel() < 400)
        )
        inputs, outputs = draw(size), draw(size)
        shapes, options, out = ((*lead, inputs), (outputs, inputs)), {}, (*lead, outputs)
        kind = "linear"
    else:
        kind, kernel = "conv2d", draw(st.tuples(st.integers(1, 3), st.integers(1, 4)))
        padding = draw(st.sampled_from([0, 1, (2, 1), "same", "valid"]))
        pair = st.tuples(st.integers(1, 3), st.integers(1, 2))
        options = {"padding": padding, "dilation": draw(pair), "stride": 1 if padding == "same" else draw(pair)}
        channels, outputs = draw(st.integers(1, 5)), draw(st.integers(1, 6))
        image = draw(st.integers(8, 11)), draw(st.integers(8, 11))
        lead = draw(st.sampled_from([(), (0,), (1,), (3,)]))
        shapes = (*lead, channels, *image), (outputs, channels, *kernel)
        out = tuple(
            F.conv2d(torch.empty(shapes[0], device="meta"), torch.empty(shapes[1], device="meta"), **options).shape
        )
    x, weight, g = (draw(laid_out(shape, dtype)) for shape in (*shapes, out))
    bias = draw(laid_out((shapes[1][0],), dtype)) if draw(st.booleans()) else None
    return Case(kind, options, x, weight, bias, g, needs)


def backward(case: Case, plan: LayerPlan | None) -> tuple[Tensor, list[Tensor | None]]:
    operands = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(case[2:5], case.needs, strict=True)]
    if plan is None:
        y = (F.linear if case.kind == "linear" else F.conv2d)(*operands, **case.options)
    else:
        y = (linear if case.kind == "linear" else conv2d)(*operands, plan, **case.options)
    wanted = [t for t in operands if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, case.g) if wanted else ())
    return y.detach(), [next(found) if t is not None and t.requires_grad else None for t in operands]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@profile
@given(plans, cases())
def test_any_plan_on_any_layer(plan: LayerPlan, case: Case) -> None:
    """Laws 2, 3, 5, 6 and 7 at once."""
    note(f"{plan} on {case.kind} {tuple(case.x.shape)} {case.options} {case.x.dtype}")
    y, exact = backward(case, None)
    try:
        ours, found = backward(case, plan)
    except HotError as error:
        assert plan.buffer.is_packed and case.kind == "conv2d" and "use quantized" in str(error)
        return
    assert torch.equal(ours, y) and ours.dtype == y.dtype
    for got, theirs in zip(found, exact, strict=True):
        assert (got is None) == (theirs is None)
        if got is not None and theirs is not None:
            assert got.shape == theirs.shape and got.dtype == theirs.dtype
            assert got.isfinite().all()
    if all(q.is_identity for q in (*plan.grad_input.quantizers, *plan.grad_weight.quantizers)):
        close(found, exact, plan, case.x.dtype)


def close(found: list[Tensor | None], exact: list[Tensor | None], plan: LayerPlan, dtype: torch.dtype) -> None:
    """Where nothing is quantized or projected, the gradients are torch's."""
    whole = [
        t.kept == t.block and t.axis == "contracted" for t in (plan.grad_input.transform, plan.grad_weight.transform)
    ]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.05)
    for got, theirs, is_whole in zip(found, exact, (*whole, True), strict=True):
        if got is not None and theirs is not None and is_whole:
            assert (got - theirs).double().norm() <= tolerance * (theirs.double().norm() + theirs.numel() ** 0.5 * 1e-3)


@profile
@given(plans, st.sampled_from(["linear", "1×1", "3×3"]))
def test_any_plan_as_a_policy(plan: LayerPlan, kind: str) -> None:
    """A plan written down as a policy converts a layer that trains, or the policy says what is wrong with it."""
    written = plan.to_dict()
    layer = {"linear": nn.Linear(20, 12), "1×1": nn.Conv2d(4, 6, 1), "3×3": nn.Conv2d(4, 6, 3)}[kind]
    try:
        policy = hot.Policy(backend=written.pop("backend"), defaults=written)
        report = hot.convert(layer, policy)
    except HotError as error:
        assert str(error)
        return
    assert policy == hot.Policy(**policy.to_dict())
    resolved = report[""]
    if isinstance(resolved, LayerPlan):
        assert (resolved.grad_input, resolved.grad_weight) == (policy.defaults.grad_input, policy.defaults.grad_weight)
    x = torch.randn(3, 20) if kind == "linear" else torch.randn(2, 4, 6, 6)
    layer(x).sum().backward()
    assert layer.weight.grad.isfinite().all() and layer.weight.grad.shape == layer.weight.shape
