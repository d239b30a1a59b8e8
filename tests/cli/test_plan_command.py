"""`hot plan` and `hot calibrate`, as a person calls them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hot
from hot.backends.order import Time
from hot.backends.order import write as write_order
from hot.cli import main
from hot.crossover import Point, write

VIT = ["--model", "vit", "--input", "2,1,32,32", "--classes", "10"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of ``hot ARGUMENTS``, which must end with that exit code."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    return capsys.readouterr()


def test_plan_shows_every_layer_and_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "plan", "hot", *VIT)
    assert "blocks.0.attn.qkv" in out and "hadamard 16" in out
    assert "policy exact by rule 1" in " ".join(out.split())  # the head, with its reason
    assert "all layers" in out


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["layer"]: row for row in json.loads(run(capsys, "plan", "hot", *VIT, "--json")[0])["layers"]}
    qkv = rows["blocks.0.attn.qkv"]
    assert qkv["saved_before"] == 2 * 64 * 96 * 4
    assert qkv["saved_after"] == 2 * 64 * 96 // 2 + 96 * 4  # r/n · 1 byte an element, and a scale a channel
    assert qkv["plan"]["grad_weight"]["transform"]["rank"] == 8
    assert rows["head"]["plan"] is None and "rule 1" in rows["head"]["skip"]


def test_plan_shows_what_other_ops_save(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "plan", "memory", *VIT)
    lines = {tuple(line.split("│")[1:3]): line for line in out.splitlines() if line.count("│") == 7}
    found = {(module.strip(), op.strip()): line.split("│")[3:7] for (module, op), line in lines.items()}
    kept, modules, before, after = (cell.strip() for cell in found["blocks.*.mlp.act", "gelu"])
    assert (kept, modules, before) == ("int4 block 64 hashed", "4", "768.0 KiB") and after == "108.0 KiB"
    rows = json.loads(run(capsys, "plan", "memory", *VIT, "--json")[0])["ops"]
    own = [row for row in rows if row["op"] == "gelu"]
    assert len(own) == 4 and sum(row["before"] for row in own) == 768 * 1024 == 4 * own[0]["before"]


def test_plan_explains_one_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text(
        'version: 1\nextends: hot\nrules:\n  - match: "blocks.*.attn.qkv"\n    grad_weight: {transform: {rank: 12}}\n'
    )
    out, _ = run(capsys, "plan", str(policy), *VIT, "--explain", "blocks.1.attn.qkv")
    assert "mine.yaml:4" in out and "grad_weight.transform.rank: 8 → 12" in out
    assert "grad_input product: integer, reference" in out


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A crossover of another machine's device: fc1 runs, the other layers are left exact."""
    monkeypatch.setenv("HOT_CACHE", str(tmp_path / "cache"))
    plan = str(hot.resolve(hot.load_policy("hot"), nn.Sequential(nn.Linear(32, 32)))["0"])
    points = [Point("linear", plan, "float32", 128, *shape) for shape in [(96, 96, 0.5), (384, 96, 1.25)]]
    write([*points, Point("linear", plan, "bfloat16", 1, 1, 1, 2.0)], "NVIDIA H200")


@pytest.mark.usefixtures("h200")
def test_plan_shows_what_a_crossover_leaves_exact(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "plan", "hot", *VIT, "--device", "NVIDIA H200")
    assert "crossover of NVIDIA H200: 3 points" in " ".join(out.split())
    layer = next(line for line in out.splitlines() if "blocks.0.attn.proj" in line)
    assert "exact: crossover, 0.50× dense" in layer and "torch" in layer
    assert "integer, reference" in next(line for line in out.splitlines() if "blocks.0.mlp.fc1" in line)
    out, _ = run(capsys, "plan", "hot", *VIT)  # this machine's crossover says nothing
    assert "exact: crossover" not in out


@pytest.mark.usefixtures("h200")
def test_plan_tells_a_crossover_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    def layers(*more: str) -> dict[str, Any]:
        out = run(capsys, "plan", "hot", *VIT, "--device", "nvidia-h200", "--json", *more)[0]
        return {row["layer"]: row for row in json.loads(out)["layers"]}

    rows = layers()
    proj, fc1 = rows["blocks.0.attn.proj"], rows["blocks.0.mlp.fc1"]
    assert proj["crossover"]["leaves_exact"] and proj["crossover"]["nearest"]["outputs"] == 96
    assert proj["saved_after"] == proj["saved_before"] == 2 * 64 * 96 * 4 and proj["products"]["grad_input"] == "torch"
    assert fc1["crossover"]["leaves_exact"] is False and fc1["products"]["grad_weight"] == "integer, reference"
    assert rows["head"]["crossover"] is rows["head"]["products"] is None
    half = layers("--dtype", "bfloat16")["blocks.0.attn.proj"]
    assert half["crossover"]["leaves_exact"] is False and half["saved_before"] == 2 * 64 * 96 * 2


@pytest.mark.usefixtures("h200")
def test_plan_explains_a_crossover(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "hot", *VIT, "--device", "nvidia-h200", "--explain"]
    out, _ = run(capsys, *asked, "blocks.1.attn.proj")
    assert "on nvidia-h200: exact: crossover, 0.50× dense at T×O×I = 128×96×96" in out
    assert "runs: crossover, 1.25× dense" in run(capsys, *asked, "blocks.1.mlp.fc1")[0]
    assert "on nvidia-h200: no point of the crossover is for this layer" in run(capsys, *asked, "head")[0]


@pytest.mark.usefixtures("h200")
def test_plan_is_readable_at_120_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    lines = run(capsys, "plan", "hot", *VIT, "--device", "nvidia-h200")[0].splitlines()
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert max(map(len, plain)) <= 120 and "all layers" in "".join(plain)
    assert len(plain) < 6 * 18  # five lines a layer at most: 16 in the blocks, the embedding and the head


@pytest.mark.usefixtures("h200")
def test_info_lists_crossovers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cache/crossover/broken.csv").write_text("kind\n")
    facts = json.loads(run(capsys, "info", "--json")[0])
    assert facts["crossover"]["nvidia-h200"] == "3 points, this user's"
    assert "the columns are kind,plan" in facts["crossover"]["broken"]


def test_info_lists_orders(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOT_CACHE", str(tmp_path))
    path = write_order([Time("pack4", "int4", "reference", 1.0)], "Chip")
    (path.parent / "broken.csv").write_text("op\n")
    facts = json.loads(run(capsys, "info", "--json")[0])["order"]
    assert facts["chip"] == "1 times, this user's" and facts["nvidia-h200"].endswith(" times, packaged")
    assert "the columns are op,case" in facts["broken"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hott", *VIT], "did you mean 'hot'"),
        (["hot", "--model", "vitt"], "did you mean 'vit'"),
        (["hot", "--model", "vit", "--input", "2,x"], "--input '2,x' is not SHAPE"),
        (["hot", "--model", "vit", "--input", "2,1,30,30"], "model.patch: 4 does not divide"),
        (["hot", *VIT, "--explain", "blocks.9.attn.qkv"], "no layer 'blocks.9.attn.qkv', did you mean"),
        (["hot", "--model", "mine.py:build"], "is code that would run"),
        (["hot", *VIT, "--device", "nvidia h2000"], "no crossover table of 'nvidia h2000'"),
        (["hot", *VIT, "--dtype", "int64"], "--dtype 'int64' is not a floating dtype"),
    ],
)
def test_plan_refuses(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    _, err = run(capsys, "plan", *arguments, code=2)
    assert message in " ".join(err.split()) and "Traceback" not in err


def test_calibrate_writes_a_policy_with_its_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ["--set", "data={kind: digits, size: 16}", "--set", "model.dim=16", "--set", "model.depth=1"]
    mine = tmp_path / "mine.yaml"
    run(capsys, "calibrate", "quickstart", "-o", str(mine), "--policy", "hot-paper", "--batches", "2", *small)
    text = mine.read_text()
    assert text.count("relative squared error tensor") == 4  # the four layers of a block; stem and head are exact
    policy = hot.load_policy(mine)
    assert len(policy.rules) == len(hot.load_policy("hot-paper").rules) + 4
    assert {rule.to_dict()["grad_weight"]["grad_output"]["granularity"] for rule in policy.rules[-4:]} <= {
        "tensor",
        "token",
    }


def test_calibrate_says_what_there_is_to_choose(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ["--set", "data={kind: digits, size: 16}", "--set", "model.dim=16", "--set", "model.depth=1"]
    _, err = run(
        capsys, "calibrate", "quickstart", "-o", str(tmp_path / "x.yaml"), "--policy", "lbp-wht", *small, code=2
    )
    assert "nothing to calibrate" in err and not (tmp_path / "x.yaml").exists()
