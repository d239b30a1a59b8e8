"""The one autograd function that runs any plan: forward as torch has it, backward as the plan says.

For y = x wᵀ: grad_input g_x = g_y w, contracted over the outputs; grad_weight g_w = g_yᵀ x, contracted over the tokens.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hot.backends import AUTO, Ops, get_ops
from hot.backends.ops import in_float8
from hot.backends.streams import Aside
from hot.crossover import leaves_exact
from hot.errors import HotError
from hot.kept import Kept, can_keep
from hot.policies.buffers import UNTRANSFORMED, Quantized, Raw
from hot.policies.encode import encode
from hot.policies.plan import GradInputPlan, LayerPlan
from hot.policies.quantizers import Operand
from hot.policies.transforms import Transform
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


def _as_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands as autocast would cast them, in copies of our own: those that it makes of weights it holds until its end,
    half of the model again at the peak, and backward needs none of them."""
    kind = x.device.type
    if kind == "meta" or torch.compiler.is_compiling() or not torch.is_autocast_enabled(kind):
        return x, weight, bias
    low = torch.get_autocast_dtype(kind)
    return _cast(x, low), _cast(weight, low), None if bias is None else _cast(bias, low)


def _cast(t: Tensor, low: torch.dtype) -> Tensor:
    return t.to(low) if t.dtype != low and t.is_floating_point() and t.dtype != torch.float64 else t


class Hot(torch.autograd.Function):
    """forward: torch's own op, plus what the plan saves. backward: the plan's two products and the exact bias gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: LayerPlan, view: View) -> Tensor:
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        given = _as_autocast(x, weight, bias)
        if torch.compiler.is_compiling():  # whose graph has autocast's own copies
            y = view.forward(*given)
        with as_written(x):  # autocast would cast the transforms' own products
            if not torch.compiler.is_compiling():
                y = view.forward(*given)
            made = _recipe(x, plan) if needs_weight and x.numel() else None
            kept = keep(x, y.dtype, plan, view, made) if needs_weight and x.numel() else ()
        ctx.save_for_backward(weight if needs_input else None, *kept)
        ctx.plan, ctx.view, ctx.make, ctx.like = (
            plan,
            view,
            None if made is None else made.make,
            Like.of(x, weight, bias),
        )
        return unviewed(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs, like = ctx.needs_input_grad[:3], ctx.like
        if not g.numel() or not like.x_shape.numel():
            return (*_of_nothing(g, needs, ctx.view, like), None, None)
        with as_written(g):  # as in forward; backward may be called under autocast
            return (*_backward(g, weight, tuple(kept), needs, ctx.plan, ctx.view, like, ctx.make), None, None)


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
    plan: LayerPlan,
    view: View,
    like: Like,
    make: Make | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, weight and bias; None for one that nobody needs. What paths that are torch's own compute, they
    compute at once; the others, each by its product."""
    needs_input, needs_weight, needs_bias = needs
    x = _exact_input(kept, plan, make) if needs_weight else None
    own = needs_input and plan.grad_input.is_exact
    grad_input = grad_weight = grad_bias = None
    if own or x is not None:
        given = _to(x, g.dtype), _to(weight, g.dtype) if own else None
        grad_input, grad_weight = view.exact(g, *given, like)
        del given
    left = needs_input and not own, needs_weight and x is None, needs_bias
    if left[0] or left[1]:
        products = _products(g, weight, kept, left, plan, view, like, make)
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
    plan: LayerPlan,
    view: View,
    like: Like,
    make: Make | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input and weight, where needed, as the plan's products; that of the bias where it comes with them."""
    needs_input, needs_weight, needs_bias = needs
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
            right = _weight_operand(weight, plan.grad_input, held[1], input_draw, view, ops)
    if needs_input and needs_weight and (fused := _fused(plan, held[0])):
        left, for_weight, grad_bias = _grad_output_operands(tokens, fused, draw, needs_bias, ops)
    elif needs_input:
        left = _grad_output_operand(tokens, plan.grad_input, held[0], input_draw, ops)

    if left and right:
        with aside:  # the two products need nothing of each other
            grad_input = _grad_input(left, right, tokens, input_draw, plan.grad_input, view, like, ops)
    if needs_weight:
        grad_weight = _grad_weight(g, tokens, kept, draw, for_weight, plan, view, like, ops, make)
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


class _Fused(NamedTuple):
    """What `grad_output_operands` is told of a plan: its arguments before and behind w_draw, and the K-block of each scale."""

    before: tuple[Any, ...]
    behind: tuple[Any, ...]
    groups: tuple[int, int]


def _fused(plan: LayerPlan, held: str | None) -> _Fused | None:
    """How both paths' operands are made from one read of g_y, or None where one of them has no spec that says so. held: the
    format of grad_input's codes, where it is not the plan's."""
    return _fuse(plan, held) if torch.compiler.is_compiling() else _fused_once(plan, held)


def _fuse(plan: LayerPlan, held: str | None) -> _Fused | None:
    inputs, weights = plan.grad_input, plan.grad_weight
    if inputs.transform.axis == "tokens" or inputs.transform.draws:
        return None
    parts = inputs.transform, inputs.grad_output, weights.transform, weights.grad_output
    specs = [part.spec for part in parts if part.spec is not None]
    if len(specs) < len(parts) or specs[0]["prefix"] or specs[0]["tail"] != "pad":
        return None
    rows, columns = {**specs[1], "format": held or specs[1]["format"]}, specs[3]
    before = *_values(specs[0], *_TRANSFORM[:3]), *_values(rows, *_QUANTIZER), *_values(specs[2], *_TRANSFORM)
    return _Fused(before, _values(columns, *_QUANTIZER), (rows["group"], columns["group"]))


def _values(spec: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(spec[name] for name in names)


_fused_once = lru_cache(maxsize=1024)(_fuse)
_TRANSFORM = "block", "rows", "signs", "prefix", "tail"
_QUANTIZER = "format", "granularity", "group", "rounding", "clip"
"""The arguments of the ops that say a transform and a quantizer, in their order."""


def holders(path: GradInputPlan, ops: Ops, numel: float = math.inf) -> tuple[str | None, str | None]:
    """The formats that hold grad_input's codes as float8 where the backend multiplies them so, exactly; else None for both.

    numel: elements of the product; without it, a large one. Nothing of this path is saved, so the holder is the backend's own
    business. Scales a block go with integers, but for blocks and tiles of 128, which float8 products know.
    """
    a, b = (quantizer.spec for quantizer in path.quantizers)
    if numel < ops.float8 or ops.float8 == math.inf or a is None or b is None:
        return None, None
    scales = (a["granularity"], a["group"]), (b["granularity"], b["group"])
    factors_out = all(granularity in ("row", "tensor") for granularity, _ in scales)
    if not factors_out and scales != (("block", 128), ("tile", 128)):
        return None, None
    formats = in_float8(a["format"]), in_float8(b["format"])
    return formats if all(formats) else (None, None)


def _grad_output_operands(
    tokens: Tensor, fused: _Fused, draw: Tensor | None, bias: bool, ops: Ops
) -> tuple[Operand, Operand, Tensor | None]:
    """grad_output's operand for each path and the exact bias gradient, from one read of g_y."""
    made = ops.grad_output_operands(tokens, *fused.before, draw, *fused.behind, bias)
    i_codes, i_scale, w_codes, w_scale, grad_bias = made
    i_group, w_group = fused.groups
    return Operand(i_codes, i_scale, i_group), Operand(w_codes, w_scale, w_group), grad_bias if bias else None


def _contracted(path: GradInputPlan, draw: Tensor | None) -> tuple[Transform, Tensor | None]:
    """The transform of O, the contracted axis, and its draw: none where the plan's is one of the tokens."""
    return (UNTRANSFORMED, None) if path.transform.axis == "tokens" else (path.transform, draw)


def _weight_operand(
    weight: Tensor, path: GradInputPlan, held: str | None, draw: Tensor | None, view: View, ops: Ops
) -> Operand:
    """The weight's operand for grad_input."""
    transform, own = _contracted(path, draw)
    return encode(view.weight_rows(weight), transform, path.weight, ops, own, held)


def _grad_output_operand(
    tokens: Tensor, path: GradInputPlan, held: str | None, draw: Tensor | None, ops: Ops
) -> Operand:
    """grad_output's operand for grad_input alone; a transform of the tokens projects them first, the LBP-WHT way."""
    transform, own = _contracted(path, draw)
    if path.transform.axis == "tokens":
        tokens = path.transform.project(tokens.permute(2, 0, 1), ops, draw).permute(1, 2, 0)
    rows = tokens.reshape(-1, 1, tokens.shape[2])
    return encode(rows, transform, path.grad_output, ops, own, held)


def _grad_input(
    a: Operand,
    b: Operand,
    tokens: Tensor,
    draw: Tensor | None,
    path: GradInputPlan,
    view: View,
    like: Like,
    ops: Ops,
) -> Tensor:
    """g_x = g_y w in the shape, dtype and format of x, from both operands. tokens: g_y (samples, tokens, O), whose dtype the
    product has, as torch's own: where autocast made it a narrow one, x's comes last."""
    samples, length, _ = tokens.shape
    rows = a.codes.shape[0] // samples  # of a sample: its tokens, or the projected ones

    def of_x(a: Operand) -> Tensor:
        product = _product(a, b, tokens.dtype, tokens.dtype, ops)
        if path.transform.axis == "tokens":
            projected = product.unflatten(0, (-1, rows)).transpose(1, 2)
            product = path.transform.expand(projected, length, ops, draw).transpose(1, 2).flatten(0, 1)
        return view.input_from_rows(product, like.x_shape, like.x_dtype)

    step = view.samples_at_once(length * b.codes.shape[0]) * rows
    if not step or step >= a.codes.shape[0]:
        return of_x(a).contiguous(memory_format=like.x_format)
    parts = [of_x(_rows(a, at, step)) for at in range(0, a.codes.shape[0], step)]
    return torch.cat(parts).contiguous(memory_format=like.x_format)


def _grad_weight(
    g: Tensor,
    tokens: Tensor,
    kept: tuple[Tensor, ...],
    draw: Tensor | None,
    operand: Operand | None,
    plan: LayerPlan,
    view: View,
    like: Like,
    ops: Ops,
    make: Make | None,
) -> Tensor:
    """g_w = g_yᵀ x in the shape and dtype of the weight."""
    path = plan.grad_weight
    held: Tensor | Operand
    a = operand or encode(tokens.permute(2, 0, 1), path.transform, path.grad_output, ops, draw)
    if make is not None:
        held = view.input_rows(make(kept))
    else:
        held = plan.buffer.load(kept, view.rows_shape(like.x_shape), path.transform, path.input, ops)
    if isinstance(held, Tensor):
        held = encode(view.product_rows(held, like.x_shape), path.transform, path.input, ops, draw)
    return _product(a, held, like.weight_dtype, g.dtype, ops).view(like.weight_shape)


def _product(a: Operand, b: Operand, dtype: torch.dtype, low: torch.dtype, ops: Ops) -> Tensor:
    """a bᵀ in dtype. An operand that is not quantized makes it a float product in low, the dtype of the gradient."""
    if a.scale is not None and b.scale is not None:
        return ops.matmul(a.codes, a.scale, a.group, b.codes, b.scale, b.group, dtype)
    left, right = (
        operand.codes.to(low)
        if operand.scale is None
        else ops.dequantize(operand.codes, operand.scale, operand.group, low)
        for operand in (a, b)
    )
    return (left @ right.T).to(dtype)


def _rows(operand: Operand, at: int, step: int) -> Operand:
    """Some rows of an operand, with their scales."""
    codes, scale, group = operand
    own = scale[at : at + step] if scale is not None and scale.shape[0] > 1 else scale
    return Operand(codes[at : at + step], own, group)
