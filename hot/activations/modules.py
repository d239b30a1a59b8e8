"""Modules that keep codes of their inputs and nothing of what happens inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hot.activations.fused import norm
from hot.activations.recomputed import recomputed_module
from hot.kept import can_keep
from hot.policies.buffers import Quantized


def kept_whole(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    buffer: Quantized,
    backend: str,
) -> Any:
    """A module's forward, differentiated from codes of its inputs: by one kernel if it is an RMS norm that a model wrote out,
    as most decoders do, else by running it again. Raises HotError if it returns anything but one tensor."""
    x, weight, eps = (
        args[0] if len(args) == 1 else None,
        vars(module).get("_parameters", {}).get("weight"),
        _eps(module),
    )
    if eps is not None and weight is not None and buffer.is_plain and not kwargs and isinstance(x, Tensor):
        wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        fits = can_keep(x) and type(weight) is nn.Parameter and weight.shape == x.shape[-1:]
        if wanted and fits and is_rms_norm(module.hot_base, eps):
            return norm(lambda: forward(x), x, tuple(weight.shape), weight, None, eps, False, buffer, backend)
    return recomputed_module(module, forward, args, kwargs, buffer, backend)


def _eps(module: nn.Module) -> float | None:
    found = vars(module).get("variance_epsilon")
    return found if isinstance(found, float) and len(vars(module)["_parameters"]) == 1 else None


@lru_cache(maxsize=256)
def is_rms_norm(kind: type[nn.Module], eps: float) -> bool:
    """Whether the forward of a class, of which an instance has a weight and transformers' name for eps, is F.rms_norm: told
    by what it gives, in float32 and for rows of any size."""
    made = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 2, 16, generator=made), torch.randn(16, generator=made)
    x = x * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]  # where eps counts, and where it does not
    try:
        y = kind.forward(SimpleNamespace(weight=weight, variance_epsilon=eps), x)
    except Exception:  # it needs more than that, whatever it is
        return False
    want = F.rms_norm(x, (16,), weight, eps)
    return isinstance(y, Tensor) and y.shape == want.shape and bool(torch.allclose(y, want, rtol=1e-4, atol=1e-6))
