"""Checkpoints and metrics survive a full disk, damage and kills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hot.errors import HotError
from hot.train.checkpoint import MetricsLog, checkpoints, load_checkpoint, read_metrics, save_checkpoint, write_atomic


def test_the_last_two_are_kept_and_load_without_running_code(tmp_path) -> None:
    for step in (5, 10, 100):
        save_checkpoint(
            tmp_path, step, {"step": step, "w": torch.full((3,), step), "config": {"lr": 0.1, "none": None}}
        )
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-00000010.pt", "checkpoint-00000100.pt"]
    assert load_checkpoint(checkpoints(tmp_path)[-1])["config"] == {"lr": 0.1, "none": None}
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in checkpoints(tmp_path)]


def test_a_full_disk_raises_and_leaves_the_checkpoint_before(tmp_path) -> None:
    """Really full: the kernel refuses to write past the limit on the size of a file."""
    script = f"""
import resource, torch
from pathlib import Path
from hot.errors import HotError
from hot.train.checkpoint import MetricsLog, save_checkpoint
folder = Path({str(tmp_path)!r})
save_checkpoint(folder, 1, {{"w": torch.zeros(10)}})
log = MetricsLog(folder / "metrics.jsonl")
log.write(step=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for size in (20_000, 30_000, 1_000_000):
    try:
        save_checkpoint(folder, 2, {{"a": torch.zeros(10), "w": torch.zeros(size), "b": torch.zeros(10)}})
        print("written", size)
    except HotError as error:
        print("refused", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 100_000))
try:
    log.write(step=2, text="x" * 50)
except HotError as error:
    print("refused", error)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "written 20000"
    for line in lines[1:3]:
        assert "can't write" in line and "File too large; what was saved before is untouched" in line
    assert "metrics.jsonl: File too large" in lines[3]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert load_checkpoint(checkpoints(tmp_path)[-1])["w"].shape == (20_000,)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("fail_at", ["write", "fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, fail_at) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if fail_at != "write":
        monkeypatch.setattr(os, fail_at, full)
    with pytest.raises(HotError, match="No space left on device"):
        write_atomic(path, full if fail_at == "write" else lambda file: file.write(b"new"))
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old"


def test_errors_that_are_no_ones_disk_pass_through(tmp_path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_atomic(tmp_path / "file", lambda file: 1 / 0)
    assert not list(tmp_path.iterdir())


def test_left_over_temporary_files_go_with_the_next_checkpoint(tmp_path) -> None:
    (tmp_path / ".checkpoint-00000001.pt.abc.tmp").write_bytes(b"torn")
    save_checkpoint(tmp_path, 2, {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000002.pt"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"\x80\x02not a checkpoint"])
def test_a_damaged_checkpoint_is_named(tmp_path, content) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    path.write_bytes(content)
    with pytest.raises(HotError, match=r"can't read the checkpoint .*checkpoint-00000001\.pt"):
        load_checkpoint(path)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path) -> None:
    path = tmp_path / "checkpoint-00000001.pt"
    torch.save({"model": Path("x").exists}, path)
    with pytest.raises(HotError, match="can't read the checkpoint"):
        load_checkpoint(path)


def test_metrics_go_on_where_the_checkpoint_was(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(step=1, loss=float("nan"))
    size = log.sync()
    log.write(step=2, loss=0.5)
    log.close()
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    log = MetricsLog(path, size)
    assert log.sync() == size
    log.write(step=2, loss=0.25)
    log.close()
    assert read_metrics(path) == [{"step": 1, "loss": None}, {"step": 2, "loss": 0.25}]


def test_metrics_shorter_than_the_checkpoint_says_are_refused(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(HotError, match="shorter"):
        MetricsLog(tmp_path / "metrics.jsonl", 50)


def test_lines_are_json_that_any_reader_takes(tmp_path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(a=float("inf"), b=[1.5, float("nan")], c={"d": -0.0}, e="ü")
    log.close()

    def refuse(word: str) -> None:
        raise AssertionError(word)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"a": None, "b": [1.5, None], "c": {"d": 0.0}, "e": "ü"}
