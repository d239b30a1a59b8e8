"""Layer-wise quantizer selection from a few real batches, as published, but measured on what is really quantized.

For every layer the gradient that grad_weight would quantize (projected, as its plan says) is quantized under each candidate
granularity, and the squared errors are added up over the batches. The first candidate is the default; another one is chosen
where its error is below its ratio of the default's, the best of those if there are several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hot.backends import get_ops
from hot.convert import view_of
from hot.errors import HotError
from hot.executor import as_written
from hot.policies.layers import layers_of
from hot.policies.plan import GradWeightPlan, LayerPlan
from hot.policies.resolve import resolve
from hot.policies.schema import Policy


class Candidate(NamedTuple):
    """A granularity of grad_weight's grad_output, chosen where its error is below ratio · the first candidate's error."""

    granularity: str
    ratio: float


CANDIDATES = (Candidate("tensor", 1.0), Candidate("token", 0.5))
"""As published: per token where that more than halves the squared error, else per tensor."""


@dataclass
class Choice:
    """What was measured for one layer: squared quantization errors by granularity, over the squared norm, and the choice."""

    layer: str
    errors: dict[str, float] = field(default_factory=dict)
    chosen: str = ""

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {error:.3e}" for name, error in self.errors.items())
        return f"{self.chosen}: relative squared error {figures}"


def calibrate(
    model: nn.Module,
    policy: Policy,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    candidates: Sequence[Candidate] = CANDIDATES,
) -> Policy:
    """The policy with one rule more for each layer that quantizes grad_weight's gradient: its measured granularity.

    batches: anything to iterate over; loss_fn(model, batch) gives a scalar loss with gradients. Parameters, their ``.grad``,
    buffers (BatchNorm statistics) and the random state are as before when it returns. Raises HotError if there was no batch,
    no layer to calibrate, or a loss that is not finite.
    """
    return with_choices(policy, measure(model, policy, batches, loss_fn, candidates))


def with_choices(policy: Policy, choices: Sequence[Choice]) -> Policy:
    """The policy with the choices as plain rules at its end, one a layer."""
    rules = [
        {"match": choice.layer, "grad_weight": {"grad_output": {"granularity": choice.chosen}}} for choice in choices
    ]
    return policy.with_rules(rules)


def measure(
    model: nn.Module,
    policy: Policy,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    candidates: Sequence[Candidate] = CANDIDATES,
) -> list[Choice]:
    """The choice for every layer, with its figures; arguments and errors as `calibrate`."""
    watched = _watched(model, policy)
    if not watched:
        raise HotError("nothing to calibrate: no trainable layer quantizes grad_weight.grad_output under this policy")
    sums = {name: _Sums(path, candidates) for name, (_, path) in watched.items()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    count = 0
    with _untouched(model), _listening(watched, sums):
        for count, batch in enumerate(batches, 1):
            loss = loss_fn(model, batch)
            if not torch.isfinite(loss.detach()).all():
                raise HotError(f"calibration: the loss of batch {count} is {loss.item()}")
            torch.autograd.grad(loss, parameters, allow_unused=True)  # runs the hooks and leaves every .grad alone
    if not count:
        raise HotError("calibration: batches is empty; give at least one batch")
    return [sums[name].choose(name) for name in watched]


def _watched(model: nn.Module, policy: Policy) -> dict[str, tuple[nn.Module, GradWeightPlan]]:
    """The layers whose grad_weight gradient is quantized with a granularity to choose."""
    plans = resolve(policy, model)
    return {
        layer.name: (layer.module, plan.grad_weight)
        for layer in layers_of(model)
        if isinstance(plan := plans[layer.name], LayerPlan)
        and layer.module.weight.requires_grad
        and "granularity" in type(plan.grad_weight.grad_output).model_fields
    }


class _Sums:
    """Squared errors of one layer's gradient under each candidate, added up on its device."""

    def __init__(self, path: GradWeightPlan, candidates: Sequence[Candidate]) -> None:
        self.path, self.candidates = path, candidates
        self.quantizers = [path.grad_output.model_copy(update={"granularity": c.granularity}) for c in candidates]
        self.errors: list[Tensor | float] = [0.0] * len(candidates)
        self.norm: Tensor | float = 0.0

    @torch.no_grad()
    def add(self, tokens: Tensor) -> None:
        """tokens: a gradient (samples, tokens, outputs)."""
        ops, transform = get_ops("auto", tokens.device.type), self.path.transform
        with as_written(tokens):  # backward may be called under autocast
            projected = (
                transform.project(tokens.permute(2, 0, 1), ops, transform.draw(tokens.device)).flatten(1).float()
            )
            self.norm = self.norm + projected.square().sum()
            for at, quantizer in enumerate(self.quantizers):
                codes, scale, group = quantizer.encode(projected, ops)
                restored = ops.dequantize(codes, scale, group, torch.float32)
                self.errors[at] = self.errors[at] + (restored - projected).square().sum()

    def choose(self, layer: str) -> Choice:
        norm = float(self.norm) or 1.0
        errors = {c.granularity: float(error) / norm for c, error in zip(self.candidates, self.errors, strict=True)}
        first, *others = self.candidates
        good = [c for c in others if errors[c.granularity] < c.ratio * errors[first.granularity]]
        best = min(good, key=lambda c: errors[c.granularity], default=first)
        if not all(math.isfinite(error) for error in errors.values()):
            raise HotError(f"calibration: the gradient of layer {layer!r} is not finite")
        return Choice(layer, errors, best.granularity)


@contextmanager
def _listening(watched: dict[str, tuple[nn.Module, GradWeightPlan]], sums: dict[str, _Sums]) -> Iterator[None]:
    """Add the gradient of every watched layer's output to its sums while the context is open."""

    def listener(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                view = view_of(module)
                output.register_hook(lambda g: sums[name].add(view.tokens(g)))

        return hook

    handles = [module.register_forward_hook(listener(name)) for name, (module, _) in watched.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Buffers and random states as they were, afterwards."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {p.device.index for p in model.parameters() if p.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
