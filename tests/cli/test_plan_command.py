"""`hot plan` and `hot calibrate`, as a person calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hot
from hot.cli import main

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
    rows = {row["layer"]: row for row in json.loads(run(capsys, "plan", "hot", *VIT, "--json")[0])}
    qkv = rows["blocks.0.attn.qkv"]
    assert qkv["saved_before"] == 2 * 64 * 96 * 4
    assert qkv["saved_after"] == 2 * 64 * 96 // 2 + 96 * 4  # r/n · 1 byte an element, and a scale a channel
    assert qkv["plan"]["grad_weight"]["transform"]["rank"] == 8
    assert rows["head"]["plan"] is None and "rule 1" in rows["head"]["skip"]


def test_plan_explains_one_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text(
        'version: 1\nextends: hot\nrules:\n  - match: "blocks.*.attn.qkv"\n    grad_weight: {transform: {rank: 12}}\n'
    )
    out, _ = run(capsys, "plan", str(policy), *VIT, "--explain", "blocks.1.attn.qkv")
    assert "mine.yaml:4" in out and "grad_weight.transform.rank: 8 → 12" in out
    assert "integer, reference matmul" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hott", *VIT], "did you mean 'hot'"),
        (["hot", "--model", "vitt"], "did you mean 'vit'"),
        (["hot", "--model", "vit", "--input", "2,x"], "--input '2,x' is not SHAPE"),
        (["hot", "--model", "vit", "--input", "2,1,30,30"], "model.patch: 4 does not divide"),
        (["hot", *VIT, "--explain", "blocks.9.attn.qkv"], "no layer 'blocks.9.attn.qkv', did you mean"),
        (["hot", "--model", "mine.py:build"], "is code that would run"),
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
