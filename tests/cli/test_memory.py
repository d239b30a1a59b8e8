"""`hot memory`: tables, files and mistakes."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hot.bench.steps import Training
from hot.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of ``hot memory ARGUMENTS``, which must end with that exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["memory", *arguments])
    assert ended.value.code == code
    return capsys.readouterr()


def test_a_step_in_every_variant(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    table, image = tmp_path / "m.csv", tmp_path / "m.png"
    chosen = ["--batch", "4", "--repeats", "3", "--device", "cpu", "--variant", "fp32", "--variant", "memory"]
    out, _ = run(capsys, "tiny", *chosen, "-o", str(table), "--plot", str(image), "--per-op")
    assert (
        "tiny, batch 4; GiB" in out
        and "images/s" in out
        and "blocks.*.mlp.act" in out
        and image.read_bytes()[:4] == b"\x89PNG"
    )
    run(
        capsys, "tiny", "--batch", "4", "--estimate-only", "--device", "cpu", "--variant", "bf16", "-o", str(table)
    )  # appends
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["fp32", "memory", "bf16"] and rows[0]["batch"] == "4"
    assert float(rows[1]["saved"]) < 0.4 * float(rows[0]["saved"]) and float(rows[0]["p50_ms"]) > 0
    assert abs(float(rows[0]["estimated_saved"]) / float(rows[0]["saved"]) - 1) < 0.01


def test_an_estimate_runs_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: Any, **__: Any) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr("hot.bench.steps.measure_step", no)
    rows = json.loads(run(capsys, "tiny", "--estimate-only", "--budget", "200MiB", "--json")[0])
    found = {row["variant"]: row for row in rows}
    assert found["memory"]["p50_ms"] is None and found["memory"]["largest_batch"] is None
    assert found["memory"]["estimated_batch"] > 1.5 * found["bf16"]["estimated_batch"] > 0
    out, _ = run(capsys, "tiny", "--estimate-only", "--per-op")
    assert "saved under memory, estimated" in out and "bit operations under bf16" in out and "moments" in out
    assert "bit operations" in " ".join(out.split()) and "10¹²" in out and "grad_weight" in out


def test_ops_add_up_and_an_estimate_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--batch", "4", "--repeats", "3", "--device", "cpu", "--variant", "bf16", "--variant", "memory"]
    rows = json.loads(run(capsys, "tiny", *chosen, "--per-op", "--json")[0])
    for row in rows:
        assert sum(entry["bytes"] for entry in row["by_op"]) == row["saved"]
        assert abs(row["estimated_saved"] / row["saved"] - 1) < 0.01
    ops = [{(entry["module"], entry["op"]) for entry in row["by_op"]} for row in rows]
    assert ("blocks.1.mlp.act", "Gelu") in ops[0] and ("blocks.1.mlp.act", "Activation") in ops[1]


def test_out_of_memory_in_one_variant(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, in the table, and the others run."""
    real = Training.forward

    def forward(self: Training) -> torch.Tensor:
        if self.variant.policy is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self)

    monkeypatch.setattr(Training, "forward", forward)
    chosen = ["--batch", "4", "--repeats", "3", "--device", "cpu", "--variant", "bf16", "--variant", "hot", "--per-op"]
    out, _ = run(capsys, "tiny", *chosen)
    assert "bf16: out of memory at batch 4: try --batch 2, or --budget" in out
    assert "saved under hot, measured" in out and "saved under bf16" not in out


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [("bert-base", "transformers", "hot-training[hf]"), ("resnet50", "torchvision", "torchvision")],
)
def test_a_missing_library(
    name: str, missing: str, extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [missing, *(each for each in sys.modules if each.startswith(f"{missing}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    _, err = run(capsys, name, "--estimate-only", code=2)
    assert f"this workload needs {missing}" in err and f"pip install '{extra}'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tinny"], "no configuration 'tinny', did you mean 'tiny'"),
        (["tiny", "--variant", "bf17"], "--variant 'bf17': choose from fp32, bf16"),
        (["tiny", "--budget", "24"], "--budget '24' is no size: write 24GiB"),
        (["tiny", "--policy", "hott"], "hott"),
        (["tiny", "--estimate-only", "--plot", "x.png"], "--plot shows what was measured"),
        (["tiny", "-o", "nowhere/m.csv"], "there is no folder nowhere"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = run(capsys, *arguments, "--device", "cpu", code=2)
    assert message in " ".join(err.split())


PLUGIN = """
import torch
from torch import nn
from hot.bench.workloads import Workload, register_workload


@register_workload("narrow")
class Narrow(Workload):
    width: int = 64

    def build(self):
        return nn.Sequential(nn.Linear(self.width, 128), nn.GELU(), nn.Linear(128, 10))

    def batch(self, size, device):
        return torch.randn(size, self.width, device=device), torch.randint(0, 10, (size,), device=device)

    def blocks(self, model):
        return [model[0]]
"""


def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "narrow.py").write_text(PLUGIN)
    (tmp_path / "half.yaml").write_text("version: 1\nextends: memory\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text("workload: {kind: narrow, width: 96}\nbatch: 16\npolicies: [half.yaml]\nplugins: [narrow.py]\n")
    err = run(capsys, str(mine), code=2)[1]
    assert "narrow.py is code that would run; allow it with --allow-plugins" in err
    half = str(tmp_path / "half.yaml")  # both start at the folder of the file that names them
    arguments = "--allow-plugins", "--device", "cpu", "--repeats", "3", "--variant", "bf16", "--variant", half, "--json"
    rows = json.loads(run(capsys, str(mine), *arguments)[0])
    assert [row["variant"] for row in rows] == ["bf16", half] and rows[0]["workload"] == "mine"
    assert rows[0]["saved"] > rows[1]["saved"] > 0
    assert abs(rows[0]["estimated_saved"] / rows[0]["saved"] - 1) < 0.1
