"""Other ops than linear layers and convolutions, with less to save: forward as torch has it, backward from codes or bits.

An op whose backward needs values keeps the codes of its inputs, runs again on what the codes say, and is differentiated there
(T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, with quantized inputs as ActNN, ICML 2021, has them).
An op whose backward asks only which elements passed keeps a bit of each: exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hot.backends import Ops, get_ops
from hot.executor import as_written
from hot.policies.activations import ActivationPlan
from hot.policies.buffers import Quantized
from hot.policies.params import Params
from hot.sharing import shared

COMPRESSED: dict[str, tuple[tuple[Callable[..., Any], ...], tuple[str, ...]]] = {
    "layer_norm": ((F.layer_norm, torch.layer_norm), ("input",)),
    "rms_norm": ((F.rms_norm, torch.rms_norm), ("input",)),
    "group_norm": ((F.group_norm, torch.group_norm), ("input",)),
    "gelu": ((F.gelu,), ("input",)),
    "silu": ((F.silu,), ("input",)),
    "scaled_dot_product_attention": ((F.scaled_dot_product_attention,), ("query", "key", "value")),
}
"""By op: the functions that it is called by, and their first parameters, whose values are kept as codes."""

MASKED: dict[str, tuple[Callable[..., Any], ...]] = {
    "relu": (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
    "dropout": (F.dropout,),
}

_OPS = {function: op for op, (functions, _) in COMPRESSED.items() for function in functions}
_OPS |= {function: op for op, functions in MASKED.items() for function in functions}
_active = threading.local()


@contextmanager
def saving(plan: ActivationPlan) -> Iterator[None]:
    """Inside, ops save what a plan says. Nothing changes where nothing is differentiated, and in compiled graphs, whose
    compiler decides itself what to keep."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or getattr(_active, "plan", None) == plan:
        yield
        return
    before = getattr(_active, "plan", None)
    _active.plan = plan
    try:
        with _Saving(plan) if plan.buffers else nullcontext():
            yield
    finally:
        _active.plan = before


class _Saving(TorchFunctionMode):
    def __init__(self, plan: ActivationPlan) -> None:
        super().__init__()
        self.plan, self.buffers = plan, dict(plan.buffers)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = _OPS.get(function)
        innermost = _active.plan == self.plan  # the plan of a module inside another's speaks for all of its ops
        if op not in self.buffers or not innermost or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if op == "relu":
            return _relu(function, *args, **kwargs)
        if op == "dropout":
            return _dropout(function, *args, **kwargs)
        return _compressed(function, COMPRESSED[op][1], args, kwargs, self.buffers[op], self.plan.backend)


@dataclass(frozen=True)
class _Call:
    """A call whose tensors are taken out. compressed: which of them are kept as codes."""

    function: Callable[..., Any]
    leaves: tuple[Any, ...]  # _TENSOR in the place of one
    spec: TreeSpec
    compressed: frozenset[int]
    buffer: Quantized
    backend: str

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        result: Tensor = self.function(*args, **kwargs)
        return result


_TENSOR = object()


def _compressed(
    function: Callable[..., Any],
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    buffer: Params,
    backend: str,
) -> Tensor:
    """A call that keeps codes of the inputs of some names. Left as it is: what works in place or draws random numbers, which
    running again would repeat, and tensors that codes are not made for."""
    assert isinstance(buffer, Quantized)
    inputs = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
    random = kwargs.get("dropout_p", args[4] if "query" in names and len(args) > 4 else 0.0)
    fits = all(type(x) is Tensor and x.is_floating_point() and x.dim() and x.numel() for x in inputs)
    if random or kwargs.get("inplace") or any(argument is True for argument in args[1:2]) or not fits:
        return function(*args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    kept = frozenset(i for i, t in enumerate(tensors) if any(t is x for x in inputs))
    places = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    call = _Call(function, places, spec, kept, buffer, backend)
    result: Tensor = Recomputed.apply(call, *tensors)
    return result


class Recomputed(torch.autograd.Function):
    """forward: the call. backward: the call again, on the values of the codes, and its own backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        y = call(tensors)
        kept: list[tuple[Tensor, ...]] = []
        if any(ctx.needs_input_grad):
            with as_written(y):
                ops = get_ops(call.backend, y.device.type)
                kept = [_codes(t, call, ops) if i in call.compressed else (t,) for i, t in enumerate(tensors)]
        ctx.save_for_backward(*chain.from_iterable(kept))
        ctx.call, ctx.like = call, [(t.shape, t.dtype, len(own)) for t, own in zip(tensors, kept, strict=False)]
        ctx.autocast = torch.is_autocast_enabled(y.device.type), torch.get_autocast_dtype(y.device.type)
        return torch.ops.aten._unsafe_view(y, y.shape)  # no view: whoever gets it may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        call, saved, tensors = ctx.call, iter(ctx.saved_tensors), []
        ops, needs = get_ops(call.backend, g.device.type), ctx.needs_input_grad[1:]
        with as_written(g):
            for i, (shape, dtype, count) in enumerate(ctx.like):
                kept = tuple(islice(saved, count))
                t = call.buffer.values(kept, shape[-1], dtype, ops).view(shape) if i in call.compressed else kept[0]
                tensors.append(t.detach().requires_grad_(needs[i]))
        enabled, low = ctx.autocast
        with torch.enable_grad(), torch.autocast(g.device.type, low, enabled=enabled):
            y = call(tensors)
        wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, g, allow_unused=True))
        return None, *(next(found) if need else None for need in needs)


def _codes(x: Tensor, call: _Call, ops: Ops) -> tuple[Tensor, ...]:
    """The codes of x, rows along its last axis, and their scale; ops that read one x share them."""

    def make() -> tuple[Tensor, ...]:
        return call.buffer.keep(call.buffer.quantizer.encode(x.reshape(-1, x.shape[-1]), ops), ops)

    return shared(x, ("activation", call.buffer, call.backend), make)


def _relu(function: Any, input: Tensor, inplace: bool = False) -> Tensor:
    inplace = inplace or function in (torch.relu_, Tensor.relu_)
    if type(input) is not Tensor or not input.requires_grad:
        return torch.relu_(input) if inplace else torch.relu(input)
    result: Tensor = Relu.apply(input, inplace)
    return result


class Relu(torch.autograd.Function):
    """torch.relu, which keeps a bit an element instead of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        y = torch.relu_(x) if inplace else torch.relu(x)
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(pack_bits((y <= 0).logical_not_()))  # a NaN passes, as it does in torch
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        return torch.where(unpack_bits(bits, g.shape), g, 0.0), None


def _dropout(function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or inplace or not 0 < p < 1 or type(input) is not Tensor or not input.requires_grad:
        return function(input, p, training, inplace)
    result: Tensor = Dropout.apply(input, p)
    return result


class Dropout(torch.autograd.Function):
    """F.dropout, which keeps a bit an element instead of its factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        if x.is_cuda:
            y, passed = torch.native_dropout(x, p, True)
        else:  # what torch does on other devices, in the same order
            factors = torch.empty_like(x).bernoulli_(1 - p)
            passed = factors != 0
            y = x * factors.div_(1 - p)
        ctx.save_for_backward(pack_bits(passed))
        ctx.factor = 1 / (1 - p) if x.is_cuda else torch.ones((), dtype=x.dtype).div_(1 - p).item()  # rounded, there
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        return torch.where(unpack_bits(bits, g.shape), g * ctx.factor, 0.0), None


def pack_bits(mask: Tensor) -> Tensor:
    """mask, bool, any shape, in its contiguous order → uint8, eight elements to a byte, the first in the lowest bit."""
    flat = mask.flatten().view(torch.uint8)
    flat = F.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    packed = flat[:, 0].clone()
    for bit in range(1, 8):
        packed |= flat[:, bit] << bit
    return packed


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `pack_bits`."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> bits & 1).flatten()[: shape.numel()].view(shape).bool()
