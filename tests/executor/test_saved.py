"""Laws 3 and 4: what forward saves, to the byte."""

from __future__ import annotations

import pytest
import torch
from helpers import HOT, PLANS, UNQUANTIZED, for_conv, grads, normal, saved_tensors, storage_bytes
from torch import Tensor

from hot.executor import conv2d, linear
from hot.policies.buffers import Quantized
from hot.policies.quantizers import Int

# tokens → tokens that `hot` keeps: half of every block of 16, the last one padded
KEPT = {1: 8, 7: 8, 16: 8, 17: 16, 41: 24, 196: 104, 197: 104, 341: 176}


@pytest.mark.parametrize("samples", [None, 1, 3])
@pytest.mark.parametrize("tokens", KEPT)
def test_bytes_of_linear(tokens: int, samples: int | None) -> None:
    """Law 3: under `hot` one byte for each kept token of each sample, and a float32 scale for each input channel."""
    x, weight = normal(*([] if samples is None else [samples]), tokens, 20), normal(12, 20).requires_grad_()
    with saved_tensors() as saved:
        linear(x, weight, None, HOT)
    assert storage_bytes(saved, without=(weight,)) == 20 * (KEPT[tokens] * (samples or 1) + 4)
    assert not any(t.requires_grad for t in saved)


@pytest.mark.parametrize("stride", [1, 2])
def test_bytes_of_a_pointwise_convolution(stride: int) -> None:
    """Law 10: 1×1 packs projected codes of the pixels that it reads."""
    x, weight = normal(2, 5, 14, 14), normal(4, 5, 1, 1).requires_grad_()
    with saved_tensors() as saved:
        conv2d(x, weight, None, HOT, stride)
    pixels = 14 * 14 // stride**2
    assert storage_bytes(saved, without=(weight,)) == 5 * (2 * KEPT.get(pixels, 32) + 4)


@pytest.mark.parametrize(("bits", "size"), [(8, 9 * 10), (4, 9 * 10 // 2)])
@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_bytes_of_a_convolution(kernel: int, bits: int, size: int) -> None:
    """Law 10: k×k saves the codes of the feature map, whatever k is, and never the unfolded input."""
    x, weight = normal(2, 3, 9, 10), normal(4, 3, kernel, kernel).requires_grad_()
    plan = (
        for_conv(HOT) if bits == 8 else HOT.__class__(HOT.grad_input, HOT.grad_weight, Quantized(quantizer=Int(bits=4)))
    )
    with saved_tensors() as saved:
        conv2d(x, weight, None, plan, padding=2)
    assert storage_bytes(saved, without=(weight,)) == 3 * 2 * size + (3 * 4 if bits == 8 else 4)


@pytest.mark.parametrize("name", PLANS)
def test_needs_input_grad(name: str) -> None:
    """Law 3: nothing is saved, and nothing computed, for a gradient that nobody asked for."""
    plan = PLANS[name]
    x, weight, bias = normal(2, 20, 8), normal(12, 8), normal(12)

    def run(**needs: bool) -> tuple[list[Tensor], list[Tensor | None]]:
        leaves = [
            t.clone().requires_grad_(needs.get(name, False)) for t, name in ((x, "x"), (weight, "w"), (bias, "b"))
        ]
        with saved_tensors() as saved:
            y = linear(*leaves, plan)
        y.backward(torch.ones_like(y))
        return [t for t in saved if t is not None], [leaf.grad for leaf in leaves]

    saved, found = run(x=True)
    assert [t.data_ptr() for t in saved] and all(t.shape == weight.shape for t in saved)  # the weight, nothing of x
    assert [g is not None for g in found] == [True, False, False]
    saved, found = run(w=True)
    assert all(t.data_ptr() != weight.data_ptr() and t.shape != (12, 8) for t in saved)
    assert [g is not None for g in found] == [False, True, False]
    saved, found = run(b=True)
    assert saved == [] and torch.equal(found[2], torch.full((12,), 40.0))


def test_unneeded_products_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 3: one product for one gradient."""
    import hot.executor as executor

    count = []
    product = executor.product
    monkeypatch.setattr(executor, "product", lambda *args: count.append(1) or product(*args))
    for x_grad, w_grad in ((True, True), (True, False), (False, True)):
        count.clear()
        x, weight = normal(20, 8).requires_grad_(x_grad), normal(12, 8).requires_grad_(w_grad)
        linear(x, weight, None, HOT).sum().backward()
        assert len(count) == x_grad + w_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: type[torch.no_grad]) -> None:
    """Law 3: no_grad and inference_mode save nothing and give torch's output."""
    x, weight = normal(20, 8), normal(12, 8).requires_grad_()
    with saved_tensors() as saved, mode():
        y = linear(x, weight, None, HOT)
    assert not saved and not y.requires_grad and torch.equal(y, torch.nn.functional.linear(x, weight))


def test_inference_tensors_can_be_packed() -> None:
    """An input made under inference_mode (a frozen backbone) trains a head: what is saved is not x."""
    with torch.inference_mode():
        x = normal(2, 20, 8)
    weight = normal(12, 8).requires_grad_()
    linear(x, weight, None, HOT).sum().backward()
    again = grads(lambda x, w: linear(x, w, None, HOT), normal(2, 20, 8), weight, g=torch.ones(2, 20, 12))
    assert torch.equal(weight.grad, again.grad_weight)


def layers(x: Tensor, weights: list[Tensor], plans: list) -> tuple[list[Tensor], int]:
    with saved_tensors() as saved:
        ys = [linear(x, w, None, p) for w, p in zip(weights, plans, strict=True)]
    return ys, storage_bytes(saved, without=tuple(weights))


@pytest.mark.parametrize("name", ["hot", "quantized_buffer", "stochastic", "random_rows"])
def test_one_input_one_buffer(name: str) -> None:
    """Law 3: q, k and v save one buffer; the gradients are those of three layers with a buffer each."""
    x, weights = normal(2, 40, 16), [normal(16, 16, seed=s).requires_grad_() for s in range(3)]
    _, one = layers(x, weights[:1], [PLANS[name]])
    ys, three = layers(x, weights, [PLANS[name]] * 3)
    assert three == one
    sum(ys).backward(normal(*ys[0].shape))  # type: ignore[union-attr]
    if name in ("hot", "quantized_buffer"):
        for w in weights:
            alone = grads(lambda x, w: linear(x, w, None, PLANS[name]), x, w, g=normal(*ys[0].shape))
            assert torch.equal(w.grad, alone.grad_weight)


def test_equal_plans_share() -> None:
    """Sharing goes by what a plan says, not by which object says it."""
    x, weights = normal(2, 40, 16), [normal(16, 16, seed=s).requires_grad_() for s in range(2)]
    other = HOT.__class__(HOT.grad_input, HOT.grad_weight.__class__(*(p.model_copy() for p in parts(HOT))), HOT.buffer)
    assert other is not HOT and layers(x, weights, [HOT, other])[1] == layers(x, weights[:1], [HOT])[1]


def parts(plan: object) -> tuple:
    path = plan.grad_weight  # type: ignore[attr-defined]
    return path.transform, path.grad_output, path.input


def test_different_plans_do_not_share() -> None:
    """Law 3: nor do their gradients mix."""
    x, weights = normal(2, 40, 16), [normal(16, 16, seed=s).requires_grad_() for s in range(2)]
    plans = [HOT, UNQUANTIZED["packed"]]
    ys, both = layers(x, weights, plans)
    assert both == sum(layers(x, [w], [p])[1] for w, p in zip(weights, plans, strict=True))
    sum(ys).backward(normal(*ys[0].shape))  # type: ignore[union-attr]
    for w, p in zip(weights, plans, strict=True):
        alone = grads(lambda x, w, p=p: linear(x, w, None, p), x, w, g=normal(*ys[0].shape))
        assert torch.equal(w.grad, alone.grad_weight)


def test_changed_in_place() -> None:
    """Law 3: an input changed between two layers is another input."""
    x, weights = normal(2, 40, 16), [normal(16, 16, seed=s).requires_grad_() for s in range(2)]
    first, work = x.clone(), x.clone()
    y0 = linear(work, weights[0], None, HOT)
    work.mul_(-2).add_(1)
    y1 = linear(work, weights[1], None, HOT)
    (y0 + y1).backward(normal(*y0.shape))
    for w, value in zip(weights, (first, work), strict=True):
        alone = grads(lambda x, w: linear(x, w, None, HOT), value, w, g=normal(*y0.shape))
        assert torch.equal(w.grad, alone.grad_weight)


@pytest.mark.parametrize("name", ["hot", "only_grad_input"])
def test_weight_is_saved_as_it_is(name: str) -> None:
    """Law 4: the weight is never copied to be saved."""
    x, weight = normal(2, 20, 8).requires_grad_(), normal(12, 8).requires_grad_()
    with saved_tensors() as saved:
        linear(x, weight, None, PLANS[name])
    assert weight.data_ptr() in {t.data_ptr() for t in saved}


def test_changed_weight_raises() -> None:
    """A weight that an optimizer changed before backward is an error, as in torch."""
    x, weight = normal(20, 8).requires_grad_(), normal(12, 8).requires_grad_()
    y = linear(x, weight, None, HOT)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_offloading() -> None:
    """Everything goes through save_for_backward, so that hooks which move saved tensors see all of it."""
    operands = normal(2, 20, 8), normal(12, 8), normal(12)
    plain = grads(lambda *t: linear(*t, HOT), *operands)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        moved = grads(lambda *t: linear(*t, HOT), *operands)
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))


def test_retained_graph() -> None:
    """Backward may run twice over one forward, and gives the same."""
    x, weight = normal(2, 20, 8).requires_grad_(), normal(12, 8).requires_grad_()
    y = linear(x, weight, None, HOT)
    first = torch.autograd.grad(y, (x, weight), normal(*y.shape), retain_graph=True)
    again = torch.autograd.grad(y, (x, weight), normal(*y.shape))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
