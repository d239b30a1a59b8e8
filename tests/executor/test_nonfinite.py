"""Law 6: what is not finite stays so where it was, zeros stay zeros, and scales are float32."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import HOT, PLANS, for_conv, grads, normal, relative
from torch import Tensor, nn

from hot.backends import get_ops
from hot.executor import conv2d, linear
from hot.policies.encode import encode

BAD = [math.inf, -math.inf, math.nan]
ROWS = ["hot", "int8", "int4", "hadamard_int8", "raw_buffer", "quantized_buffer", "stochastic", "class_token"]
T, O, I = 20, 12, 8  # noqa: E741


def finite_rows(t: Tensor) -> Tensor:
    return t.flatten(1).isfinite().all(1)


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_one_bad_element_of_the_gradient(name: str, bad: float) -> None:
    """With scales per row: its token's row of grad_input and its output's row of grad_weight, and no other."""
    g = normal(T, O)
    g[3, 5] = bad
    got = grads(lambda *t: linear(*t, PLANS[name]), normal(T, I), normal(O, I), normal(O), g=g)
    assert (~finite_rows(got.grad_input)).nonzero().flatten().tolist() == [3]
    assert (~finite_rows(got.grad_weight)).nonzero().flatten().tolist() == [5]
    assert (~got.grad_bias.isfinite()).nonzero().flatten().tolist() == [5]
    assert not got.grad_input[3].isfinite().any() and not got.grad_weight[5].isfinite().any()


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("layer", ["linear", "conv2d"])
def test_no_bad_gradient_is_hidden(layer: str, name: str, bad: float) -> None:
    """Under every plan a gradient that is not finite reaches both gradients."""
    if layer == "linear":
        operands, run = (normal(2, T, I), normal(O, I)), lambda *t: linear(*t, None, PLANS[name])
    else:
        operands, run = (normal(2, 3, 6, 6), normal(O, 3, 3, 3)), lambda *t: conv2d(*t, None, for_conv(PLANS[name]))
    g = torch.ones_like(run(*operands))
    g.view(-1)[7] = bad
    got = grads(run, *operands, g=g)
    assert not got.grad_input.isfinite().all() and not got.grad_weight.isfinite().all()


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_no_bad_input_is_hidden(name: str, bad: float) -> None:
    """An input or a weight that is not finite reaches the gradient that it is a factor of."""
    x, w, g = normal(T, I), normal(O, I), normal(T, O)
    x[3, 2] = bad
    assert not grads(lambda *t: linear(*t, None, PLANS[name]), x, w, g=g).grad_weight.isfinite().all()
    w[3, 2] = bad
    assert not grads(lambda *t: linear(*t, None, PLANS[name]), normal(T, I), w, g=g).grad_input.isfinite().all()


@pytest.mark.parametrize("name", PLANS)
def test_grad_scaler_skips_the_step(name: str) -> None:
    """GradScaler sees an overflow, leaves the weights and halves its scale."""
    weight = nn.Parameter(normal(O, I))
    before, optimizer = weight.detach().clone(), torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    loss = (linear(normal(T, I), weight, None, PLANS[name]) * torch.tensor(3e38)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, before) and scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("name", PLANS)
def test_zeros(name: str) -> None:
    """All-zero operands give zeros, and one all-zero row gives a row of zeros."""
    x, w, g = normal(T, I), normal(O, I), normal(T, O)
    run = lambda *t: linear(*t, None, PLANS[name])  # noqa: E731
    got = grads(run, x, w, g=torch.zeros_like(g))
    assert not got.grad_input.any() and not got.grad_weight.any()
    assert not grads(run, torch.zeros_like(x), w, g=g).grad_weight.any()
    assert not grads(run, x, torch.zeros_like(w), g=g).grad_input.any()
    if name != "projected_tokens":  # it spreads a token over its block
        g[4], g[:, 7] = 0, 0
        got = grads(run, x, w, g=g)
        assert not got.grad_input[4].any() and not got.grad_weight[7].any() and got.grad_input.any()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e20, 1e32], ids=str)
@pytest.mark.parametrize("name", ["hot", "int8", "hadamard_int8", "tensor_scales", "block_scales", "sawb"])
def test_extreme_magnitudes(name: str, scale: float) -> None:
    """Tiny and huge gradients stay finite, and right where float32 can say them."""
    x, w, g = normal(T, I), normal(O, I) * 1e-2, normal(T, O)
    got = grads(lambda *t: linear(*t, None, PLANS[name]), x, w, g=g * scale)
    assert got.grad_input.isfinite().all() and got.grad_weight.isfinite().all()
    if scale > 1e-37:
        plain = grads(lambda *t: linear(*t, None, PLANS[name]), x, w, g=g)
        tolerance = 0.5 if name == "hot" else 0.02
        assert relative(got.grad_input.double() / scale, plain.grad_input) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [name for name in PLANS if name not in ("only_buffer", "only_grad_input")])
def test_scales_are_float32(name: str, dtype: torch.dtype) -> None:
    """Whatever the dtype of the operand: float16 ones underflow."""
    path = PLANS[name].grad_weight
    operand = encode(normal(O, 1, T, dtype=dtype) * 1e-6, path.transform, path.input, get_ops("auto", "cpu"))
    assert operand.scale is None or operand.scale.dtype == torch.float32


def test_small_gradients_in_float16() -> None:
    """Gradients near float16's least numbers keep their direction."""
    x, w, g = (t.half() for t in (normal(T, I), normal(O, I), normal(T, O) * 1e-5))
    got = grads(lambda *t: linear(*t, None, HOT), x, w, g=g)
    assert relative(got.grad_weight, g.double().T @ x.double()) < 1
    got = grads(lambda *t: linear(*t, None, PLANS["int8"]), x, w, g=g)
    assert relative(got.grad_weight, g.double().T @ x.double()) < 0.05
