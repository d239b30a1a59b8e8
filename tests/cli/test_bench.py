"""`hot bench`, as a person calls it: tables, JSON, CSV files, and one message for what is wrong."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hot.backends import Backend, backends, kernels, ops_for, register_backend, register_kernel, table
from hot.backends.order import FILES
from hot.bench import grid, shapes
from hot.bench.shapes import Layer, LayerSet
from hot.cli import main
from hot.crossover import read_file
from hot.measured import name_of

KERNELS = ["bench", "kernels", "--backend", "reference", "--device", "cpu", "--size", "0.02", "--repeats", "5"]
LAYERS = ["bench", "layers", "--device", "cpu", "--repeats", "5"]
SHAPE = ["--shape", "64", "48", "32"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of ``hot ARGUMENTS``, which must end with that exit code."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    return capsys.readouterr()


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_kernels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "kernels.csv"
    shown, _ = run(capsys, *KERNELS, "--op", "unpack4", "--output", str(output))
    (row,) = read(output)
    assert list(row) == [
        "date", "device", "driver", "torch", "triton", "threads", "op", "case", "backend", "dtype", "megabytes",
        "p20_ms", "p50_ms", "p80_ms", "gb_per_s", "vs_copy", "tflops", "vs_torch", "reason",
    ]  # fmt: skip
    assert (row["op"], row["backend"], row["dtype"], row["tflops"], row["reason"]) == (
        "unpack4",
        "reference",
        "float32",
        "",
        "",
    )
    assert float(row["gb_per_s"]) == pytest.approx(float(row["megabytes"]) / float(row["p50_ms"]), rel=1e-3)
    assert cells(next(line for line in shown.splitlines() if "unpack4" in line))[:3] == ["unpack4", "int4", "reference"]


def test_kernels_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, *KERNELS, "--op", "matmul", "--json")[0])
    assert [row["case"].split(",")[0] for row in rows] == ["grad_input"] * 2 + ["grad_weight"] * 2
    assert all(row["tflops"] > 0 and row["vs_torch"] > 0 and row["vs_copy"] is None for row in rows)


def test_one_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "layers.csv"
    for policy in ("hot", "int8"):  # the second run appends
        shown, _ = run(capsys, *LAYERS, *SHAPE, "--no-peers", "--policy", policy, "-o", str(output))
    assert "64x48x32" in shown and "× fp32" in shown and "× tf32" not in shown
    rows = read(output)
    assert list(rows[0])[6:] == [
        "set", "layer", "kind", "tokens", "outputs", "inputs", "count", "dtype", "mode", "candidate", "what",
        "p20_ms", "p50_ms", "p80_ms", "vs_bf16", "vs_tf32", "vs_fp32", "packing_share", "published_fp_us",
        "published_hot_us", "reason",
    ]  # fmt: skip
    assert [(row["candidate"], row["what"]) for row in rows] == [
        (name, what) for policy in ("hot", "int8") for what in ("forward", "backward") for name in ("fp32", policy)
    ]
    for dense, own in zip(rows[::2], rows[1::2], strict=True):
        assert float(own["vs_fp32"]) == pytest.approx(float(dense["p50_ms"]) / float(own["p50_ms"]), rel=1e-3)
        assert (own["packing_share"] != "") == (own["what"] == "forward")


def test_named_sets_with_their_sums(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    convs = [Layer("first", (2, 8, 6, 6), 16, kernel=1, count=3), Layer("second", (2, 8, 6, 6), 8, kernel=3)]
    monkeypatch.setitem(shapes.SETS, "resnet50", LayerSet(lambda batch: convs, batch=2, peers=False, summary="sum"))
    monkeypatch.setattr(shapes, "PUBLISHED", (("Net", 49, 16, 32, 100, 50), ("Net", 49, 32, 16, 400, 50)))
    rows = json.loads(run(capsys, *LAYERS, "resnet50", "latency", "--json")[0])
    backward = {(row["set"], row["layer"], row["candidate"]): row for row in rows if row["what"] == "backward"}
    total = backward["resnet50", "sum", "hot"]
    assert total["count"] == 4 and total["kind"] == ""
    expected = 3 * backward["resnet50", "first", "hot"]["p50_ms"] + backward["resnet50", "second", "hot"]["p50_ms"]
    assert total["p50_ms"] == pytest.approx(expected)
    first, mean = backward["latency", "Net 49x16x32", "hot"], backward["latency", "geometric mean", "hot"]
    assert (first["published_fp_us"], first["published_hot_us"]) == (100, 50)
    assert mean["published_fp_us"] == pytest.approx(200)
    assert mean["vs_fp32"] == pytest.approx(
        (first["vs_fp32"] * backward["latency", "Net 49x32x16", "hot"]["vs_fp32"]) ** 0.5
    )
    assert {row["mode"] for row in rows} == {"eager"} and not any(row["reason"] for row in rows)


def test_vit_takes_a_batch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        shapes.SETS, "vit", LayerSet(lambda batch: [Layer("fc1", (batch, 7, 16), 24)], batch=256, peers=False)
    )
    rows = json.loads(run(capsys, *LAYERS, "vit", "--batch", "2", "--json")[0])
    assert {(row["layer"], row["tokens"]) for row in rows} == {("fc1", 14)}


def test_write_crossover(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(grid, "TOKENS", (16, 64))
    monkeypatch.setattr(grid, "FEATURES", (16,))
    monkeypatch.setattr(grid, "BATCHES", (1,))
    monkeypatch.setattr(grid, "PIXELS", 4)
    monkeypatch.setattr(grid, "CHANNELS", (8,))
    path = tmp_path / "table.csv"
    shown, said = run(capsys, *LAYERS, "--write-crossover", "--crossover-file", str(path))
    points = read_file(path)
    assert shown == "" and f"written: {path}, {len(points)} layers" in said
    assert {point.kind for point in points} == {"linear", "conv1x1", "conv3x3"}
    assert {point.dtype for point in points} == {"float32"} and all(point.ratio > 0 for point in points)
    _, said = run(capsys, *LAYERS, "--write-crossover", "--policy", "exact", code=2)
    assert "policy exact leaves every layer to torch" in said


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A backend whose pack4 is slower than the reference's, and which comes before it; an empty cache."""
    monkeypatch.setenv("HOT_CACHE", str(tmp_path / "cache"))
    register_backend(Backend("slow", devices=("cpu",), probe=lambda: (True, "a test"), priority=9))
    reference = ops_for("reference", "cpu")

    @register_kernel("pack4", backend="slow")
    def pack4(codes: Tensor) -> Tensor:
        time.sleep(0.003)
        return reference.pack4(codes)

    yield "slow"
    kernels.remove("slow.pack4")
    backends.remove("slow")
    table._ready.clear()


def test_write_order(slow: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "kernels.csv"
    every = [argument for argument in KERNELS if argument not in ("--backend", "reference")]
    shown, said = run(capsys, *every, "--op", "pack4", "--write-order", "-o", str(output))
    (path,) = (tmp_path / "cache" / "order").iterdir()
    assert f"written: {path}, 2 times; auto asks first: pack4: reference instead of slow" in said and "pack4" in shown
    assert ops_for("auto", "cpu").serving("pack4") == "reference"
    for row, kept in zip(read(output), read(path), strict=True):
        assert float(kept.pop("p50_ms")) == pytest.approx(float(row["p50_ms"]), rel=1e-4)
        assert kept == {name: row[name] for name in ("op", "case", "backend")}
    _, said = run(capsys, *every, "--op", "unpack4", "--write-order")
    assert "1 times; auto asks first: as before" in said and {row["op"] for row in read(path)} == {"pack4", "unpack4"}


def test_a_broken_order_shows_before_anything_is_timed(slow: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = FILES.own(name_of(torch.device("cpu")))
    path.parent.mkdir(parents=True)
    path.write_text("op\n")
    every = [argument for argument in KERNELS if argument not in ("--backend", "reference")]
    shown, said = run(capsys, *every, "--op", "pack4", "--write-order", code=2)
    assert "the columns are op,case,backend,p50_ms" in " ".join(said.split()) and not shown
    assert path.read_text() == "op\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "--write-order", "--backend", "reference"], "--write-order compares all backends that run here"),
        (["kernels", "--op", "pack5"], "unknown op 'pack5', did you mean 'pack4'?"),
        (["kernels", "--backend", "abacus"], "unknown backend 'abacus'"),
        (["kernels", "--size", "0"], "--size 0 must be above 0"),
        (["kernels", "--device", "cuda:99"], "--device 'cuda:99' is not here"),
        (["layers"], "name a set (llm, vit, latency, resnet50), or give --shape T O I"),
        (["layers", "vti"], "unknown set 'vti', did you mean 'vit'?"),
        (["layers", "llm", "--batch", "3"], "--batch 3: the layers of 'llm' have a fixed size"),
        (["layers", *SHAPE, "--mode", "graph"], "--mode graph needs a CUDA device: leave it out on cpu"),
        (["layers", *SHAPE, "--mode", "lazy"], "--mode 'lazy': use eager or graph"),
        (["layers", *SHAPE, "--dtype", "int8"], "--dtype 'int8' can't be measured"),
        (["layers", *SHAPE, "--policy", "hto"], "no preset and no file 'hto', did you mean 'hot'?"),
        (["layers", "--shape", "0", "1", "1"], "--shape 0 1 1: T, O and I must be above 0"),
        (["layers", *SHAPE, "-o", "nowhere/x.csv"], "there is no folder nowhere; make it first"),
    ],
)
def test_what_is_wrong_is_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    device = [] if "--device" in arguments else ["--device", "cpu"]
    shown, said = run(capsys, "bench", *arguments, *device, code=2)
    assert message in " ".join(said.split()) and "Traceback" not in said and shown == ""


def test_tuning_needs_triton(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine without a GPU it says what is missing, and times nothing."""
    if backends["triton"].availability()[0]:
        pytest.skip("there is one")
    out, error = run(capsys, *KERNELS, "--op", "pack4", "--tune", code=2)
    assert "backend 'triton' is not available" in error and not out
