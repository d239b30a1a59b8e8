"""Memory, measured: the bytes that a forward saves for backward (exact), and the peak while a block of code runs."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hot.policies.layers import layers_of


@dataclass
class SavedBytes:
    """What autograd holds between a forward and its backward, in bytes of distinct storages.

    total: every op, without the model's own parameters and buffers; the batch counts, since the graph keeps it alive.
    layers: by layer name, what each nn.Linear and nn.Conv2d saves; a storage that layers share counts for the first.
    One that another op saves as well (the output of a ReLU is the input of the layer behind it) is in both numbers.
    """

    total: int = 0
    layers: dict[str, int] = field(default_factory=dict)

    @property
    def in_layers(self) -> int:
        return sum(self.layers.values())


class _Held:
    """A saved tensor. Autograd owns it: it goes when the part of the graph that needs it goes."""

    __slots__ = ("__weakref__", "module", "tensor")

    def __init__(self, tensor: Tensor, module: str | None) -> None:
        self.tensor, self.module = tensor, module


@contextmanager
def _holding(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[list[weakref.ref[_Held]]]:
    """What is saved inside the block, in its order, with the innermost of the modules that it happens in."""
    held: list[weakref.ref[_Held]] = []
    inside: list[str] = []

    def pack(tensor: Tensor) -> _Held:
        entry = _Held(tensor, inside[-1] if inside else None)
        held.append(weakref.ref(entry))
        return entry

    with ExitStack() as stack:
        for name, module in modules:
            enter = module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
            leave = module.register_forward_hook(lambda *_: (inside.pop(), None)[1], always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda entry: entry.tensor))
        yield held


def _alive(held: list[weakref.ref[_Held]], model: nn.Module) -> list[tuple[tuple[str, int], _Held]]:
    """What the graph still holds, by storage, without the model's own."""
    own = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    entries = [(_storage(entry.tensor), entry) for reference in held if (entry := reference()) is not None]
    return [(key, entry) for key, entry in entries if key not in own]


@contextmanager
def count_saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Count what the forward inside the block saves: ``with count_saved_bytes(model) as saved: loss = …``.

    The numbers are filled in when the block ends, and are of what is then alive: keep the loss (or the output) alive.
    Numerics, random state and buffers are untouched, so a real training step can run inside. Eager code only:
    torch.compile saves past these hooks.
    """
    saved = SavedBytes()
    with _holding((layer.name, layer.module) for layer in layers_of(model)) as held:
        yield saved
    entries = _alive(held, model)
    sizes = {key: entry.tensor.untyped_storage().nbytes() for key, entry in entries}
    saved.total = sum(sizes.values())
    owners = {key: entry.module for key, entry in reversed(entries) if entry.module is not None}
    saved.layers = dict.fromkeys((layer.name for layer in layers_of(model)), 0)
    for key, name in owners.items():
        saved.layers[name] += sizes[key]


def saved_bytes(model: nn.Module, run: Callable[[], Any]) -> SavedBytes:
    """The bytes that ``run()`` (one forward; return its loss or output) saves for backward."""
    with count_saved_bytes(model) as saved:
        kept = run()
    del kept
    return saved


def saved_by_op(model: nn.Module, run: Callable[[], Any]) -> dict[tuple[str, str], int]:
    """The bytes that ``run()`` (one forward; return its loss or output) saves, by the name of the innermost module and of
    autograd's node: ``("blocks.0.mlp.act", "Gelu")``. In the order of forward; together they are `saved_bytes`'s total.

    A storage that several nodes keep counts for the first. Checkpointed blocks appear with what they keep: their inputs. A node
    that autograd does not show (in graphs of torch.compile) has no name: "".
    """
    with _holding(model.named_modules()) as held:
        kept = run()
    ops = _ops([leaf.grad_fn for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)])
    found: dict[tuple[str, str], int] = {}
    counted = set()
    for key, entry in _alive(held, model):
        if key not in counted:
            counted.add(key)
            at = entry.module or "", ops.get(id(entry), "")
            found[at] = found.get(at, 0) + entry.tensor.untyped_storage().nbytes()
    return found


def _ops(roots: list[Any]) -> dict[int, str]:
    """The node that holds each saved tensor, by the tensor's id: ``GeluBackward0`` is Gelu. Nothing is unpacked, which would
    run a checkpointed block again."""
    ops: dict[int, str] = {}
    seen, stack = {None}, roots
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        name = re.sub(r"Backward\d*$", "", type(node).__name__)
        for attribute in dir(node):
            if attribute.startswith("_raw_saved_"):
                for saved in tree_leaves(getattr(node, attribute)):
                    with suppress(AttributeError, RuntimeError):  # before torch had `data`, or hooks in C++
                        ops[id(saved.data)] = name
        stack += [following for following, _ in node.next_functions]
    return ops


def _storage(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


class PeakMemory:
    """The peak of memory since the meter was made. A second meter on the same device restarts the first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._start = _reset_peak_rss()

    def read(self) -> dict[str, int]:
        """Bytes. CUDA: `allocated` and `reserved`, of torch's allocator. CPU: `rss_growth`, the peak resident size of
        the whole process above that at the start, allocator slack and libraries loaded meanwhile included."""
        if self.device.type == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.max_memory_reserved(self.device),
            }
        return {"rss_growth": _peak_rss() - self._start}


def _reset_peak_rss() -> int:
    """Hand free heap pages back, set the kernel's high-water mark to the present size, and return it."""
    if sys.platform != "linux":  # the mark can't be reset: growth is then above all that came before
        return _peak_rss()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_rss()


def _peak_rss() -> int:
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
