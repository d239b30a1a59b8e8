"""Calibration: measured on the projected gradient, written as plain rules, and without a trace in the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hot
from hot.calibrate import Candidate, measure


class Scaled(nn.Module):
    """Two layers: the gradient of `loud` is a hundred times larger in every other block of 16 tokens, that of `even` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.1)
        self.loud = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        even = self.even(x)
        hidden = self.norm(even.transpose(1, 2)).transpose(1, 2).detach()
        weight = torch.where(torch.arange(x.shape[1]) // 16 % 2 == 0, 100.0, 1.0)[:, None]
        return even.sum(-1) + (self.loud(self.drop(hidden)) * weight).pow(2).sum(-1)


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 64, 24, generator=generator) for _ in range(count)]


@pytest.fixture
def model() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


def test_chooses_token_scales_only_where_they_more_than_halve_the_error(model: Scaled) -> None:
    choices = {
        choice.layer: choice
        for choice in measure(model, hot.load_policy("hot-paper"), batches(), lambda m, x: m(x).mean())
    }
    assert choices["loud"].chosen == "token"
    assert choices["loud"].errors["token"] < 0.5 * choices["loud"].errors["tensor"]
    assert choices["even"].chosen == "tensor"  # its gradient is the same for every token
    assert choices["even"].errors["token"] >= 0.5 * choices["even"].errors["tensor"]


def test_the_error_is_that_of_the_projected_gradient(model: Scaled) -> None:
    """Against the published selection, which looks at gradients before the projection."""
    gradients = []
    model.loud.register_forward_hook(lambda *args: args[2].register_hook(gradients.append) and None)
    policy = hot.load_policy("hot-paper")
    torch.manual_seed(5)
    with torch.random.fork_rng():
        choice = {c.layer: c for c in measure(model, policy, batches(1), lambda m, x: m(x).mean())}["loud"]
    path = hot.resolve(policy, model)["loud"].grad_weight
    from hot.backends import ops_for

    ops = ops_for("reference", "cpu")
    projected = path.transform.project(gradients[0].permute(2, 0, 1), ops).flatten(1)
    codes, scale, _ = path.grad_output.encode(projected, ops)
    error = ((codes * scale - projected).square().sum() / projected.square().sum()).item()
    assert choice.errors["tensor"] == pytest.approx(error, rel=1e-5)


def test_leaves_no_trace(model: Scaled) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before, grads = copy.deepcopy(model), [parameter.grad.clone() for parameter in model.parameters()]
    rng = torch.get_rng_state()
    hot.calibrate(model, hot.load_policy("hot-paper"), batches(), lambda m, x: m(x).mean())
    for (name, old), new in zip(before.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(old, new), name  # BatchNorm's statistics and its count of batches included
    for old, parameter in zip(grads, model.parameters(), strict=True):
        assert torch.equal(old, parameter.grad)
    assert torch.equal(rng, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


def test_gives_a_policy_that_can_be_saved_and_says_the_same(model: Scaled, tmp_path) -> None:
    policy = hot.calibrate(model, hot.load_policy("hot-paper"), batches(), lambda m, x: m(x).mean())
    hot.save_policy(policy, tmp_path / "mine.yaml")
    assert hot.load_policy(tmp_path / "mine.yaml") == policy
    plans = hot.convert(model, policy)
    assert plans["loud"].grad_weight.grad_output.granularity == "token"
    assert plans["even"].grad_weight.grad_output.granularity == "tensor"
    assert plans["loud"].grad_input.grad_output.granularity == "tensor"  # selection is on grad_weight, as in the paper
    model(batches(1)[0]).mean().backward()
    assert model.loud.weight.grad.isfinite().all()


def test_candidates_are_a_list(model: Scaled) -> None:
    candidates = [Candidate("tensor", 1.0), Candidate("row", 0.9), Candidate("token", 0.9)]
    policy = hot.load_policy("hot-paper")
    choice = {c.layer: c for c in measure(model, policy, batches(), lambda m, x: m(x).mean(), candidates)}["loud"]
    assert set(choice.errors) == {"tensor", "row", "token"}
    assert choice.errors[choice.chosen] == min(choice.errors.values())


@pytest.mark.parametrize(
    ("policy", "data", "loss", "message"),
    [
        ("hot", [], lambda m, x: m(x).mean(), "batches is empty"),
        ("hot", batches(1), lambda m, x: m(x).mean() * float("nan"), "the loss of batch 1 is nan"),
        ("exact", batches(1), lambda m, x: m(x).mean(), "nothing to calibrate"),
        ("lbp-wht", batches(1), lambda m, x: m(x).mean(), "nothing to calibrate"),
    ],
)
def test_refuses(model: Scaled, policy: str, data: list, loss, message: str) -> None:
    with pytest.raises(hot.HotError, match=message):
        hot.calibrate(model, hot.load_policy(policy), data, loss)


def test_frozen_layers_are_not_measured(model: Scaled) -> None:
    model.even.requires_grad_(False)
    choices = measure(model, hot.load_policy("hot-paper"), batches(1), lambda m, x: m(x).mean())
    assert [choice.layer for choice in choices] == ["loud"]
