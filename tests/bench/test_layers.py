"""`hot bench layers`: ratios follow from times, sums from layers, and what is measured is really HOT."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hot
from hot import crossover, executor
from hot.bench import grid
from hot.bench.layers import Bench, Row
from hot.bench.shapes import Layer, linear
from hot.errors import HotError

CPU = torch.device("cpu")
SMALL = linear(64, 48, 32)
CONV = Layer("3x3", (2, 8, 6, 6), 16, kernel=3, stride=2, count=3)


def setup(*policies: str, **kwargs) -> Bench:
    options = {"dtype": "float32", "peers": False, "repeats": 5, "seconds": 0.0, **kwargs}
    return Bench({name: hot.load_policy(name) for name in policies or ("hot",)}, CPU, **options)


def one(rows: list[Row], candidate: str, what: str) -> Row:
    (row,) = [row for row in rows if (row.candidate, row.what) == (candidate, what)]
    return row


@pytest.mark.parametrize(
    "layer", [SMALL, CONV, Layer("batched", (3, 5, 16), 8), Layer("1x1", (2, 8, 6, 6), 16, kernel=1, stride=2)]
)
def test_ratios_follow_from_times(layer: Layer) -> None:
    rows = setup("hot", "int8", baselines=("bf16",)).rows(layer, "mine")
    assert [(row.candidate, row.dtype) for row in rows[:4]] == [
        ("fp32", "float32"), ("bf16", "bfloat16"), ("hot", "float32"), ("int8", "float32"),
    ]  # fmt: skip
    assert len(rows) == 8 and not any(row.reason for row in rows)
    for row in rows:
        assert (row.set, row.layer, row.kind, row.mode, row.count) == (
            "mine",
            layer.name,
            layer.kind,
            "eager",
            layer.count,
        )
        assert (row.tokens, row.outputs, row.inputs) == (layer.tokens, layer.outputs, layer.inputs)
        assert row.p20_ms <= row.p50_ms <= row.p80_ms
        dense, half = one(rows, "fp32", row.what), one(rows, "bf16", row.what)
        assert row.vs_fp32 == pytest.approx(dense.p50_ms / row.p50_ms)
        assert row.vs_bf16 == pytest.approx(half.p50_ms / row.p50_ms) and row.vs_tf32 is None
        packs = row.what == "forward" and row.candidate in ("hot", "int8")
        assert row.packing_share == (pytest.approx(1 - row.vs_fp32) if packs else None)


def test_what_runs_is_hot_whatever_the_crossover_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of a policy goes through the executor, under a table in which dense wins everywhere."""
    seen = []
    monkeypatch.setattr(crossover, "_is_off", False)
    backward = executor._backward
    monkeypatch.setattr(executor, "_backward", lambda *args: seen.append(crossover._is_off) or backward(*args))
    setup("hot", "exact").rows(SMALL)
    assert seen and all(seen)
    assert not crossover._is_off


def test_packing_is_never_shared_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward that is timed makes its codes."""
    asked, made = [], []
    shared = executor.shared

    def count(x: torch.Tensor, key: object, make: Callable[[], tuple]) -> tuple:
        asked.append(1)
        return shared(x, key, lambda: made.append(1) or make())

    monkeypatch.setattr(executor, "shared", count)
    setup("hot").rows(SMALL, passes=("forward",))
    assert len(made) == len(asked) > 5


def test_random_state_and_precision_stay() -> None:
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    setup(baselines=("tf32",)).rows(SMALL, passes=("backward",))
    assert torch.equal(torch.get_rng_state(), state) and torch.get_float32_matmul_precision() == precision


def test_a_missing_peer_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    rows = setup(peers=True).rows(linear(49, 16, 32))
    for name in ("torchao int8", "torchao float8"):
        assert "torchao" in one(rows, name, "backward").reason and one(rows, name, "forward").p50_ms is None
    products = one(rows, "torch._int_mm", "backward")
    assert products.vs_fp32 == pytest.approx(one(rows, "fp32", "backward").p50_ms / products.p50_ms)
    assert not any(row.candidate == "torch._int_mm" for row in rows if row.what == "forward")
    assert {row.candidate for row in setup(peers=True).rows(CONV)} == {"fp32", "hot"}


def test_sums_and_geometric_means() -> None:
    layers = [Layer("a", (8, 4), 4, count=3, published=(100.0, 50.0)), Layer("b", (8, 4), 4, published=(400.0, 50.0))]
    bench = setup()
    blanks = [bench._blank(layer, "set", "eager", "backward") for layer in layers]
    times = {"a": {"fp32": 4.0, "hot": 1.0}, "b": {"fp32": 1.0, "hot": 4.0}}
    rows = []
    for blank in blanks:
        timings = {name: hot.bench.timing.Timing(t / 2, t, 2 * t) for name, t in times[blank.layer].items()}
        rows += bench._judge(timings, blank)
    total = one(bench.summary(rows, "sum"), "hot", "backward")
    assert (total.layer, total.count, total.p20_ms, total.p50_ms, total.p80_ms) == ("sum", 4, 3.5, 7.0, 14.0)
    assert total.vs_fp32 == pytest.approx((3 * 4 + 1) / 7) and total.tokens is None
    mean = one(bench.summary(rows, "geometric mean"), "hot", "backward")
    assert mean.p50_ms == pytest.approx(2.0) and mean.vs_fp32 == pytest.approx(1.0)
    assert (mean.published_fp_us, mean.published_hot_us) == (pytest.approx(200.0), pytest.approx(50.0))
    failed = [*rows, bench._judge({"hot": hot.bench.timing.Failed("no")}, blanks[0])[0]]
    assert one(bench.summary(failed, "sum"), "hot", "backward").reason == "not every layer has a number"


def test_wrong_settings() -> None:
    with pytest.raises(HotError, match="--dtype 'int8' can't be measured: use bfloat16 or float32"):
        setup(dtype="int8")
    with pytest.raises(HotError, match="policy 'bf16' has the name of a baseline"):
        Bench({"bf16": hot.load_policy("hot")}, CPU, "float32")
    with pytest.raises(HotError, match="needs a CUDA device"):
        setup().rows(SMALL, graph=True)


@pytest.mark.parametrize("as_in_training", [False, True])
def test_layers_are_left_to_torch_as_in_training(as_in_training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if asked: then the executor follows the crossover table."""
    asked: list[bool] = []

    def leaves_exact(*args: object) -> bool:
        asked.append(not crossover._is_off)
        return False

    monkeypatch.setattr(executor, "leaves_exact", leaves_exact)
    monkeypatch.setattr(crossover, "_is_off", False)
    setup(as_in_training=as_in_training).rows(SMALL)
    assert {*asked} == {as_in_training}


def test_the_grid_is_measured_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every layer of it, won or lost, is then judged as it was measured."""

    def rows(self: Bench, layer: Layer, graph: bool, passes: tuple[str, ...]) -> list[Row]:
        return [Row("", "", layer.kind, *[None] * 3, 1, "float32", "eager", "hot", *passes, vs_fp32=_ratio(layer))]

    monkeypatch.setattr(Bench, "rows", rows)
    found, finished = grid.points(setup())
    everything = [layer for row in grid.layers("cpu") for layer in row]
    assert finished and len(found) == len(everything) and {p.kind for p in found} == {"linear", "conv1x1", "conv3x3"}
    table = crossover.read_file(crossover.write(found, "Test", tmp_path / "test.csv"))
    assert {(p.kind, p.sizes): p.ratio for p in table} == {
        (each.kind, grid._sizes(each)): _ratio(each) for each in everything
    }
    assert grid.points(setup("exact")) == ([], True)
    assert grid.points(setup(), seconds=-1.0) == ([], False)


def _ratio(layer: Layer) -> float:
    return 0.5 + (layer.tokens * 7 + layer.outputs) % 11 / 10


def test_points_are_those_that_the_executor_asks_for() -> None:
    """Kind, plan and sizes of a point, against what a layer of that size looks up."""
    for layer in (SMALL, CONV):
        plan = hot.bench.candidates.plan_of(layer, hot.load_policy("hot"))
        point = crossover.Point(layer.kind, str(plan), "float32", *grid._sizes(layer), 0.5)
        view = hot.views.conv2d_view((3, 3), 2, 1, 1) if layer.kernel else hot.views.LinearView()
        verdict = crossover.judge([point], torch.Size(layer.x), torch.float32, torch.Size(layer.weight), plan, view)
        assert verdict is not None and verdict.leaves_exact and verdict.nearest is point
