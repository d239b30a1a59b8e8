"""`hot plan`: the bytes in its table are those that a real forward saves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hot
from hot.memory import saved_bytes
from hot.planning import plan_rows, serving
from hot.train.models import build_model


class Attention(nn.Module):
    """q, k, v on one input; a convolution in front; a frozen layer behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.point = nn.Conv2d(32, 32, 1)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.point(self.embed(x)).flatten(2).transpose(1, 2)
        return self.frozen(self.q(x) * self.k(x) * self.v(x))


@pytest.mark.parametrize("policy", ["hot", "hot-paper", "int8", "hlq", "luq", "lbp-wht"])
def test_bytes_are_what_a_forward_saves(policy: str) -> None:
    sample = torch.randn(2, 3, 18, 18)
    model = Attention()
    hot.convert(model, hot.load_policy(policy))
    measured = saved_bytes(model, lambda: model(sample)).layers
    rows = {row.name: row for row in plan_rows(hot.load_policy(policy), Attention(), sample)}
    assert {name: row.after for name, row in rows.items()} == measured
    assert rows["q"].before == 2 * 81 * 32 * 4
    assert rows["k"].after == rows["v"].after == 0  # they share what q saves
    assert rows["frozen"].before == rows["frozen"].after == 0


def test_rows_say_who_decided_and_why_not() -> None:
    policy = hot.Policy(extends="hot", rules=[{"match": "q", "policy": "exact"}])
    rows = {row.name: row for row in plan_rows(policy, Attention())}
    assert "rule" in rows["q"].resolution.decided_by
    assert isinstance(rows["q"].resolution.plan, hot.Skip)
    assert rows["q"].before is None  # no sample was given
    assert rows["embed"].shape == "32×3×3×3"


def test_names_the_input_that_a_model_cannot_take() -> None:
    with pytest.raises(hot.HotError, match=r"does not take an input \(2, 5, 18, 18\)"):
        plan_rows(hot.load_policy("hot"), Attention(), torch.empty(2, 5, 18, 18, device="meta"))


def test_serving_names_the_kernels() -> None:
    plan = hot.resolve(hot.load_policy("hot"), Attention())["q"]
    stages = serving(plan, "cpu")
    assert stages["grad_input product"] == "integer, reference matmul"
    assert "reference" in stages["grad_output"]


def test_model_files_run_only_if_allowed(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 4)\n")
    with pytest.raises(hot.HotError, match="code that would run"):
        build_model(f"{path}:build", (4,), 10)
    assert isinstance(build_model(f"{path}:build", (4,), 10, allow_code=True), nn.Linear)
