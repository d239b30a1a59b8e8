"""Law 5: gradients in each input's dtype, shape and memory format, whatever the layout of inputs and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import HOT, PLANS, UNQUANTIZED, for_conv, grad_like, grads, normal, relative, saved_tensors
from torch import Tensor, nn

from hot.errors import HotError
from hot.executor import conv2d, linear

FLOAT = UNQUANTIZED["packed"]
I, O = 24, 20  # noqa: E741

CODES = 0.02
"""Where values differ in their last bit, 8-bit codes near a tie fall on either side."""
NOISY = ("hot", "luq", "random_rows", "stochastic", "pseudo_stochastic")
"""Plans whose noise is another one where values differ in their last bit."""

# a tensor (…, channels) of some layout, made from its shape
LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "contiguous": normal,
    "transposed": lambda *shape: transposed(shape),
    "sliced": lambda *shape: normal(*(2 * n for n in shape))[tuple(slice(0, 2 * n, 2) for n in shape)],
    "expanded": lambda *shape: normal(*shape[:-1], 1).expand(shape),
    "one number": lambda *shape: normal(1).expand(shape),
    "offset": lambda *shape: normal(shape[0] + 1, *shape[1:])[1:],
}


def transposed(shape: tuple[int, ...]) -> Tensor:
    return normal(*shape[::-1]).permute(*range(len(shape) - 1, -1, -1))


def gradients(function: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor | None, g: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the tensors themselves: their strides reach the layer."""
    operands = [t.detach().requires_grad_() for t in (x, w, b) if t is not None]
    return torch.autograd.grad(function(operands[0], operands[1], operands[2] if b is not None else None), operands, g)


@pytest.mark.parametrize("gradient", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lead", [(), (1,), (7,), (3, 7), (2, 3, 7), (2, 1, 3, 5)], ids=str)
def test_linear_layouts(lead: tuple[int, ...], layout: str, gradient: str) -> None:
    """1-D to 5-D; x, w and g each of any layout; an unquantized plan gives torch's gradients."""
    x, g = LAYOUTS[layout](*lead, I), LAYOUTS[gradient](*lead, O)
    w = LAYOUTS[layout](O, I)
    theirs = gradients(F.linear, x, w, normal(O), g)
    ours = gradients(lambda *t: linear(*t, FLOAT), x, w, normal(O), g)
    for got, exact in zip(ours, theirs, strict=True):
        assert got.shape == exact.shape and got.dtype == exact.dtype and relative(got, exact) < 1e-5
    assert ours[0].is_contiguous() and ours[1].is_contiguous()
    for plan in (PLANS["hadamard_int8"], PLANS["projected_tokens"], PLANS["token_scales"]):
        copied = gradients(lambda *t, p=plan: linear(*t, p), *(t.contiguous() for t in (x, w, normal(O), g)))
        strided = gradients(lambda *t, p=plan: linear(*t, p), x, w, normal(O), g)
        assert all(relative(a, b) < CODES for a, b in zip(strided, copied, strict=True))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 3, 8), (0, 2, 2, 8), (3, 0), (0,)], ids=str)
@pytest.mark.parametrize("outputs", [0, 4])
def test_empty_linear(shape: tuple[int, ...], outputs: int, name: str) -> None:
    """Zero-size batches, inputs and outputs: zeros of the right shape, and the bias gradient all the same."""
    operands = torch.ones(shape), torch.ones(outputs, shape[-1]), torch.ones(outputs)
    ours, theirs = (grads(f, *operands) for f in (lambda *t: linear(*t, PLANS[name]), F.linear))
    assert all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_empty_convolution(name: str) -> None:
    operands = torch.ones(0, 3, 6, 6), torch.ones(4, 3, 3, 3), torch.ones(4)
    ours, theirs = (grads(f, *operands) for f in (lambda *t: conv2d(*t, for_conv(PLANS[name])), F.conv2d))
    assert all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    """Gradients have the dtype of what they belong to, and are near the gradients of the rounded operands."""
    operands = normal(2, 20, 8, dtype=dtype), normal(12, 8, dtype=dtype, seed=1), normal(12, dtype=dtype, seed=2)
    got = grads(lambda *t: linear(*t, PLANS[name]), *operands)
    same = grads(lambda *t: linear(*t, PLANS[name]), *(t.double() for t in operands), g=grad_like(got.output).double())
    assert all(t.dtype == dtype for t in got)
    if name not in NOISY:
        tolerance = {torch.float64: 1e-6, torch.float32: CODES}.get(dtype, 4 * CODES)
        assert relative(got.grad_input, same.grad_input) < tolerance
        assert relative(got.grad_weight, same.grad_weight) < tolerance
    conv = normal(2, 3, 6, 6, dtype=dtype), normal(4, 3, 3, 3, dtype=dtype), normal(4, dtype=dtype)
    assert all(t.dtype == dtype for t in grads(lambda *t: conv2d(*t, for_conv(PLANS[name])), *conv))


@pytest.mark.parametrize("name", PLANS)
def test_autocast_dtypes(name: str) -> None:
    """Under autocast master weights and float32 inputs get float32 gradients, from bf16 ones that came back."""
    got = grads(lambda *t: linear(*t, PLANS[name]), normal(2, 20, 8), normal(12, 8), normal(12), autocast=True)
    assert got.output.dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 for t in got[1:])
    conv = normal(2, 3, 6, 6), normal(4, 3, 3, 3), normal(4)
    got = grads(lambda *t: conv2d(*t, for_conv(PLANS[name])), *conv, autocast=True)
    assert got.output.dtype == torch.bfloat16 and all(t.dtype == torch.float32 for t in got[1:])


def test_autocast_and_tied_weights() -> None:
    """A weight that a converted and an exact layer share gets both gradients: autocast's cache of casts hides none."""
    w, x = normal(8, 8).requires_grad_(), normal(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        (linear(x, w, None, HOT), y := F.linear(x, w))[1].sum().backward()
    assert y.requires_grad and w.grad is not None


@pytest.mark.parametrize("name", ["hadamard_int8", "only_grad_input", "projected_tokens"])
@pytest.mark.parametrize("x_last", [False, True], ids=["x", "x channels_last"])
@pytest.mark.parametrize("w_last", [False, True], ids=["w", "w channels_last"])
@pytest.mark.parametrize("g_last", [False, True], ids=["g", "g channels_last"])
def test_memory_formats(name: str, x_last: bool, w_last: bool, g_last: bool) -> None:
    """Law 5: the gradient of x follows x, that of the weight the weight, and the layout changes no value."""

    def lay(t: Tensor, last: bool) -> Tensor:
        return t.contiguous(memory_format=torch.channels_last) if last else t

    x, w, g = normal(2, 3, 6, 5), normal(4, 3, 3, 3), normal(2, 4, 4, 3)
    run = lambda *t: conv2d(*t, for_conv(PLANS[name]))  # noqa: E731
    gx, gw = gradients(run, lay(x, x_last), lay(w, w_last), None, lay(g, g_last))
    assert gx.is_contiguous(memory_format=torch.channels_last if x_last else torch.contiguous_format)
    assert gw.is_contiguous(memory_format=torch.channels_last if w_last else torch.contiguous_format)
    plain = gradients(run, x, w, None, g)
    assert relative(gx, plain[0]) < CODES and relative(gw, plain[1]) < CODES


@pytest.mark.parametrize("layer", ["linear", "conv2d"])
def test_once_differentiable(layer: str) -> None:
    """Law 5: a second derivative raises, and says why, instead of being wrong."""
    if layer == "linear":
        x, w = normal(4, 8).requires_grad_(), normal(8, 8).requires_grad_()
        y = linear(x, w, None, HOT)
    else:
        x, w = normal(1, 3, 6, 6).requires_grad_(), normal(4, 3, 3, 3).requires_grad_()
        y = conv2d(x, w, None, for_conv(HOT))
    (gx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gx.sum().backward()


def test_torchs_own_errors() -> None:
    """What F.linear and F.conv2d raise on, the functional forms raise on, before anything is saved."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(normal(4, 8).requires_grad_(), normal(8, 9), None, HOT)
    with pytest.raises(RuntimeError, match="channels"):
        conv2d(normal(1, 2, 6, 6).requires_grad_(), normal(4, 3, 3, 3), None, for_conv(HOT))
    with pytest.raises(HotError, match="complex64"):
        linear(normal(4, 8).to(torch.complex64), normal(8, 8).to(torch.complex64).requires_grad_(), None, HOT)
    with pytest.raises(HotError, match="packed needs a 1×1 kernel"):
        conv2d(normal(1, 3, 6, 6), normal(4, 3, 3, 3), None, HOT)


def test_module_hooks_run() -> None:
    """Hooks on modules and on parameters see what they would see."""
    from hot.convert import HotLinear

    layer, seen = nn.Linear(8, 8), []
    layer.__class__, layer.hot_plan = HotLinear, HOT
    layer.register_forward_hook(lambda *a: seen.append("forward"))
    layer.register_full_backward_hook(lambda *a: seen.append("backward"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append("weight"))
    layer(normal(4, 8).requires_grad_()).sum().backward()
    assert sorted(seen) == ["backward", "forward", "weight"]


def test_autocast_does_not_reach_the_transforms() -> None:
    """What forward saves under autocast are the codes of the input as it is, and backward may be called under it."""

    def run(forward: bool, backward: bool) -> tuple[list[Tensor], Tensor]:
        x, w = normal(2, 32, I).requires_grad_(), normal(O, I).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=forward), saved_tensors() as saved:
            y = linear(x, w, None, PLANS["hadamard_int8"])
        codes = [t.clone() for t in saved]
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            y.backward(grad_like(y))
        return codes, w.grad

    codes, grad_weight = run(False, False)
    assert len(codes) == 3  # the weight, the codes of x and their scales
    assert all(torch.equal(*pair) for pair in zip(run(True, False)[0], codes, strict=True))
    assert torch.equal(run(False, True)[1], grad_weight)


@pytest.mark.parametrize("name", ["hot", "int8", "projected_tokens"])
def test_meta_tensors_tell_shapes(name: str) -> None:
    """A model on the meta device runs forward and backward, as torch's own layers do there."""
    x, w, b = (torch.empty(*shape, device="meta", requires_grad=True) for shape in [(2, 37, I), (O, I), (O,)])
    y = linear(x, w, b, PLANS[name])
    y.sum().backward()
    assert y.shape == (2, 37, O) and all(t.grad.is_meta and t.grad.shape == t.shape for t in (x, w, b))
