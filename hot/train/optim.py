"""Optimizers and learning-rate schedules, by ``kind`` in an experiment. A schedule is a pure function of the step."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import nn

from hot.policies.params import Params, registering
from hot.registry import Registry


class Optimizer(Params):
    """Parameters of an optimizer. lr: the peak of the schedule; weight_decay: not applied to biases and norms (1-D)."""

    lr: float = Field(gt=0)
    weight_decay: float = Field(default=0.0, ge=0)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        raise NotImplementedError(f"{type(self).__name__} has no build()")

    def groups(self, model: nn.Module) -> list[dict[str, object]]:
        """Parameter groups: matrices with weight decay, the rest without."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]


optimizers: Registry[type[Optimizer]] = Registry("optimizer")
register_optimizer = registering(optimizers, Optimizer)


@register_optimizer("adamw")
class AdamW(Optimizer):
    """torch.optim.AdamW."""

    lr: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.05, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.groups(model), lr=self.lr, betas=self.betas, eps=self.eps)


@register_optimizer("sgd")
class Sgd(Optimizer):
    """torch.optim.SGD."""

    lr: float = Field(default=0.1, gt=0)
    weight_decay: float = Field(default=5e-4, ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.groups(model), lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


class Schedule(Params):
    """warmup: the share of all steps over which the rate climbs linearly to its peak. Subclass it, write `decay`."""

    warmup: float = Field(default=0.0, ge=0, lt=1)

    def factor(self, step: int, steps: int) -> float:
        """The multiple of the peak rate at a step (0 … steps − 1)."""
        climb = round(self.warmup * steps)
        return (step + 1) / climb if step < climb else self.decay((step - climb) / max(1, steps - climb))

    def decay(self, progress: float) -> float:
        """The multiple after the warm-up; progress runs from 0 towards 1."""
        raise NotImplementedError(f"{type(self).__name__} has no decay()")


schedules: Registry[type[Schedule]] = Registry("schedule")
register_schedule = registering(schedules, Schedule)


@register_schedule("constant")
class Constant(Schedule):
    """The peak rate throughout."""

    def decay(self, progress: float) -> float:
        return 1.0


@register_schedule("cosine")
class Cosine(Schedule):
    """Half a cosine from the peak rate down to `final` of it."""

    warmup: float = Field(default=0.05, ge=0, lt=1)
    final: float = Field(default=0.0, ge=0, le=1)

    def decay(self, progress: float) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
