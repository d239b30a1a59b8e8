"""Ops that run again in backward, on what the codes of their inputs say, and are differentiated there.

T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, with quantized inputs as ActNN, ICML 2021, has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hot.errors import HotError
from hot.executor import as_written, unviewed
from hot.kept import Kept, can_keep
from hot.policies.buffers import Quantized


def recomputed(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    buffer: Quantized,
    backend: str,
    draws: bool = False,
) -> Any:
    """A call that keeps codes of `inputs`, which are among its arguments, and other tensors as they are. draws: whether it uses
    random numbers, which are drawn again. Left as it is where codes are not made for one of the inputs."""
    if not can_keep(*inputs):
        return function(*args, **kwargs)
    return _apply(function, inputs, (), args, kwargs, buffer, backend, draws)


def recomputed_module(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    buffer: Quantized,
    backend: str,
) -> Any:
    """A module's forward that keeps codes of the float tensors among its arguments, and nothing of what happens inside. Raises
    HotError if it returns anything but one tensor."""
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    inputs, parameters = [t for t in given if can_keep(t)], [p for p in module.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not (parameters or any(t.requires_grad for t in inputs)):
        return forward(*args, **kwargs)
    return _apply(forward, inputs, parameters, args, kwargs, buffer, backend, module.training)


def _apply(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    parameters: Sequence[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    buffer: Quantized,
    backend: str,
    draws: bool,
) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    coded = *(any(t is x for x in inputs) for t in tensors), *(False for _ in parameters)
    places = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    call = _Call(function, places, spec, coded, len(tensors), buffer, backend, draws)
    return Recomputed.apply(call, *tensors, *parameters)


_TENSOR = object()


@dataclass(frozen=True)
class _Call:
    """A call whose tensors are taken out. coded: which of them are kept as codes; count: how many are arguments, before the
    parameters that the function uses beside them."""

    function: Callable[..., Any]
    leaves: tuple[Any, ...]  # _TENSOR in the place of one
    spec: TreeSpec
    coded: tuple[bool, ...]
    count: int
    buffer: Quantized
    backend: str
    draws: bool

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        result: Tensor = self.function(*args, **kwargs)
        return result


class Recomputed(torch.autograd.Function):
    """forward: the call. backward: the call again, on the values of the codes, and its own backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        ctx.random = _random_state(tensors[0].device) if call.draws else None
        y = call(tensors)
        if not isinstance(y, Tensor):
            raise HotError(
                f"activations: module: its forward returns a {type(y).__name__}, not one tensor: leave it out"
            )
        if any(ctx.needs_input_grad):
            ctx.kept = [
                Kept.of(t, call.buffer, call.backend) if coded else None
                for t, coded in zip(tensors, call.coded, strict=True)
            ]
            with as_written(y):
                parts = [(t,) if kept is None else kept.save(t) for t, kept in zip(tensors, ctx.kept, strict=True)]
            ctx.save_for_backward(*(t for part in parts for t in part))
            ctx.counts = [len(part) for part in parts]
        ctx.call = call
        ctx.autocast = torch.is_autocast_enabled(y.device.type), torch.get_autocast_dtype(y.device.type)
        return unviewed(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, tensors, needs = iter(ctx.saved_tensors), [], ctx.needs_input_grad[1:]
        with as_written(g):
            for i, (kept, count, need) in enumerate(zip(ctx.kept, ctx.counts, needs, strict=True)):
                part = tuple(islice(saved, count))
                t = part[0] if kept is None else kept.values(part)
                tensors.append(t.detach().requires_grad_(need) if i < ctx.call.count else t)
        enabled, low = ctx.autocast
        with torch.enable_grad(), torch.autocast(g.device.type, low, enabled=enabled), _drawing(ctx.random, g.device):
            y = ctx.call(tensors)
        wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, g, allow_unused=True))
        return None, *(next(found) if need else None for need in needs)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _drawing(state: Tensor | None, device: torch.device) -> AbstractContextManager[object]:
    """A context in which random numbers are those drawn from a state on, and which leaves none of its own."""
    if state is None:
        return nullcontext()
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    return _From(forked, state, device)


class _From(AbstractContextManager[None]):
    def __init__(self, forked: AbstractContextManager[Any], state: Tensor, device: torch.device) -> None:
        self.forked, self.state, self.device = forked, state, device

    def __enter__(self) -> None:
        self.forked.__enter__()
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.state, self.device)
        else:
            torch.set_rng_state(self.state)

    def __exit__(self, *error: Any) -> None:
        self.forked.__exit__(*error)
