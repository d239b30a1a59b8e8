"""Which calls of torch's functions save what a plan says, and by whom they are served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from hot.activations import bits
from hot.activations.attention import matmul, softmax
from hot.activations.batch_norm import batch_norm
from hot.activations.fused import activation, norm, product
from hot.activations.hook import catching
from hot.activations.losses import cross_entropy
from hot.activations.recomputed import recomputed
from hot.kept import Kept, can_keep, channels_of
from hot.policies.activations import ActivationPlan
from hot.policies.params import Params

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
_active = threading.local()


def saving(plan: ActivationPlan) -> AbstractContextManager[object]:
    """Inside, ops save what a plan says. Nothing changes where nothing is differentiated, and in compiled graphs, whose
    compiler decides itself what to keep."""
    same = (
        torch.compiler.is_compiling() or not torch.is_grad_enabled() or _is_same(getattr(_active, "plan", None), plan)
    )
    return _AS_IT_IS if same else _saving(plan)


@contextmanager
def _saving(plan: ActivationPlan) -> Iterator[None]:
    before = getattr(_active, "plan", None)
    _active.plan = plan
    try:
        with _Saving(plan) if plan.buffers else nullcontext(), catching(plan.other, plan.backend):
            yield
    finally:
        _active.plan = before


def _is_same(a: ActivationPlan | None, b: ActivationPlan) -> bool:
    return a is b or a == b


def unwatched() -> AbstractContextManager[object]:
    """Inside, nothing is looked for: for code of our own, which would pay for every tensor's every attribute."""
    watches = not torch.compiler.is_compiling() and type(_get_current_function_mode()) is _Saving
    return _Unwatched() if watches else _AS_IT_IS


class _Unwatched(AbstractContextManager[None]):
    """torch.overrides._pop_mode_temporarily, which takes four times as long."""

    def __enter__(self) -> None:
        self.mode = _pop_mode()

    def __exit__(self, *error: object) -> None:
        _push_mode(self.mode)


_AS_IT_IS: AbstractContextManager[None] = nullcontext()


class _Saving(TorchFunctionMode):
    def __init__(self, plan: ActivationPlan) -> None:
        super().__init__()
        self.plan = plan
        served = ((*SERVED[op], buffer) for op, buffer in plan.buffers if op in SERVED)
        self.serving = {function: (serve, buffer) for functions, serve, buffer in served for function in functions}

    def __torch_function__(self, function: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        found, kwargs = self.serving.get(function), kwargs or {}
        if found is None:
            return function(*args, **kwargs)
        innermost = _is_same(_active.plan, self.plan)  # the plan of a module inside another's speaks for all of its ops
        if not innermost or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        serve, buffer = found
        return serve(function, args, kwargs, buffer, self.plan.backend)


def _named(names: tuple[str, ...], args: Args, kwargs: Kwargs, *wanted: str) -> list[Any]:
    """The arguments of some names, of parameters in the order of `names`; None for what is not given."""
    return [args[i] if (i := names.index(name)) < len(args) else kwargs.get(name) for name in wanted]


def _differentiates(*tensors: Any) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _gelu(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    x, approximate = _named(("input", "approximate"), args, kwargs, "input", "approximate")
    if not can_keep(x) or not x.requires_grad:
        return function(*args, **kwargs)
    if not buffer.is_plain:
        return recomputed(function, [x], args, kwargs, buffer, backend)
    name = "gelu_tanh" if approximate == "tanh" else "gelu"
    return activation(partial(F.gelu, approximate=approximate or "none"), x, name, buffer, backend)


def _silu(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    x, inplace = _named(("input", "inplace"), args, kwargs, "input", "inplace")
    if inplace or not can_keep(x) or not x.requires_grad:
        return function(*args, **kwargs)
    if not buffer.is_plain:
        return recomputed(function, [x], args, kwargs, buffer, backend)
    return activation(F.silu, x, "silu", buffer, backend)


def _layer_norm(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    names = "input", "normalized_shape", "weight", "bias", "eps"
    x, shape, weight, bias, eps = _named(names, args, kwargs, *names)
    if not can_keep(x) or not _differentiates(x, weight, bias):
        return function(*args, **kwargs)
    if not buffer.is_plain or (weight is None) != (bias is None):
        return recomputed(function, [x], args, kwargs, buffer, backend)
    call = partial(function, *args, **kwargs)
    return norm(call, x, tuple(shape), weight, bias, 1e-5 if eps is None else eps, True, buffer, backend)


def _rms_norm(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    names = "input", "normalized_shape", "weight", "eps"
    x, shape, weight, eps = _named(names, args, kwargs, *names)
    if not can_keep(x) or not _differentiates(x, weight):
        return function(*args, **kwargs)
    if not buffer.is_plain or eps is None:  # the least difference of whatever dtype it then runs in
        return recomputed(function, [x], args, kwargs, buffer, backend)
    return norm(partial(function, *args, **kwargs), x, tuple(shape), weight, None, eps, False, buffer, backend)


def _group_norm(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    return recomputed(function, _named(("input",), args, kwargs, "input"), args, kwargs, buffer, backend)


def _attention(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    names = "query", "key", "value", "attn_mask", "dropout_p"
    *inputs, probability = _named(names, args, kwargs, "query", "key", "value", "dropout_p")
    return recomputed(function, inputs, args, kwargs, buffer, backend, draws=bool(probability))


def _batch_norm(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    return _served_batch_norm(partial(function, *args, **kwargs), buffer, backend, *args, **kwargs)


def _served_batch_norm(
    plain: Callable[[], Tensor],
    buffer: Any,
    backend: str,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    x, mean, var = input, running_mean, running_var
    if not training or not can_keep(x) or not _differentiates(x, weight, bias):
        return plain()
    layout = channels_of(x.shape, x.stride())
    if buffer.is_plain and layout is not None:
        return batch_norm(x, mean, var, weight, bias, momentum, eps, Kept.of(x, buffer, backend, layout))

    def call(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        again = torch.is_grad_enabled()  # in backward, where the running statistics have had their share
        if again:
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
        return F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)

    return recomputed(call, [x], (x, weight, bias), {}, buffer, backend)


def _max_pool(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    return bits.max_pool2d(function, *args, **kwargs)


def _cross_entropy(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    names = "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"
    logits, target, weight, average, ignore, reduce, reduction, smoothing = _named(names, args, kwargs, *names)
    plain = weight is average is reduce is None and not smoothing and can_keep(logits) and logits.dim() == 2
    if not plain or target.is_floating_point() or not logits.requires_grad or not len(target):
        return function(*args, **kwargs)
    return cross_entropy(logits, target, -100 if ignore is None else ignore, reduction or "mean", buffer, backend)


def _mul(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    a, b = args if len(args) == 2 and not kwargs else (0, 0)
    if (
        not (isinstance(a, Tensor) and isinstance(b, Tensor) and can_keep(a, b))
        or a.shape != b.shape
        or a.dtype != b.dtype
        or not _differentiates(a, b)
    ):
        return function(*args, **kwargs)
    return product(a, b, buffer, backend)


def _softmax(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    x, dim = _named(("input", "dim"), args, kwargs, "input", "dim")
    if not isinstance(dim, int) or not can_keep(x) or not x.requires_grad:
        return function(*args, **kwargs)
    return softmax(partial(function, *args, **kwargs), x, dim, buffer, backend)


def _matmul(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    a, b = args if len(args) == 2 and not kwargs else (0, 0)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and can_keep(a, b) and _differentiates(a, b)):
        return function(*args, **kwargs)
    if a.dim() < 2 or a.shape[:-2] != b.shape[:-2] or a.shape[-1:] != b.shape[-2:-1]:  # broadcast, or torch's to refuse
        return function(*args, **kwargs)
    return matmul(partial(function, a, b), a, b, buffer, backend)


def _relu(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    return bits.relu(function, backend, *args, **kwargs)


def _leaky_relu(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    return bits.leaky_relu(function, backend, *args, **kwargs)


def _hardtanh(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    serve = bits.relu6 if function is F.relu6 else bits.hardtanh
    return serve(function, backend, *args, **kwargs)


def _dropout(function: Any, args: Args, kwargs: Kwargs, buffer: Any, backend: str) -> Any:
    return bits.dropout(function, backend, *args, **kwargs)


Serve = Callable[[Any, Args, Kwargs, Params, str], Any]
SERVED: dict[str, tuple[tuple[Callable[..., Any], ...], Serve]] = {
    "layer_norm": ((F.layer_norm, torch.layer_norm), _layer_norm),
    "rms_norm": ((F.rms_norm, torch.rms_norm), _rms_norm),
    "group_norm": ((F.group_norm, torch.group_norm), _group_norm),
    "gelu": ((F.gelu,), _gelu),
    "silu": ((F.silu,), _silu),
    "scaled_dot_product_attention": ((F.scaled_dot_product_attention,), _attention),
    "batch_norm": ((F.batch_norm,), _batch_norm),
    "mul": ((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply), _mul),
    "cross_entropy": ((F.cross_entropy,), _cross_entropy),
    "max_pool2d": ((F.max_pool2d, torch.max_pool2d), _max_pool),
    "relu": ((F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), _relu),
    "leaky_relu": ((F.leaky_relu,), _leaky_relu),
    "hardtanh": ((F.hardtanh, F.relu6), _hardtanh),
    "softmax": ((F.softmax, torch.softmax, Tensor.softmax), _softmax),
    "matmul": ((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _matmul),
    "dropout": ((F.dropout,), _dropout),
}
"""By op: the functions that it is called by, and who serves a call."""
OPS = {function: op for op, (functions, _) in SERVED.items() for function in functions}
"""The op, in the words of policies, that a function is."""
