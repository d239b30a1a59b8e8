"""README's benchmark tables, out of rows as `hot bench` writes them."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch

import hot
from hot.backends.order import FILES, by_op
from hot.bench.kernels import Row as KernelRow
from hot.bench.layers import Bench
from hot.bench.records import environment, write_csv
from hot.bench.shapes import Layer, LayerSet, linear
from hot.bench.timing import Failed, Timing

CPU = torch.device("cpu")


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/readme_tables.py on an empty folder of results."""
    path = Path(__file__).parents[2] / "benchmarks" / "readme_tables.py"
    spec = importlib.util.spec_from_file_location("readme_tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def save(tables: ModuleType, name: str, rows: list) -> None:
    write_csv(tables.RESULTS / f"{name}.csv", [{**environment(CPU), "device": "GPU", **asdict(row)} for row in rows])


def rows_of(
    found: LayerSet, layers: list[Layer], times: dict[str, float | str], modes: tuple[str, ...] = ("eager",)
) -> list:
    """What a run on CUDA would give: these milliseconds for every layer; a text is the reason for none."""
    bench = Bench({"hot": hot.load_policy("hot")}, CPU, "bfloat16", ("bf16", "tf32", "fp32"))
    timings = {name: Failed(t) if isinstance(t, str) else Timing(t, t, t) for name, t in times.items()}
    rows = []
    for mode in modes:
        for layer in layers:
            for what in ("forward", "backward"):
                rows += bench._judge(timings, bench._blank(layer, "set", mode, what))
    return rows + (bench.summary(rows, found.summary) if found.summary else [])


def test_tables_without_results_or_markers_are_left_alone(tables: ModuleType) -> None:
    text = "".join(f"<!-- {marker} -->\nold\n<!-- /{marker} -->\n" for marker in tables.TABLES)
    assert tables.render(text) == text
    save(tables, "kernels_h200", [KernelRow("pack4", "int4", "cupy", "bfloat16", 3.0, 1.0, 1.0, 1.0, 3.0, 0.5)])
    assert tables.render("no marker") == "no marker"
    rendered = tables.render(text)
    assert rendered.count("old") == len(tables.TABLES) - 1 and tables.render(rendered) == rendered


def test_kernels(tables: ModuleType) -> None:
    rows = [
        KernelRow("pack4", "int4", "cupy", "bfloat16", 3000.0, 1.0, 1.0, 1.0, gb_per_s=3000.0, vs_copy=0.75),
        KernelRow("matmul", "int8", "cupy", "bfloat16", 3.0, 1.0, 2.0, 3.0, tflops=1200.4, vs_torch=1.5),
        KernelRow("matmul", "int8", "reference", "bfloat16", 3.0, 1.0, 7.0, 9.0, tflops=300.0, vs_torch=0.5),
        KernelRow("pack4", "int4", "triton", "bfloat16", 3.0, reason="no"),
    ]
    save(tables, "kernels_h200", rows)
    assert tables.kernels_table().splitlines()[2:] == [
        "| `pack4` | int4 | cupy | 1.000 ms | first | 3000 GB/s | 75 % of a copy | – |",
        "| `matmul` | int8 | cupy | 2.000 ms | first | 1200 TFLOP/s | 1.50× torch's bf16 | 7.000 ms |",
    ]


def test_kernels_that_auto_asks_first(tables: ModuleType) -> None:
    """By all cases of the op, with the ratio of the one case; the reference is no rival."""

    def row(case: str, backend: str, time: float) -> KernelRow:
        return KernelRow("pack4", case, backend, "bfloat16", 3.0, time, time, time, gb_per_s=1.0)

    found = [row("a", "triton", 1.0), row("a", "cupy", 2.0), row("b", "triton", 6.0), row("b", "cupy", 1.5)]
    save(tables, "kernels_h200", [*found, row("a", "reference", 0.1), row("c", "triton", 0.1)])
    header, line, *rows = tables.kernels_table().splitlines()
    assert [each.split("|")[5].strip() for each in rows] == ["", "first 0.50×", "", "first 4.00×", ""]
    assert {each.count("|") for each in (header, line, *rows)} == {9}


def test_the_packaged_order_is_that_of_the_results(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tables.ROOT / "benchmarks" / "results")
    written = tables.write_order(tmp_path)
    packaged = FILES.packaged("NVIDIA H200")
    assert written.name == packaged.name and by_op(FILES.read(written)) == by_op(FILES.read(packaged))


def test_layers(tables: ModuleType) -> None:
    times = {
        "bf16": 3.0,
        "tf32": 6.0,
        "fp32": 30.0,
        "hot": 4.0,
        "torch._int_mm": 2.0,
        "torchao float8": 6.0,
        "torchao int8": "none",
    }
    fc1 = [linear(8, 4, 2, "fc1")]
    eager = rows_of(LayerSet(list), fc1, {"bf16": 3.0, "hot": 12.0})
    save(tables, "layers_vit_h200", [*eager, *rows_of(LayerSet(list), fc1, times, ("graph",))])
    (row,) = tables.layers_table().splitlines()[2:]
    assert row == "| fc1 (8, 4, 2) | 3.00 ms | 4.00 ms | 0.75 | 0.25 | 1.50 | 7.50 | 0.50× | – | 2.00 ms | 25 % |"
    header, line = tables.layers_table().splitlines()[:2]
    assert header.count("|") == line.count("|") == row.count("|")


def test_latency(tables: ModuleType) -> None:
    layer = Layer("ViT-B", (8, 4), 2, published=(200.0, 50.0))
    found = LayerSet(list, summary="geometric mean")
    save(
        tables,
        "layers_latency_h200",
        rows_of(found, [layer], {"bf16": 0.05, "fp32": 0.1, "hot": 0.04}, ("eager", "graph")),
    )
    header, line, *rows = tables.latency_table().splitlines()
    assert rows[0] == "| ViT-B | 100 → 40 | 2.50 | 100 → 50 → 40 | 2.50 | 200 → 50 | 4.00 |"
    assert rows[1] == rows[0].replace("ViT-B", "geometric mean")
    assert {row.count("|") for row in (header, line, *rows)} == {8}


def test_resnet(tables: ModuleType) -> None:
    layer = Layer("1x1 64-256 56/1", (2, 4, 3, 3), 2, kernel=1, count=4)
    rows = rows_of(LayerSet(list, summary="sum"), [layer], {"bf16": 1.0, "hot": 2.0}, ("graph",))
    save(tables, "layers_resnet50_h200", rows)
    assert tables.resnet_table().splitlines()[2:] == [
        "| 1x1 64-256 56/1 | 4 | 1.00 ms | 2.00 ms | 0.50× | – |",
        "| sum | 4 | 4.00 ms | 8.00 ms | 0.50× | – |",
    ]


def test_agreement_is_the_distance_from_the_reference_of_the_same_seed(tables: ModuleType) -> None:
    losses = {
        ("reference", 0): (2.0, 1.0),
        ("reference", 1): (3.0, 2.0),
        ("mine", 0): (2.5, 1.0),
        ("mine", 1): (3.0, 2.1),
    }
    rows = [
        {"device": "GPU", "torch": "2.11.0", "backend": backend, "seed": seed, "step": 20 * (i + 1), "loss": loss}
        for (backend, seed), of in losses.items()
        for i, loss in enumerate(of)
    ]
    write_csv(tables.RESULTS / "agreement_h200.csv", rows)
    lines = tables.agreement_table().splitlines()
    assert lines[2] == "| 20 | 2.000 | 3.000 | 2.500 | 3.000 |"
    assert lines[-1] == "| mean distance from the reference's | 0.000 | 0.000 | 0.250 | 0.050 |"


def test_accuracy_has_a_row_for_every_policy_beside_exact(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "EXPERIMENTS", {"mine": "Mine"})
    runs = [("exact", 0, 0.9), ("exact", 1, 0.7), ("hot", 0, 0.6), ("hot", 1, 0.8), ("memory", 0, 0.5)]
    rows = [
        {
            "device": "cpu", "threads": 2, "policy": policy, "seed": seed, "accuracy": accuracy, "step_ms": 3.0,
            "saved_bytes": 2**20, "saved_bytes_in_layers": 2**19,
        }
        for policy, seed, accuracy in runs
    ]  # fmt: skip
    write_csv(tables.RESULTS / "mine.csv", rows)
    lines = tables.accuracy_table().splitlines()
    assert lines[2].startswith(
        "| Mine | `hot` | CPU, 2 threads | 2 | 80.0 % → 70.0 % | 0.5 → 0.5 MiB | 1.0 → 1.0 MiB |"
    )
    assert lines[3].startswith("| Mine | `memory` | CPU, 2 threads | 1 | 80.0 % → 50.0 % |") and len(lines) == 4
