"""A forward watched call by call: what every op saves for backward, and what its backward reads and writes.

It runs on meta tensors, without memory or time; casts are CUDA's autocast's, and codes those of the code that makes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hot.activations.calls import OPS, SERVED
from hot.bench.steps import Variant
from hot.books import Books
from hot.convert import view_of
from hot.crossover import Point, judge
from hot.executor import keep
from hot.kept import can_keep, channels_of
from hot.policies.activations import ActivationPlan
from hot.policies.buffers import Quantized
from hot.policies.layers import layers_of, scopes_of
from hot.policies.plan import LayerPlan
from hot.policies.quantizers import Quantizer
from hot.policies.resolve import resolve, resolve_activations
from hot.views import View

LOW = {F.linear, F.conv2d, F.scaled_dot_product_attention, *SERVED["matmul"][0]}
"""What autocast runs in bf16 (of what models here call)."""
WIDE = {
    F.layer_norm, torch.layer_norm, F.group_norm, F.log_softmax, F.cross_entropy, torch.exp, torch.pow, Tensor.pow, torch.rsqrt,
    Tensor.rsqrt, *SERVED["softmax"][0],
}  # fmt: skip
"""What it runs in float32."""
OUTPUT = {torch.rsqrt, torch.exp, torch.tanh, torch.sigmoid, Tensor.rsqrt}
"""What keeps its result; of the others in UNARY the input."""
UNARY = {torch.pow, Tensor.pow, F.gelu, F.silu, torch.cos, torch.sin}


@dataclass
class Event:
    """One op: bytes that it saved, that its backward reads and writes beside that, and those of its weights' gradients."""

    saved: int
    moved: int
    gradients: int


def _statistics(op: str, x: Tensor, args: tuple[Any, ...]) -> int:
    """How many means a norm takes: of every channel, or of every group or row of a sample."""
    if op == "batch_norm":
        return x.shape[1]
    return x.shape[0] * int(args[1]) if op == "group_norm" else x.numel() // math.prod(args[1])


def _has_no_kernel(query: Tensor, key: Tensor) -> bool:
    """Whether torch has no fused kernel for this attention: none for heads that share keys, in float32."""
    return query.dtype == torch.float32 and query.shape[1] != key.shape[1]


@lru_cache(maxsize=1024)
def _kept_bytes(shape: torch.Size, dtype: torch.dtype, product: torch.dtype, plan: LayerPlan, view: View) -> int:
    kept = keep(torch.empty(shape, dtype=dtype, device="meta"), product, plan, view)
    return sum(t.numel() * t.element_size() for t in kept)


class Ledger(TorchFunctionMode):
    """The books of one forward, under a policy and a precision; with each op's bytes in backward, and the bit operations and
    bytes of layers as papers count them."""

    def __init__(self, model: nn.Module, variant: Variant, points: Sequence[Point]) -> None:
        super().__init__()
        self.low = torch.bfloat16 if variant.low else None
        self.points = points
        plans = {} if variant.policy is None else resolve(variant.policy, model)
        self.layers = {id(layer.module.weight): (layer, plans.get(layer.name)) for layer in layers_of(model)}
        found = {} if variant.policy is None else resolve_activations(variant.policy, model)
        self.scopes = {scope.module: found[scope.name] for scope in scopes_of(model) if scope.name in found}
        self.names = {module: name for name, module in model.named_modules()}
        self.books, self.active = Books(model.parameters()), list[ActivationPlan]()
        self.events, self.peak, self.before = list[Event](), 0, 0
        self.published, self.bops, self.bops_by_layer = 0, Counter[str](), dict[str, Counter[str]]()
        self.casts: list[tuple[Tensor, Tensor]] = []  # of parameters

    @contextmanager
    def watching(self, model: nn.Module, blocks: list[nn.Module]) -> Iterator[None]:
        """Sees the calls of a forward, and in which module they are."""
        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        self.blocks = set(blocks)
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.books.path.append(self.names[module])
        if module in self.scopes:
            self.active.append(self.scopes[module])
        if module in self.blocks:
            self.books.recomputes += 1
            self.books.inside, self.before, self.first = {}, sum(self.books.booked.values()), len(self.events)
            for x in [*args, *kwargs.values()]:
                if isinstance(x, Tensor) and x.is_floating_point():
                    self.books.book("checkpoint", x, force=True)
        plan = self.scopes.get(module)
        if plan is not None and plan.whole is not None:
            given = [x for x in tree_leaves((args, kwargs)) if can_keep(x)]
            if any(map(self.books.requires_grad, [*given, *module.parameters()])):
                for x in given:
                    self.books.codes("module", x, plan.whole)
            self.books.recomputes += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.books.path.pop()
        plan = self.scopes.get(module)
        if plan is not None:
            self.active.pop()
            self.books.recomputes -= plan.whole is not None
        if module in self.blocks:
            self.books.recomputes -= 1
            inputs = sum(self.books.booked.values()) - self.before
            most = max((event.moved for event in self.events[self.first :]), default=0)
            self.events.append(Event(inputs, sum(self.books.inside.values()) + most, 0))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.low is not None and function in LOW | WIDE:
            wanted = self.low if function in LOW else torch.float32
            args = tuple(self._cast(a, wanted) for a in args)
            kwargs = {name: self._cast(a, wanted) for name, a in kwargs.items()}
        if function is Tensor.__bool__:  # models ask of values whether the plain case is given, and there are none here
            return True
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        parts = self.books.made_of(tensors[0]) if tensors else {}
        y = function(*args, **kwargs)
        if function is F.scaled_dot_product_attention:  # CUDA's kernels write heads beside each other
            y = y.transpose(1, 2).contiguous().transpose(1, 2)
        if function is F.conv2d and args[0].dim() == 4 and channels_of(args[0].shape, args[0].stride()):
            y = y.contiguous(memory_format=torch.channels_last)  # as its input lies, and meta's may not
        results = [
            t for t in (y if isinstance(y, (tuple, list)) else [y]) if isinstance(t, Tensor) and type(t) is Tensor
        ]
        for t in results:
            self.books.see(t)
        before = sum(self.books.booked.values())
        differentiates = any(map(self.books.requires_grad, tensors))
        if differentiates:
            self.books.tracked.update(map(self.books.key, results))
        if differentiates and results and results[0].is_floating_point():
            inside = self._account(function, args, kwargs, tensors, results[0], parts)
            moved = [t for t in (*tensors, results[0]) if t.is_floating_point() and id(t) not in self.books.parameters]
            new = {self.books.key(t): t.untyped_storage().nbytes() for t in moved}
            weights = sum(t.numel() * 4 for t in tensors if id(t) in self.books.parameters and t.requires_grad)
            views = self.books.key(results[0]) in map(self.books.key, tensors)
            saved = sum(self.books.booked.values()) - before
            self.events.append(Event(saved, 0 if views else sum(new.values()) + inside, weights))
        self.peak = max(self.peak, self.books.now())
        return y

    def _cast(self, t: Any, dtype: torch.dtype) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype == dtype:
            return t
        cast = t.to(dtype)
        if id(t) in self.books.parameters:  # made once for a step, and held by autocast
            self.books.parameters.add(id(cast.requires_grad_(t.requires_grad)))
            self.casts.append((cast, t))
        else:
            self.books.see(cast)
            self.books.origins[self.books.key(cast)] = self.books.source(t)
            if self.books.requires_grad(t):
                self.books.tracked.add(self.books.key(cast))
        return cast

    def _account(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor], y: Tensor, parts: Any) -> int:
        """Book what the op saves. parts: what its input could be made of before the call.

        Returns the bytes of gradients that live inside the op, between that of its result and that of its input.
        """
        buffers = dict(self.active[-1].buffers) if self.active else {}
        op = OPS.get(function, getattr(function, "__name__", ""))  # the name that policies have for it
        buffer = buffers.get(op)
        x = tensors[0]
        made = self.books.key(y)
        if function in (F.linear, F.conv2d):
            self._layer(op, function, args, y)
        elif function is F.scaled_dot_product_attention:
            if buffer is None and _has_no_kernel(tensors[0], tensors[1]):
                return self._attention(op, tensors[0], tensors[1].shape[-2], made)
            for t in tensors[:3]:
                self.books.codes(op, t, buffer) if isinstance(buffer, Quantized) else self.books.book(op, t)
            if buffer is None:
                self.books.book(op, y)
                self.books.add(op, ("lse", made), y.numel() // y.shape[-1] * 4)
        elif op in ("layer_norm", "rms_norm", "group_norm", "batch_norm"):
            if isinstance(buffer, Quantized):
                if op != "batch_norm":
                    self.books.codes(op, x, buffer, 0 if op == "group_norm" else math.prod(args[1]))
                elif channels_of(x.shape, x.stride()):
                    self.books.add(op, ("statistics", made), 8 * x.shape[1])
                    # Whoever makes the result again reads the statistics, too.
                    codes = self.books.codes(op, x, buffer, x.shape[1])
                    self.books.makeable[self.books.source(y)] = {**codes, ("statistics", made): 8 * x.shape[1]}
                else:
                    self.books.codes(op, x, buffer)
            else:
                self.books.book(op, x)
                self.books.add(op, ("statistics", made), 8 * _statistics(op, x, args))
        elif op in ("gelu", "silu") and isinstance(buffer, Quantized):
            self.books.makeable[self.books.source(y)] = self.books.codes(op, x, buffer)
        elif op == "mul" and len(tensors) == 2:
            self._product(op, tensors, buffer, y)
        elif op == "matmul":
            self._product(op, tensors[:2], buffer, y, makes=False)
        elif op == "softmax":
            self.books.codes(op, y, buffer) if isinstance(buffer, Quantized) else self.books.book(op, y)
        elif op in ("leaky_relu", "hardtanh"):
            self.books.book(op, x) if buffer is None else self.books.add(op, ("bits", made), y.numel() // 8)
        elif op == "relu":
            if buffer is None:
                self.books.book(op, y)
            else:
                self.books.add(op, ("bits", made), y.numel() // 8)
                if parts:
                    self.books.makeable[self.books.source(y)] = parts
        elif op == "dropout" and (args[1] if len(args) > 1 else kwargs.get("p", 0.5)) > 0:
            self.books.add(op, ("mask", made), y.numel() // (1 if buffer is None else 8))
        elif op == "max_pool2d":
            if buffer is None:
                self.books.book(op, x)
            self.books.add(op, ("places", made), y.numel() * (8 if buffer is None else 1))
        elif op == "cross_entropy":
            if isinstance(buffer, Quantized):
                self.books.codes(op, x, buffer, x.shape[-1])
            else:
                self.books.add(op, ("chances", made), x.numel() * x.element_size())
                return x.numel() * x.element_size()  # that of log_softmax
        elif function in OUTPUT or function in UNARY:
            self.books.book(op, y if function in OUTPUT else x)
        return 0

    def _attention(self, op: str, query: Tensor, keys: int, made: int) -> int:
        """Attention that torch composes: scaled copies of query, key and value, for each head its own, and all the chances,
        whose gradient and that of what they are made of live inside."""
        for name in ("query", "key", "value"):
            self.books.add(op, (name, made), query.numel() * query.element_size())
        chances = query.numel() // query.shape[-1] * keys * query.element_size()
        self.books.add(op, ("chances", made), chances)
        return 2 * chances

    def _product(self, op: str, tensors: list[Tensor], buffer: Any, y: Tensor, makes: bool = True) -> None:
        """A product of two, element by element or of matrices; of the former the result can be made again (makes)."""
        a, b = tensors
        fits = a.shape == b.shape if makes else a.shape[:-2] == b.shape[:-2] and a.dim() > 1
        if fits and isinstance(buffer, Quantized) and all(map(self.books.requires_grad, tensors)):
            of_a, of_b = (self.books.made_of(t) or self.books.codes(op, t, buffer) for t in tensors)
            if makes:
                self.books.makeable[self.books.source(y)] = of_a | of_b
            return
        for t, other in ((a, b), (b, a)):
            if id(t) not in self.books.parameters and self.books.requires_grad(other):
                self.books.book(op, t)

    def _layer(self, op: str, function: Any, args: Any, y: Tensor) -> None:
        x, weight = args[0], args[1]
        origin = next((p for cast, p in self.casts if cast is weight), weight)
        layer, plan = self.layers.get(id(origin), (None, None))
        if isinstance(plan, LayerPlan) and layer is not None:
            verdict = judge(self.points, x.shape, x.dtype, origin.shape, plan, view_of(layer.module))
            plan = None if plan.backend == "auto" and verdict and verdict.leaves_exact else plan
        self._operations(x, weight, y, plan if isinstance(plan, LayerPlan) else None, origin.requires_grad)
        if not isinstance(plan, LayerPlan) or layer is None:
            both = function is F.conv2d  # which keeps both operands whoever is differentiated
            if both or origin.requires_grad:
                self.books.book(op, x, in_layer=True)
            if origin is not weight and (both or self.books.requires_grad(x)):
                self.books.add(op, ("weight", id(origin)), weight.numel() * weight.element_size(), in_layer=True)
            return
        if not origin.requires_grad:
            return
        if plan.buffer.recompute and (parts := self.books.made_of(x)):
            for key, size in parts.items():
                self.books.add(op, key, size, in_layer=True)
            return
        if plan.grad_weight.is_exact and isinstance(plan.buffer, Quantized):
            self.books.codes(op, x, plan.buffer, in_layer=True)
            return
        size = _kept_bytes(x.shape, x.dtype, y.dtype, plan, view_of(layer.module))
        self.books.add(
            op, ("kept", self.books.source(x), x.shape, view_of(layer.module), plan.text), size, in_layer=True
        )

    def _operations(self, x: Tensor, weight: Tensor, y: Tensor, plan: LayerPlan | None, trained: bool) -> None:
        """Bit operations of the three products: multiply-adds times the bits of both operands."""
        macs, full = y.numel() * weight.numel() // weight.shape[0], 8 * x.element_size()
        bops = Counter(forward=macs * full * full)

        def bits(quantizer: Quantizer) -> int:
            return full if quantizer.is_identity else quantizer.code_bits

        pairs = ((full, full),) * 2
        share = 1.0
        if plan is not None:
            pairs = tuple((bits(a), bits(b)) for a, b in (plan.grad_input.quantizers, plan.grad_weight.quantizers))  # type: ignore[assignment]
            length = max(y.numel() // y.shape[-1], 1)
            share = plan.grad_weight.transform.projected_length(length) / length
        if trained:
            self.published += int(x.numel() * share * (full if plan is None else bits(plan.grad_weight.input)) / 8)
        bops["grad_input"] = macs * pairs[0][0] * pairs[0][1]
        bops["grad_weight"] = int(macs * share * pairs[1][0] * pairs[1][1]) if trained else 0
        self.bops.update(bops)
        self.bops_by_layer.setdefault(self.books.path[-1], Counter()).update(bops)
