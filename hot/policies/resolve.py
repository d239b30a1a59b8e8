"""A policy and a model, resolved into one plan per layer, with the reasons for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from torch import nn

from hot.errors import UnknownNameError, did_you_mean
from hot.policies.activations import ACTIVATIONS, EVERYTHING_RAW, ActivationPlan, activation_plan
from hot.policies.blocks import EXACT, build, build_plan, plain
from hot.policies.buffers import Quantized, Raw
from hot.policies.layers import Layer, Scope, layers_of, scopes_of
from hot.policies.plan import LayerPlan, Skip
from hot.policies.reading import Rule
from hot.policies.save import flow
from hot.policies.schema import Policy
from hot.policies.yaml_source import Mark, Node, Problems, join

DEFAULTS = "the policy's defaults"


@dataclass(frozen=True)
class Step:
    """One thing that made a layer's plan: the defaults, a rule or the layer itself, and what it changed.

    changes: ``{path: (old, new)}`` where None stands for a field that was not written.
    """

    source: str
    changes: dict[str, tuple[Any, Any]]

    def __str__(self) -> str:
        lines = [f"  {path}: {flow(old)} → {flow(new)}" for path, (old, new) in self.changes.items()]
        return "\n".join([self.source, *(lines or ["  changes nothing"])])


@dataclass(frozen=True)
class Resolution:
    """What a policy makes of one layer: its plan or the reason why it has none, the steps to it, and who decided."""

    layer: Layer
    plan: LayerPlan | Skip
    steps: tuple[Step, ...]
    decided_by: str


def resolve(policy: Policy, model: nn.Module) -> dict[str, LayerPlan | Skip]:
    """The plan of every linear and convolution layer of a model, or why it is left exact, by name. Changes neither.

    Raises PolicyError with every rule that matches no layer (unless it is optional), every combination of rules that
    makes no plan, and all layers that share a weight but not a plan.
    """
    return {name: found.plan for name, found in resolve_detailed(policy, model).items()}


def resolve_detailed(policy: Policy, model: nn.Module) -> dict[str, Resolution]:
    """`resolve` with the way to each plan, for tables and explanations. Raises the same."""
    layers = layers_of(model)
    applied = [tuple(i for i, rule in enumerate(policy.rules) if rule.match.matches(layer)) for layer in layers]
    problems = Problems()
    _check_all_match(policy.rules, layers, set().union(*applied), problems, "layer")
    by_rules: dict[tuple[int, ...], LayerPlan | None] = {}
    for layer, rules in zip(layers, applied, strict=True):
        if rules not in by_rules:
            found = Problems()
            by_rules[rules] = build_plan(_trees(policy, rules)[-1], policy.backend, found)
            for mark, message in found.found:
                problems.add(mark, f"{message} (in layer {layer.name!r})")
    plans = [by_rules[rules] for rules in applied]
    _check_shared_weights(policy, layers, applied, plans, problems)
    problems.raise_any()
    steps = lru_cache(maxsize=None)(lambda rules: _steps(policy, rules))
    return {
        layer.name: _resolution(layer, plan, steps(rules))
        for layer, rules, plan in zip(layers, applied, plans, strict=True)
        if plan is not None  # always: a missing one was a problem
    }


def resolve_activations(policy: Policy, model: nn.Module) -> dict[str, ActivationPlan]:
    """What the ops inside the modules that activation rules speak of save, by the module's name. Changes neither.

    Raises PolicyError with every activation rule that matches no module, unless it is optional.
    """
    scopes, problems = scopes_of(model), Problems()
    found: dict[str, ActivationPlan] = {}
    used: set[int] = set()
    for scope in scopes if policy.activations else []:
        rules = [i for i, rule in enumerate(policy.activations) if rule.match.matches(scope)]
        used.update(rules)
        tree = EVERYTHING_RAW
        for i in rules:
            tree = policy.activations[i].apply(tree)
        if rules:
            found[scope.name] = activation_plan(build(tree, ACTIVATIONS, problems), policy.backend)
    _check_all_match(policy.activations, scopes, used, problems, "module")
    problems.raise_any()
    return found


def explain(policy: Policy, model: nn.Module, name: str) -> tuple[Step, ...]:
    """The steps to the plan of one layer, the defaults first. Raises what `resolve` does, and UnknownNameError."""
    return resolve_layer(policy, model, name).steps


def resolve_layer(policy: Policy, model: nn.Module, name: str) -> Resolution:
    """The resolution of one layer, by any of its names. Raises what `resolve` does, and UnknownNameError."""
    found = resolve_detailed(policy, model)
    for resolution in found.values():
        if name in resolution.layer.names:
            return resolution
    raise UnknownNameError(f"the model has no layer {name!r}{did_you_mean(name, found)}")


def _trees(policy: Policy, rules: Sequence[int]) -> list[Node]:
    """The defaults' tree and what each rule in turn makes of it."""
    trees = [policy.tree]
    for i in rules:
        trees.append(policy.rules[i].apply(trees[-1]))
    return trees


def _steps(policy: Policy, rules: Sequence[int]) -> tuple[Step, ...]:
    trees = [EXACT, *_trees(policy, rules)]
    sources = [DEFAULTS, *(_rule_name(i, policy.rules[i].mark) for i in rules)]
    changes = [_changes(plain(old), plain(new)) for old, new in pairwise(trees)]
    return tuple(map(Step, sources, changes))


def _rule_name(index: int, mark: Mark) -> str:
    return f"rule {index + 1}" + (f" ({mark.place})" if mark.file else "")


def _changes(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """What differs of two trees: fields, or a whole block where its kind does."""
    if old == new:
        return {}
    if not (isinstance(old, dict) and isinstance(new, dict) and old.get("kind") == new.get("kind")):
        return {path: (old, new)}
    found = (_changes(old.get(key), new.get(key), join(path, key)) for key in {**old, **new})
    return {path: change for changes in found for path, change in changes.items()}


def _check_all_match(
    rules: Sequence[Rule], scopes: Sequence[Scope], matched: set[int], problems: Problems, what: str
) -> None:
    for i, rule in enumerate(rules):
        if i not in matched and not rule.optional:
            hint = rule.match.nearest(scopes)
            problems.add(rule.mark, f"matches no {what} of the model; {hint} (optional: true allows it)")


def _check_shared_weights(
    policy: Policy,
    layers: list[Layer],
    applied: list[tuple[int, ...]],
    plans: list[LayerPlan | None],
    problems: Problems,
) -> None:
    owners: dict[int, int] = {}
    for i, layer in enumerate(layers):
        first = i if layer.reason else owners.setdefault(id(layer.module.weight), i)
        if plans[first] != plans[i]:
            rule = policy.rules[max(set(applied[first]) ^ set(applied[i]))]  # the last one that treats them differently
            names = f"{layers[first].name!r} and {layer.name!r}"
            problems.add(rule.mark, f"layers {names} share one weight but not one plan")


def _resolution(layer: Layer, plan: LayerPlan, steps: tuple[Step, ...]) -> Resolution:
    decided = next((step.source for step in reversed(steps[1:]) if step.changes), DEFAULTS)
    fitted = _fit(plan, layer.module)
    if fitted != plan:
        changes = _changes(plan.to_dict(), fitted.to_dict())
        steps = (*steps, Step("what the layer can do", changes))
    if layer.reason:
        return Resolution(layer, Skip(layer.reason), steps, "the layer")
    if fitted.is_exact:
        reason = f"{DEFAULTS} are exact" if decided == DEFAULTS else f"policy exact by {decided}"
        return Resolution(layer, Skip(reason), steps, decided)
    return Resolution(layer, fitted, steps, decided)


def _fit(plan: LayerPlan, module: nn.Module) -> LayerPlan:
    """The plan with a buffer that the layer can have.

    A packed one holds the tokens of the product, so a k×k convolution saves codes of its input before any transform.
    And packing what is neither transformed nor quantized is saving it as it is.
    """
    if not plan.buffer.is_packed:
        return plan
    path = plan.grad_weight
    unfolds = isinstance(module, nn.Conv2d) and not _is_pointwise(module)
    recompute = plan.buffer.recompute
    if path.input.is_identity and (unfolds or path.transform.is_identity):
        return replace(plan, buffer=Raw(recompute=recompute))
    return replace(plan, buffer=Quantized(quantizer=path.input, recompute=recompute)) if unfolds else plan


def _is_pointwise(conv: nn.Conv2d) -> bool:
    return conv.kernel_size == (1, 1) and (isinstance(conv.padding, str) or not any(conv.padding))
