"""`hot train`: what it prints and writes, and that every mistake ends with one message and exit code 2."""

import json
import sys

import pytest

from hot.cli import main

CONFIG = """\
model: {kind: vit, patch: 2, dim: 16, depth: 1, heads: 2}
data: {kind: digits, train: 128, test: 64}
steps: 4
batch_size: 32
log_every: 2
threads: 1
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


def _run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["train", *map(str, arguments)])
    return exit_.value.code or 0


def test_compare_prints_one_table_and_writes_everything(config, tmp_path, capfd) -> None:
    output = tmp_path / "out"
    assert _run(config, "--compare", "exact,hot", "--set", "seeds=[0, 1]", "--output", output) == 0
    out, err = capfd.readouterr()
    rows = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in out.splitlines()]
    table = {row[0]: row[1:] for row in rows if len(row) == 3}
    assert table[""] == ["exact", "hot"]
    shown = (
        "accuracy, %",
        "test loss",
        "step, ms",
        "backward, ms",
        "saved for backward, MiB",
        "peak growth of the process, MiB",
    )
    assert set(shown) <= set(table)
    assert all("±" in cell for name in shown for cell in table[name])
    assert "exact-seed0: HOT: 0 of 6 layers" in err and "hot-seed1: HOT: " in err and "\r" not in err

    summary = json.loads((output / "summary.json").read_text())
    assert [(run["policy"], run["seed"]) for run in summary["runs"]] == [
        ("exact", 0),
        ("exact", 1),
        ("hot", 0),
        ("hot", 1),
    ]
    exact, hot = summary["runs"][0], summary["runs"][2]
    assert exact["saved_bytes"]["total"] > hot["saved_bytes"]["total"] > 0
    assert f"{100 * (exact['accuracy'] + summary['runs'][1]['accuracy']) / 2:.1f} ±" in table["accuracy, %"][0]
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    for name in ("metrics.jsonl", "policy.yaml", "conversion.txt", "summary.json"):
        assert (output / "hot-seed1" / name).stat().st_size > 0
    first = [
        json.loads((output / f"{policy}-seed0/metrics.jsonl").read_text().splitlines()[0])
        for policy in ("exact", "hot")
    ]
    assert first[0]["step"] == 2 and first[0]["loss"] == pytest.approx(first[1]["loss"], rel=0.05)


def test_the_exact_policy_under_one_seed_is_the_same_run_twice(config, tmp_path) -> None:
    for name in ("a", "b"):
        assert _run(config, "--set", "policy=exact", "--output", tmp_path / name) == 0
    metrics = [(tmp_path / name / "exact-seed0/metrics.jsonl").read_bytes() for name in ("a", "b")]
    assert metrics[0] == metrics[1]


def test_bf16_and_clipping(config, tmp_path) -> None:
    settings = ("--set", "precision=bf16", "--set", "clip_norm=0.1", "--set", "label_smoothing=0.1")
    assert _run(config, *settings, "--output", tmp_path / "out") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "modle=vit"], "unknown key 'modle', did you mean 'model'?"),
        (["--set", "steps=1.5"], "steps: must be a whole number, not 1.5"),
        (["--compare", "exact,hott"], "did you mean 'hot'?"),
        (["--set", "policy=exact.yaml"], "exact.yaml"),
        (["--set", "data={kind: fashion_mnist, root: /nowhere}"], "apt-get install dataset-fashion-mnist"),
        (["--set", "batch_size=1000"], "batch_size: 1000 is larger than the 128 training examples"),
        (["--set", "model=timm:vit_tiny_patch16_224", "--set", "device=cuda"], "device: cuda was asked for"),
        (["--compare", "exact,exact"], "have the same file name"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
    ],
)
def test_mistakes_end_with_one_message_and_exit_code_2(
    config, tmp_path, capfd, monkeypatch, arguments, message
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert _run(config, *arguments, "--output", tmp_path / "out") == 2
    out, err = capfd.readouterr()
    assert message in " ".join(err.split()) and "Traceback" not in err and out == ""
    assert not (tmp_path / "out").exists()


def test_missing_matplotlib_is_said_before_the_training(config, tmp_path, capfd, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert _run(config, "--output", tmp_path / "out") == 2
    assert "pip install 'hot-training[train]'" in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_unknown_experiment(capfd) -> None:
    assert _run("quickstrat") == 2
    assert "did you mean 'quickstart'?" in capfd.readouterr().err
