"""The layers of a model that a policy can speak of, under the names that a person would use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar

import torch
from torch import nn

WRAPPER_SEGMENTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
"""Segments that wrappers (torch.compile, FSDP1, activation checkpointing, PEFT) put into module names."""


@dataclass(frozen=True)
class Scope:
    """A module that activation rules can speak of, and its names: one that is used twice has several."""

    names: tuple[str, ...]
    module: nn.Module

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Layer(Scope):
    """A linear or convolution layer, and why it is skipped, or ""."""

    module: nn.Linear | nn.Conv2d
    reason: str


def layers_of(model: nn.Module) -> list[Layer]:
    """Every nn.Linear and nn.Conv2d of a model, subclasses included, in definition order.

    Names are those of the unwrapped model: DDP's ``module.``, PEFT's ``base_model.model.`` and the like are taken out. The
    model itself may be a layer: its name is "".
    """
    attention = {
        inner for module in model.modules() if isinstance(module, nn.MultiheadAttention) for inner in module.modules()
    }
    named: dict[Any, tuple[str, ...]] = _named(model, nn.Linear | nn.Conv2d)
    return [Layer(names, module, skip_reason(module, module in attention)) for module, names in named.items()]


def scopes_of(model: nn.Module) -> list[Scope]:
    """Every module with a forward of its own, in definition order, but wrappers, layers and what is compiled by torch.jit."""
    prefix = _wrapper_prefix(model)
    wrappers = {model.get_submodule(".".join(prefix.split(".")[:count])) for count in range(prefix.count("."))}
    return [
        Scope(names, module)
        for module, names in _named(model, nn.Module, wrappers).items()
        if not isinstance(module, (nn.Linear, nn.Conv2d, torch.jit.ScriptModule))
        and "forward" not in vars(module)
        and type(module).forward is not nn.Module.forward
    ]


M = TypeVar("M", bound=nn.Module)


def _named(model: nn.Module, kinds: type[M] | UnionType, but: Collection[nn.Module] = ()) -> dict[M, tuple[str, ...]]:
    """The modules of some kinds with all their names, as of the unwrapped model."""
    names: dict[Any, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kinds) and module not in but:
            names.setdefault(module, []).append(name)
    prefix = _wrapper_prefix(model)
    plain = {
        module: tuple(dict.fromkeys(plain_name(name, prefix) for name in found)) for module, found in names.items()
    }
    taken = Counter(name for found in plain.values() for name in found)
    for module, found in plain.items():
        if any(taken[name] > 1 for name in found):  # it is only named as a wrapper's would be: keep its whole name
            plain[module] = tuple(name.removeprefix(prefix) for name in names[module])
    return plain


def _wrapper_prefix(model: nn.Module) -> str:
    """The name of the innermost module that wrappers at the root hold: "module." under DDP, "base_model.model." under PEFT."""
    prefix = ""
    while True:
        kind = type(model).__name__
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            prefix, model = prefix + "module.", model.module
        elif hasattr(model, "_orig_mod"):
            prefix, model = prefix + "_orig_mod.", model._orig_mod  # type: ignore[assignment]
        elif kind == "FullyShardedDataParallel":
            prefix, model = prefix + "_fsdp_wrapped_module.", model._fsdp_wrapped_module  # type: ignore[assignment]
        elif kind.startswith("Peft") and hasattr(model, "base_model") and hasattr(model.base_model, "model"):
            prefix, model = prefix + "base_model.model.", model.base_model.model  # type: ignore[assignment]
        else:
            return prefix


def plain_name(name: str, prefix: str = "") -> str:
    """A module's name without its wrappers: the prefix cut off, then the segments that wrappers put inside."""
    name = name.removeprefix(prefix) if name != prefix.rstrip(".") else ""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)


def skip_reason(module: nn.Linear | nn.Conv2d, in_attention: bool) -> str:
    """Why a layer can't be converted, or "" if it can."""
    base = nn.Linear if isinstance(module, nn.Linear) else nn.Conv2d
    kind = type(module)
    if in_attention:
        return "inside nn.MultiheadAttention, which reads the weight and never calls the layer's forward"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if isinstance(getattr(module, "weight", None), nn.parameter.UninitializedParameter):
        return "lazy: run the model once before it is converted"
    ours = getattr(kind, "hot_base", None)  # a layer that is converted already keeps what it was before
    own = [
        name
        for name in ("forward", "_conv_forward")
        if getattr(ours or kind, name, None) is not getattr(base, name, None)
    ]
    if own:
        return f"{kind.__name__} has its own {own[0]}"
    if not isinstance(module.weight, torch.Tensor) or not module.weight.is_floating_point():
        return f"its weight is {getattr(module.weight, 'dtype', type(module.weight).__name__)}, not a float tensor"
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        return f"groups={module.groups}: only groups=1 is supported"
    return ""
