"""`hot plan`: the bytes in its table are those that a real forward saves."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import hot
from hot import backends, crossover
from hot.crossover import Point
from hot.memory import saved_bytes
from hot.planning import Row, op_rows, plan_rows, product_text, serving
from hot.train.models import Vit, build_model


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


@pytest.mark.parametrize("policy", ["hot", "memory"])
def test_layers_and_other_ops_add_up_to_what_a_forward_saves(policy: str) -> None:
    model, sample = Vit(dim=64, depth=2, heads=2).build((3, 32, 32), 10), torch.randn(4, 3, 32, 32)
    exact = saved_bytes(model, lambda: model(sample)).total
    rows = plan_rows(hot.load_policy(policy), copy.deepcopy(model), sample)
    ops = op_rows(hot.load_policy(policy), copy.deepcopy(model).to("meta"), sample)
    hot.convert(model, hot.load_policy(policy))
    measured = saved_bytes(model, lambda: model(sample)).total
    own = 4 * sum(p.numel() for p in model.parameters() if p.dim() == 1)  # of norms, which some ops save and none books
    for which, want in (("before", exact), ("after", measured)):
        assert abs(sum(getattr(row, which) or 0 for row in (*rows, *ops)) - want) <= 0.02 * want + own
    assert next(row.buffer for row in ops if row.op == "gelu") == ("raw" if policy == "hot" else "int4 block 64 hashed")
    behind = next(row for row in rows if row.name == "blocks.0.mlp.fc2")
    assert behind.before and (behind.after == 0) is (policy == "memory")  # made again of the codes of the GELU


def test_ops_go_by_the_names_of_policies() -> None:
    """Whatever function of torch's a model calls an op by."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            x = torch.bmm((q @ k.mT).softmax(-1), v)
            return nn.functional.relu6(x.relu_()) * torch.multiply(x, v)

    rows = op_rows(hot.load_policy("memory"), Written().to("meta"), torch.empty(2, 64, 32))
    assert {row.op: row.buffer for row in rows} == {
        "matmul": "int8 block 64 nearest", "softmax": "int8 block 64 nearest", "relu": "mask",
        "hardtanh": "mask", "mul": "int4 block 64 hashed",
    }  # fmt: skip


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
    assert stages["grad_input product"] == "integer, reference"
    assert "reference" in stages["grad_output"]


def test_products_say_who_runs_them_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.name: row for row in plan_rows(hot.load_policy("hlq"), Attention())}
    assert rows["q"].products == dict.fromkeys(("grad_input", "grad_weight"), "integer, reference")
    exact = hot.Policy(extends="hot", rules=[{"match": "q", "policy": "exact"}])
    assert plan_rows(exact, Attention())[2].products == {}
    lbp = {row.name: row for row in plan_rows(hot.load_policy("lbp-wht"), Attention())}
    assert set(lbp["q"].products.values()) == {"float"}

    float8 = dataclasses.replace(backends.backends["reference"], name="chip", float8=lambda: 1, priority=9)
    monkeypatch.setitem(backends.backends._entries, "chip", float8)
    monkeypatch.setattr(backends.Ops, "serving", lambda self, op: "theirs")
    monkeypatch.setattr("hot.backends.table._ready", {})
    stages = serving(rows["q"].resolution.plan, "cpu")
    assert stages["grad_input product"] == "integer, theirs: exact in float8 e4m3, small ones in int8"
    assert stages["grad_weight product"] == "integer, theirs"
    assert product_text("float", "theirs", "a note") == "float"


def test_a_plan_for_another_machine_can_be_looked_at() -> None:
    hot.register_backend(hot.Backend("absent", devices=("cuda",), probe=lambda: (False, "no such device")))
    try:
        rows = {row.name: row for row in plan_rows(hot.Policy(extends="hot", backend="absent"), Attention())}
        assert set(rows["q"].products.values()) == {"absent, missing here"}
    finally:
        backends.backends.remove("absent")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A crossover of this CPU for the plans of `hot`: q, k and v are left exact, the 1×1 convolution is not."""
    monkeypatch.setenv("HOT_CACHE", str(tmp_path))
    monkeypatch.setattr(crossover, "_is_off", False)
    plans = hot.resolve(hot.load_policy("hot"), Attention())
    points = [
        Point("linear", str(plans["q"]), "float32", 162, 32, 32, 0.5),
        Point("linear", str(plans["q"]), "bfloat16", 162, 32, 32, 1.5),
        Point("conv1x1", str(plans["point"]), "float32", 162, 32, 32, 1.5),
    ]
    crossover.write(points, crossover.name_of(torch.device("cpu")))
    yield points
    crossover.forget()


@pytest.mark.filterwarnings("ignore::hot.crossover.CrossoverWarning")
def test_bytes_of_what_the_crossover_leaves_exact(table: list[Point]) -> None:
    class Contiguous(Attention):  # else torch copies x for each of q, k and v
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.point(self.embed(x)).flatten(2).transpose(1, 2).contiguous()
            return self.q(x) * self.k(x) * self.v(x)

    policy, sample, model = hot.load_policy("hot"), torch.randn(2, 3, 18, 18), Contiguous()
    hot.convert(model, policy)
    measured = saved_bytes(model, lambda: model(sample)).layers
    rows = {row.name: row for row in plan_rows(policy, Contiguous(), sample, points=table)}
    assert {name: row.after or 0 for name, row in rows.items()} == measured
    assert rows["q"].after == rows["q"].before == 2 * 81 * 32 * 4 and rows["k"].after == 0
    assert rows["point"].after < rows["point"].before


def test_rows_say_what_the_crossover_leaves_exact(table: list[Point]) -> None:
    def look(**changes: object) -> dict[str, Row]:
        policy, sample = hot.Policy(extends="hot", **changes), torch.randn(2, 3, 18, 18)
        return {row.name: row for row in plan_rows(policy, Attention(), sample, points=table)}

    rows = look()
    assert rows["q"].verdict.leaves_exact and rows["q"].verdict.nearest == table[0]
    assert rows["q"].products == dict.fromkeys(("grad_input", "grad_weight"), "torch")
    assert rows["q"].to_dict()["crossover"]["nearest"]["ratio"] == 0.5
    assert not rows["point"].verdict.leaves_exact and rows["point"].products["grad_input"] == "integer, reference"
    assert rows["embed"].verdict is None and rows["embed"].to_dict()["crossover"] is None  # nothing was measured
    assert all(row.verdict is None for row in look(backend="reference").values())


def test_of_a_layer_that_runs_twice_the_smaller_run_is_told(table: list[Point]) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(self.q(x)[:100])

    points = [*table, Point("linear", table[0].plan, "float32", 200, 32, 32, 1.5)]
    (row,) = plan_rows(hot.load_policy("hot"), Twice(), torch.empty(200, 32), points=points)
    assert row.verdict.leaves_exact and 100 * 32 * 4 < row.after < row.before == 300 * 32 * 4


def test_model_files_run_only_if_allowed(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 4)\n")
    with pytest.raises(hot.HotError, match="code that would run"):
        build_model(f"{path}:build", (4,), 10)
    assert isinstance(build_model(f"{path}:build", (4,), 10, allow_code=True), nn.Linear)
