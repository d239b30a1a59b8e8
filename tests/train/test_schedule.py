"""Schedules are pure functions of the step; optimizers decay matrices only."""

import math

import pytest
import torch
from torch import nn

from hot.train.optim import AdamW, Constant, Cosine, Sgd


def test_warmup_climbs_linearly_to_the_peak() -> None:
    schedule = Cosine(warmup=0.1)
    assert [schedule.factor(step, 100) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert schedule.factor(10, 100) == 1.0


def test_cosine_falls_to_its_final_share() -> None:
    schedule = Cosine(warmup=0.0, final=0.2)
    assert schedule.factor(0, 1000) == 1.0
    assert schedule.factor(500, 1000) == pytest.approx(0.6)
    assert schedule.factor(999, 1000) == pytest.approx(0.2, abs=1e-5)
    factors = [schedule.factor(step, 1000) for step in range(1000)]
    assert factors == sorted(factors, reverse=True)


def test_constant_stays() -> None:
    assert {Constant().factor(step, 7) for step in range(7)} == {1.0}


def test_one_step_is_enough() -> None:
    assert math.isfinite(Cosine(warmup=0.99).factor(0, 1))


@pytest.mark.parametrize("spec", [AdamW(lr=0.5, weight_decay=0.1), Sgd(lr=0.5, weight_decay=0.1)])
def test_biases_and_norms_are_not_decayed_and_frozen_parameters_left_out(spec) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2).requires_grad_(False))
    optimizer = spec.build(model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(p): (0.1 if p.ndim > 1 else 0.0) for p in [*model[0].parameters(), *model[1].parameters()]}


def test_optimizers_reach_torch_with_their_parameters() -> None:
    group = AdamW(lr=0.1, betas=[0.8, 0.9], eps=1e-6).build(nn.Linear(2, 2)).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.8, 0.9), 1e-6)
    assert isinstance(Sgd(nesterov=True).build(nn.Linear(2, 2)), torch.optim.SGD)
