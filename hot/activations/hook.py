"""The catch-all for ops that no rule knows: whatever autograd saves goes through hooks, which keep codes of it.

It cannot tell a tensor that forgives an error from one that does not (the log-sum-exp of attention, say): rules of their own
for the ops that have them come first, and this only where a policy asks for it. torch.compile saves past hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hot.executor import as_written
from hot.kept import FEWEST_COLUMNS, Kept, can_keep, layout_of
from hot.policies.buffers import Quantized
from hot.sharing import is_made

LEAST = 2**14
"""Elements of a tensor that is worth its codes."""
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_outside = threading.local()


@contextmanager
def catching(buffer: Quantized | None, backend: str) -> Iterator[None]:
    """Inside, float tensors that are large and have rows are saved as codes; a tensor that several ops save, once. Left as they
    are: parameters and views of them, and what HOT itself saves. None: nothing is caught, inside others that catch as well.

    Hooks from outside (offloading, counting) get the codes, as they would get the tensors.
    """
    before: Hooks | None = getattr(_outside, "hooks", None)
    if buffer is None and before is None:
        yield
        return
    outer = before or torch._C._autograd._top_saved_tensors_default_hooks(True) or (_same, _same)
    _outside.hooks = None if buffer is None else outer
    try:
        with saved_tensors_hooks(*(outer if buffer is None else _coding(buffer, backend, *outer))):
            yield
    finally:
        _outside.hooks = before


def _same(t: Any) -> Any:
    return t


def _coding(
    buffer: Quantized, backend: str, outer_pack: Callable[[Tensor], Any], outer_unpack: Callable[[Any], Tensor]
) -> Hooks:
    def pack(t: Tensor) -> tuple[Kept | None, tuple[Any, ...]]:
        if not _takes(t):
            return None, (outer_pack(t),)
        kept = Kept.of(t, buffer, backend)
        with torch.no_grad(), as_written(t):
            return kept, tuple(map(outer_pack, kept.save(t)))

    def unpack(saved: tuple[Kept | None, tuple[Any, ...]]) -> Tensor:
        kept, held = saved
        tensors = tuple(map(outer_unpack, held))
        if kept is None:
            return tensors[0]
        with torch.no_grad(), as_written(tensors[0]):
            return kept.values(tensors)

    return pack, unpack


def _takes(t: Tensor) -> bool:
    origin = t if t._base is None else t._base
    if not can_keep(t) or t.numel() < LEAST or (origin.is_leaf and origin.requires_grad) or is_made(t):
        return False
    return t.shape[-1] > 1 and layout_of(t.shape, t.stride()).k >= FEWEST_COLUMNS
