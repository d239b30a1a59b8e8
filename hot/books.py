"""What a step holds at a moment, by account: tensors that are in use, and what is saved for backward, each thing once."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hot.kept import Kept, rows_of
from hot.policies.buffers import Quantized


@lru_cache(maxsize=1024)
def _code_bytes(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, buffer: Quantized, k: int) -> int:
    t = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    kept = Kept.of(t, buffer, "reference", rows_of(shape, k) if k else None)
    return sum(each.numel() * each.element_size() for each in kept.save(t))


class Books:
    """Bytes saved and in use. A storage is known by a number, whatever tensors show it.

    booked: saved bytes by what they are of. makeable: what is kept that a tensor can be made again of, and its bytes.
    first: the module and op that saved a thing first, where `path` says which module runs.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.path = [""]
        self.parameters = {id(p) for p in parameters}
        self.booked: dict[Any, int] = {}
        self.first: dict[Any, tuple[str, str]] = {}
        self.by_layers, self.saved_in_layers = set[Any](), 0  # what of that linear and conv layers keep
        self.keys, self.numbers = dict[int, int](), count()
        self.live: Counter[int] = Counter()  # tensors of a storage
        self.sizes: dict[int, int] = {}
        self.makeable: dict[Any, dict[Any, int]] = {}
        self.tracked: set[int] = set()  # storages that autograd follows
        self.recomputes = 0  # blocks that are running, of which nothing is saved now
        self.inside = dict[Any, int]()  # what the running one saves in backward
        self.origins: dict[int, tuple[int, int, int]] = {}  # what the storage of a cast is of

    def see(self, t: Tensor) -> None:
        """A tensor that is in use until its object goes."""
        key = self.key(t)
        self.sizes[key] = t.untyped_storage().nbytes()
        self.live[key] += 1
        weakref.finalize(t, self.forget, key, t.untyped_storage()._cdata)

    def forget(self, key: int, address: int) -> None:
        """One of a storage's tensors is gone; with the last one goes its number."""
        self.live[key] -= 1
        if self.live[key] <= 0:
            del self.live[key]
            self.tracked.discard(key)
            if self.keys.get(address) == key:
                del self.keys[address]  # which may be another's from now on

    def requires_grad(self, t: Tensor) -> bool:
        """Whether autograd would follow t: a parameter that is trained, or what is made of one."""
        return t.requires_grad if id(t) in self.parameters else self.key(t) in self.tracked

    def key(self, t: Tensor) -> int:
        """A number of a tensor's storage, which no other gets."""
        address = t.untyped_storage()._cdata
        if address not in self.keys:
            self.keys[address] = next(self.numbers)
        return self.keys[address]

    def source(self, t: Tensor) -> tuple[int, int, int]:
        """What a plan keeps t by: storage, offset and version of what autocast cast it from, which is what the plan sees."""
        key = self.key(t)
        return self.origins.get(key, (key, int(t.storage_offset()), t._version))

    def made_of(self, t: Tensor) -> dict[Any, int]:
        """What is kept that the values can be made again of, and its bytes; of most there is nothing."""
        return self.makeable.get(self.source(t), {})

    def now(self) -> int:
        """Bytes at this moment: saved, and in use beside that."""
        saved = {key[1] for key in self.booked if key[0] == "tensor"}
        return sum(self.booked.values()) + sum(self.sizes[key] for key in self.live if key not in saved)

    def book(self, op: str, t: Tensor, in_layer: bool = False, force: bool = False) -> None:
        """A tensor that is saved as it is, once."""
        self.add(op, ("tensor", self.key(t)), t.untyped_storage().nbytes(), in_layer, force)

    def codes(self, op: str, t: Tensor, buffer: Quantized, k: int = 0, in_layer: bool = False) -> dict[Any, int]:
        """Book codes of a tensor, once for all that keep the same of it; k: length of their rows, 0: as `layout_of` has it."""
        key = "codes", self.source(t), t.shape, buffer
        size = _code_bytes(t.shape, t.stride(), t.dtype, buffer, k)
        self.add(op, key, size, in_layer)
        return {key: size}

    def add(self, op: str, key: tuple[Any, ...], size: int, in_layer: bool = False, force: bool = False) -> None:
        """Book bytes under a key, once; those of what runs again in backward are its own, unless forced."""
        if self.recomputes and not force:
            self.inside[key] = size
            return
        if in_layer and key not in self.by_layers:  # whoever else keeps it
            self.by_layers.add(key)
            self.saved_in_layers += size
        if key in self.booked:
            return
        self.booked[key], self.first[key] = size, (self.path[-1], op)

    def by_op(self, beside_inputs: bool = False) -> dict[tuple[str, str], int]:
        """Saved bytes by module and op, each thing with the first; beside_inputs: not those that a layer's input is as well."""
        found: Counter[tuple[str, str]] = Counter()
        for key, size in self.booked.items():
            if not (beside_inputs and key[0] == "tensor" and key in self.by_layers):
                found[self.first[key]] += size
        return dict(found)
