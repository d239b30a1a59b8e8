"""The one autograd function that runs any plan: forward as torch has it, backward as the plan says.

For y = x wᵀ: grad_input g_x = g_y w, contracted over the outputs; grad_weight g_w = g_yᵀ x, contracted over the tokens.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hot.backends import AUTO, Ops, get_ops
from hot.backends.streams import Aside
from hot.crossover import leaves_exact
from hot.errors import HotError
from hot.kept import Kept, can_keep
from hot.operands import (
    fused_arguments,
    grad_output_operand,
    grad_output_operands,
    holders,
    product,
    some_rows,
    weight_operand,
)
from hot.policies.buffers import Quantized, Raw
from hot.policies.encode import encode
from hot.policies.plan import LayerPlan
from hot.policies.quantizers import Operand
from hot.recipes import Make, Recipe, recipe_of
from hot.sharing import shared
from hot.views import Like, LinearView, View, conv2d_view


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LayerPlan) -> Tensor:
    """F.linear with the backward pass of a plan. x (…, I), weight (O, I), bias (O,) or None → (…, O).

    Raises what F.linear raises, and BackendError where the plan's backend can't serve the tensors. Under the backend ``auto``
    torch's own backward runs where the device's crossover (`hot.crossover`) says that it is faster.

    Equals, without gradients: F.linear(x, weight, bias)
    """
    return _run(x, weight, bias, plan, LinearView())


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LayerPlan,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """F.conv2d (groups = 1) with the backward pass of a plan. x (B, C, H, W) or (C, H, W), weight (O, C, kh, kw).

    Raises what F.conv2d raises; HotError for a packed buffer unless the kernel is 1×1 and unpadded; BackendError as `linear`.

    Equals, without gradients: F.conv2d(x, weight, bias, stride, padding, dilation)
    """
    view = conv2d_view((weight.shape[2], weight.shape[3]), stride, padding, dilation)
    if plan.buffer.is_packed and not view.is_pointwise:
        raise HotError(f"buffer: packed needs a 1×1 kernel without padding, not {view.kernel}: use quantized")
    return _run(x, weight, bias, plan, view)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LayerPlan, view: View) -> Tensor:
    if plan.is_exact or not torch.is_grad_enabled():
        return view.forward(x, weight, bias)
    if x.is_complex():
        raise HotError(f"no plan can run on {x.dtype}: leave the layer to torch")
    if plan.backend == AUTO and leaves_exact(x, weight, plan, view):
        return view.forward(x, weight, bias)
    return Hot.apply(x, weight, bias, plan, view)


def as_written(t: Tensor) -> AbstractContextManager[object]:
    """A context in which nothing is cast on t's device; torch has no autocast for the meta device."""
    kind = t.device.type
    if torch.compiler.is_compiling():
        # torch.compile traces a backward anew once it asks for strides, and never closes what was open by then: the rest of the
        # model would be traced without autocast. So they are asked for first.
        t.stride()
        return torch.autocast(kind, enabled=False)
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    context: AbstractContextManager[object] = torch._C._DisableAutocast()  # a tenth of the time of torch.autocast
    return context


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, view: View) -> Tensor:
    """torch's own op. Under autocast on copies of our own: those that autocast makes of weights it holds until its end,
    half of the model again at the peak; backward needs none of them."""
    kind = x.device.type
    if kind == "meta" or torch.compiler.is_compiling() or not torch.is_autocast_enabled(kind):
        return view.forward(x, weight, bias)
    low = torch.get_autocast_dtype(kind)
    with as_written(x):
        return view.forward(_cast(x, low), _cast(weight, low), None if bias is None else _cast(bias, low))


def _cast(t: Tensor, low: torch.dtype) -> Tensor:
    return t.to(low) if t.dtype != low and t.is_floating_point() and t.dtype != torch.float64 else t


class _Layer(NamedTuple):
    """What backward knows of a layer beside its tensors. make: of which it makes the input again, where it is not the buffer's
    business."""

    plan: LayerPlan
    view: View
    like: Like
    make: Make | None


class Hot(torch.autograd.Function):
    """forward: torch's own op, plus what the plan saves. backward: the plan's two products and the exact bias gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: LayerPlan, view: View) -> Tensor:
        y = _forward(x, weight, bias, view)
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        with as_written(x):  # autocast would cast the transforms' own products
            made = _recipe(x, plan) if needs_weight and x.numel() else None
            kept = keep(x, y.dtype, plan, view, made) if needs_weight and x.numel() else ()
        ctx.save_for_backward(weight if needs_input else None, *kept)
        ctx.layer = _Layer(plan, view, Like.of(x, weight, bias), None if made is None else made.make)
        return unviewed(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs, layer = ctx.needs_input_grad[:3], ctx.layer
        if not g.numel() or not layer.like.x_shape.numel():
            return (*_of_nothing(g, needs, layer.view, layer.like), None, None)
        with as_written(g):  # as in forward; backward may be called under autocast
            return (*_backward(g, weight, tuple(kept), needs, layer), None, None)


def unviewed(y: Tensor) -> Tensor:
    """y, which nobody else holds, for whoever gets it from an autograd function: views must not be changed in place there."""
    return torch.ops.aten._unsafe_view.default(y, y.shape) if torch.compiler.is_compiling() or y._is_view() else y


def _of_nothing(
    g: Tensor, needs: tuple[bool, bool, bool], view: View, like: Like
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients where there is nothing to multiply: zeros, and the bias gradient, which may still be a sum."""
    needs_input, needs_weight, needs_bias = needs
    return (
        g.new_zeros(like.x_shape, dtype=like.x_dtype) if needs_input else None,
        g.new_zeros(like.weight_shape, dtype=like.weight_dtype) if needs_weight else None,
        view.tokens(g).sum((0, 1)).to(like.bias_dtype) if needs_bias else None,
    )


def _backward(
    g: Tensor,
    weight: Tensor | None,
    kept: tuple[Tensor, ...],
    needs: tuple[bool, bool, bool],
    layer: _Layer,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, weight and bias; None for one that nobody needs. What paths that are torch's own compute, they
    compute at once; the others, each by its product."""
    needs_input, needs_weight, needs_bias = needs
    plan, view, like, make = layer
    x = _exact_input(kept, plan, make) if needs_weight else None
    own = needs_input and plan.grad_input.is_exact
    grad_input = grad_weight = grad_bias = None
    if own or x is not None:
        given = _to(x, g.dtype), _to(weight, g.dtype) if own else None
        grad_input, grad_weight = view.exact(g, *given, like)
        del given
    left = needs_input and not own, needs_weight and x is None, needs_bias
    if left[0] or left[1]:
        products = _products(g, weight, kept, left, layer)
        grad_input, grad_weight = grad_input if own else products[0], products[1] if x is None else grad_weight
        grad_bias = products[2]
    if needs_bias and grad_bias is None:
        grad_bias = view.exact_grad_bias(g)
    return (
        _to(grad_input, like.x_dtype, like.x_format),
        _to(grad_weight, like.weight_dtype, like.weight_format),
        _to(grad_bias, like.bias_dtype),
    )


def _to(t: Tensor | None, dtype: torch.dtype | None, format: torch.memory_format | None = None) -> Tensor | None:
    """t in a dtype and memory format; calls that change nothing take their time too."""
    if t is not None and t.dtype != dtype:
        t = t.to(dtype)
    return t if t is None or format is None else t.contiguous(memory_format=format)


def _exact_input(kept: tuple[Tensor, ...], plan: LayerPlan, make: Make | None) -> Tensor | None:
    """The input of a layer whose grad_weight is torch's own; None if that is a product on codes."""
    if not plan.grad_weight.is_exact or (make is None and not _keeps_input(plan)):
        return None
    return kept[0] if make is None else make(kept)


def _products(
    g: Tensor,
    weight: Tensor | None,
    kept: tuple[Tensor, ...],
    needs: tuple[bool, bool, bool],
    layer: _Layer,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input and weight, where needed, as the plan's products; that of the bias where it comes with them."""
    needs_input, needs_weight, needs_bias = needs
    plan, view, like, _ = layer
    ops = get_ops(plan.backend, g.device.type)
    draw, kept = (kept[0], kept[1:]) if needs_weight and plan.grad_weight.transform.draws else (None, kept)
    tokens = view.tokens(g)
    left = right = for_weight = input_draw = grad_input = grad_weight = grad_bias = None
    held = holders(plan.grad_input, ops, tokens.shape[0] * tokens.shape[1] * math.prod(like.weight_shape[1:]))
    aside = Aside(g if needs_input else None)
    if needs_input:
        assert weight is not None  # forward saved it
        input_draw = plan.grad_input.transform.draw(g.device)
        with aside:  # the weight's operand needs nothing of g_y
            right = weight_operand(weight, plan.grad_input, held[1], input_draw, view, ops)
    if needs_input and needs_weight and (fused := fused_arguments(plan, held[0])):
        left, for_weight, grad_bias = grad_output_operands(tokens, fused, draw, needs_bias, ops)
    elif needs_input:
        left = grad_output_operand(tokens, plan.grad_input, held[0], input_draw, ops)

    if left and right:
        with aside:  # the two products need nothing of each other
            grad_input = _grad_input(left, right, tokens, input_draw, layer, ops)
    if needs_weight:
        grad_weight = _grad_weight(g.dtype, tokens, kept, draw, for_weight, layer, ops)
    aside.join()
    return grad_input, grad_weight, grad_bias


def keep(
    x: Tensor, dtype: torch.dtype, plan: LayerPlan, view: View, recipe: Recipe | None = None
) -> tuple[Tensor, ...]:
    """What forward saves of x: the draw, if there is one, then what the buffer saves, or what a recipe makes x of. dtype: what
    the product ran in."""
    path, buffer = plan.grad_weight, plan.buffer
    if recipe is not None and not path.transform.draws:
        return recipe.tensors

    def make() -> tuple[Tensor, ...]:
        draw = path.transform.draw(x.device)
        if recipe is not None:
            return recipe.tensors if draw is None else (draw, *recipe.tensors)
        if _keeps_input(plan):
            return (x.to(dtype),)
        ops = get_ops(plan.backend, x.device.type)
        saved = buffer.save(view.input_rows(x), path.transform, path.input, ops, draw)
        return saved if draw is None else (draw, *saved)

    if torch.compiler.is_compiling():  # the compiler finds common subexpressions by itself
        return make()
    return shared(x, (path.transform, path.input, buffer, plan.backend, view, dtype), make)


def _recipe(x: Tensor, plan: LayerPlan) -> Recipe | None:
    """How backward makes x again, where that is not the buffer's business: of the codes of the op that x came from; or, if
    grad_weight is torch's own, of codes of x in its own order."""
    if torch.compiler.is_compiling():
        return None
    made = recipe_of(x) if plan.buffer.recompute else None
    if made is None and plan.grad_weight.is_exact and isinstance(plan.buffer, Quantized) and can_keep(x):
        made = Kept.of(x, plan.buffer, plan.backend).recipe(x)
    return made


def _keeps_input(plan: LayerPlan) -> bool:
    """Whether grad_weight is torch's own, from x itself."""
    return plan.grad_weight.is_exact and isinstance(plan.buffer, Raw)


def _grad_input(
    a: Operand,
    b: Operand,
    tokens: Tensor,
    draw: Tensor | None,
    layer: _Layer,
    ops: Ops,
) -> Tensor:
    """g_x = g_y w in the shape, dtype and format of x, from both operands. tokens: g_y (samples, tokens, O), whose dtype the
    product has, as torch's own: where autocast made it a narrow one, x's comes last."""
    path, view, like = layer.plan.grad_input, layer.view, layer.like
    samples, length, _ = tokens.shape
    rows = a.codes.shape[0] // samples  # of a sample: its tokens, or the projected ones

    def of_x(a: Operand) -> Tensor:
        found = product(a, b, tokens.dtype, tokens.dtype, ops)
        if path.transform.axis == "tokens":
            projected = found.unflatten(0, (-1, rows)).transpose(1, 2)
            found = path.transform.expand(projected, length, ops, draw).transpose(1, 2).flatten(0, 1)
        return view.input_from_rows(found, like.x_shape, like.x_dtype)

    step = view.samples_at_once(length * b.codes.shape[0]) * rows
    if not step or step >= a.codes.shape[0]:
        return of_x(a).contiguous(memory_format=like.x_format)
    parts = [of_x(some_rows(a, at, step)) for at in range(0, a.codes.shape[0], step)]
    return torch.cat(parts).contiguous(memory_format=like.x_format)


def _grad_weight(
    dtype: torch.dtype,
    tokens: Tensor,
    kept: tuple[Tensor, ...],
    draw: Tensor | None,
    operand: Operand | None,
    layer: _Layer,
    ops: Ops,
) -> Tensor:
    """g_w = g_yᵀ x in the shape and dtype of the weight."""
    plan, view, like, make = layer
    path = plan.grad_weight
    held: Tensor | Operand
    a = operand or encode(tokens.permute(2, 0, 1), path.transform, path.grad_output, ops, draw)
    if make is not None:
        held = view.input_rows(make(kept))
    else:
        held = plan.buffer.load(kept, view.rows_shape(like.x_shape), path.transform, path.input, ops)
    if isinstance(held, Tensor):
        held = encode(view.product_rows(held, like.x_shape), path.transform, path.input, ops, draw)
    return product(a, held, like.weight_dtype, dtype, ops).view(like.weight_shape)
