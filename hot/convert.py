"""Conversion: the layers of a model, in place, to layers that run their plan in backward; and back.

A converted layer is the same module with another class: its Parameters, buffers, hooks, state_dict keys and the optimizer's
references stay as they are. The class adds one attribute, `hot_plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hot.activations import kept_whole, saving, unwatched
from hot.backends.table import require
from hot.errors import ConversionError
from hot.executor import conv2d, linear
from hot.policies.activations import ActivationPlan
from hot.policies.layers import layers_of, scopes_of
from hot.policies.plan import LayerPlan, Skip
from hot.policies.resolve import resolve, resolve_activations
from hot.policies.schema import Policy
from hot.views import LinearView, View, conv2d_view


class _Converted(nn.Module):
    """What converted layers share: the plan, shown in their repr, and copies and pickles of classes made at run time."""

    hot_plan: LayerPlan

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), str(self.hot_plan))))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        reduced = super().__reduce_ex__(protocol)
        assert isinstance(reduced, tuple)  # a module's is
        made_here = "hot_base" in vars(type(self))
        return (_new, (type(self).hot_base,), *reduced[2:]) if made_here else reduced  # type: ignore[attr-defined]


def _new(base: type[nn.Module]) -> nn.Module:
    kind = _converted_class(base)  # type: ignore[arg-type]  # mypy takes a class for unhashable
    return kind.__new__(kind)


class HotLinear(_Converted, nn.Linear):
    """nn.Linear with the backward pass of `hot_plan`."""

    hot_base: ClassVar[type[nn.Module]] = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        with unwatched():
            return linear(input, self.weight, self.bias, self.hot_plan)


class HotConv2d(_Converted, nn.Conv2d):
    """nn.Conv2d with the backward pass of `hot_plan`."""

    hot_base: ClassVar[type[nn.Module]] = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        padding: tuple[int, ...] | str = self.padding
        if self.padding_mode != "zeros":  # torch pads by itself then, and convolves without
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0, 0)
        with unwatched():
            return conv2d(input, self.weight, self.bias, self.hot_plan, self.stride, padding, self.dilation)  # type: ignore[arg-type]


class _Scoped(_Converted):
    """A module in whose forward ops save what `hot_plan` says. It keeps its class's name, which models are told apart by."""

    hot_plan: ActivationPlan  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.hot_plan
        if plan.whole is not None and not torch.compiler.is_compiling():
            with unwatched():  # nothing inside saves anything
                return kept_whole(self, super().forward, args, kwargs, plan.whole, plan.backend)
        with saving(plan):
            return super().forward(*args, **kwargs)


@cache
def _converted_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class of a converted layer. A subclass that wrappers such as FSDP2 made, with torch's own forward, stays one."""
    if not issubclass(base, (nn.Linear, nn.Conv2d)):
        return type(base.__name__, (_Scoped, base), {"hot_base": base, "__module__": base.__module__})
    ours = HotLinear if issubclass(base, nn.Linear) else HotConv2d
    if base is ours.hot_base:
        return ours
    return type(f"Hot{base.__name__}", (ours, base), {"hot_base": base, "__module__": base.__module__})


@dataclass(frozen=True)
class Report:
    """What became of every layer: its plan, or a Skip with the reason. ``print(report)``; ``report[name]``.

    activations: of the modules whose ops save something else than torch does, what.
    """

    layers: Mapping[str, LayerPlan | Skip]
    kinds: Mapping[str, str]
    activations: Mapping[str, ActivationPlan] = field(default_factory=dict)

    @property
    def converted(self) -> dict[str, LayerPlan]:
        return {name: plan for name, plan in self.layers.items() if isinstance(plan, LayerPlan)}

    @property
    def skipped(self) -> dict[str, Skip]:
        return {name: skip for name, skip in self.layers.items() if isinstance(skip, Skip)}

    def __getitem__(self, name: str) -> LayerPlan | Skip:
        return self.layers[name]

    def __str__(self) -> str:
        """One line a group of layers with the same fate, the layers named."""
        lines = [f"HOT: {len(self.converted)} of {len(self.layers)} layers converted"]
        groups: dict[tuple[str, str], list[str]] = {}
        for name, fate in self.layers.items():
            groups.setdefault((str(fate), self.kinds[name]), []).append(name or "(the model itself)")
        for (what, kind), names in groups.items():
            lines += [f"  {len(names)} × {kind}: {what}", f"      {_shorten(names)}"]
        return "\n".join([*lines, *activation_lines(self.activations)])


def activation_lines(plans: Mapping[str, ActivationPlan]) -> list[str]:
    """Two lines a group of modules whose ops save the same."""
    lines, groups = [], dict[str, list[str]]()
    for name, plan in plans.items():
        groups.setdefault(str(plan), []).append(name or "(the model itself)")
    for what, names in groups.items():
        lines += [f"  in {len(names)} module{'s' * (len(names) > 1)}: {what}", f"      {_shorten(names)}"]
    return lines


def _shorten(names: list[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … and {len(names) - most} more"


def convert(model: nn.Module, policy: Policy) -> Report:
    """Give every layer of `model` the backward pass that `policy` plans for it, in place; a second call replaces the first.

    Works before or after ``.to()``, torch.compile, DDP, FSDP and PEFT wrapping. Raises PolicyError if the policy does not fit
    the model (a rule that matches nothing, …), BackendError if it names a backend that is missing here, and ConversionError if
    no layer was converted and not because the policy says exact; the model is untouched then.
    """
    plans = resolve(policy, model)
    layers, scopes = layers_of(model), scopes_of(model)
    kinds = {layer.name: _base(layer.module).__name__ for layer in layers}
    report = Report(plans, kinds, resolve_activations(policy, model))
    asked_for = policy.defaults.is_exact and not policy.rules  # the policy `exact`: leave everything to torch
    if not report.converted and not report.activations and not asked_for:
        reasons = Counter(str(skip) for skip in report.skipped.values())
        found = "; ".join(f"{count} × {reason}" for reason, count in reasons.items())
        raise ConversionError(
            f"nothing to convert in {type(model).__name__}: {found or 'no nn.Linear and no nn.Conv2d'}"
        )
    made: list[LayerPlan | ActivationPlan] = [*report.converted.values(), *report.activations.values()]
    for backend in {plan.backend for plan in made}:
        require(backend)
    for scope in scopes:
        _restore(scope.module)
        if scope.name in report.activations:
            scope.module.__class__ = _converted_class(type(scope.module))  # type: ignore[arg-type]
            scope.module.hot_plan = report.activations[scope.name]  # type: ignore[assignment]
    for layer in layers:
        plan = plans[layer.name]
        _restore(layer.module)
        if isinstance(plan, LayerPlan):
            layer.module.__class__ = _converted_class(type(layer.module))  # type: ignore[arg-type, assignment]
            layer.module.hot_plan = plan  # type: ignore[assignment]
    return report


def revert(model: nn.Module) -> int:
    """Give every converted layer, and every module with an activation plan, its own class back, in place; returns how many."""
    return sum(_restore(module) for module in model.modules())


def view_of(module: nn.Module) -> View:
    """How a linear or convolution layer is seen as matrix products."""
    if isinstance(module, nn.Conv2d):
        padding = module.padding if module.padding_mode == "zeros" else (0, 0)
        return conv2d_view(module.kernel_size, module.stride, padding, module.dilation)  # type: ignore[arg-type]
    return LinearView()


def _base(module: nn.Module) -> type[nn.Module]:
    return getattr(type(module), "hot_base", type(module))


def _restore(module: nn.Module) -> bool:
    if not hasattr(type(module), "hot_base"):
        return False
    module.__class__ = _own_class(type(module))
    del module.hot_plan
    return True


def _own_class(kind: type) -> type:
    """What a class is without HOT. A subclass that others (FSDP2, parametrizations) made of ours since stays theirs."""
    if "hot_base" in vars(kind):
        return kind.hot_base  # type: ignore[attr-defined]
    if not hasattr(kind, "hot_base"):
        return kind
    content = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__.replace("Hot", "", 1), tuple(map(_own_class, kind.__bases__)), content)
