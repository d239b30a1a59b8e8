"""A run that was stopped, politely or not, ends as one that never was: same weights, same metrics, byte for byte."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hot.errors import HotError
from hot.train import Interrupted, load_experiment, run_experiment
from hot.train.checkpoint import checkpoints, load_checkpoint
from hot.train.loop import stop_on_signal

COMMAND = [sys.executable, "-c", "from hot.cli import main; main()", "train"]


def _start(config: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    command = [*COMMAND, str(config), "--output", str(output), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(config: Path, output: Path, *options: str) -> None:
    process = _start(config, output, *options)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def _wait_for_step(output: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until that many lines of metrics are there, or the process has ended."""
    metrics = output / "hot-seed0/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b'"train"') >= step):
        time.sleep(0.002)


def _assert_same(first: Path, second: Path) -> None:
    """The same final weights, optimizer state and random state, and the same metrics, bit for bit."""
    ends = [load_checkpoint(checkpoints(folder / "hot-seed0")[-1]) for folder in (first, second)]
    assert ends[0]["step"] == ends[1]["step"]
    for part in ("model", "optimizer", "rng", "config", "saved_bytes"):
        _assert_equal(ends[0][part], ends[1][part], part)
    metrics = [(folder / "hot-seed0/metrics.jsonl").read_bytes() for folder in (first, second)]
    assert metrics[0] == metrics[1]
    steps = [line["step"] for line in map(json.loads, metrics[0].splitlines()) if line["kind"] == "train"]
    assert steps == list(range(1, ends[0]["step"] + 1))


def _assert_equal(a: object, b: object, where: str) -> None:
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert isinstance(b, dict) and a.keys() == b.keys(), where
        for key in a:
            _assert_equal(a[key], b[key], f"{where}.{key}")
    else:
        assert a == b, where


def _kill_and_resume(tiny: Path, tmp_path: Path, kills: int, seed: int) -> None:
    """Kill one run again and again, each time a random while after its next step, and compare with a run left alone."""
    _finish(tiny, tmp_path / "whole")
    draw, killed, output = random.Random(seed), 0, tmp_path / "killed"
    for _ in range(kills):
        found = checkpoints(output / "hot-seed0")
        reached = int(found[-1].stem.rpartition("-")[2]) if found else 0
        process = _start(tiny, output, "--resume")
        _wait_for_step(output, min(reached + draw.randint(0, 4), 24), process)
        time.sleep(draw.uniform(0, 0.03))
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        for line in (output / "hot-seed0/metrics.jsonl").read_text().splitlines(keepends=True):
            assert line.endswith("\n") and json.loads(line)
        for path in checkpoints(output / "hot-seed0"):
            load_checkpoint(path)
    assert killed > 0
    _finish(tiny, output, "--resume")
    _assert_same(tmp_path / "whole", output)


def test_killed_at_random_moments_and_resumed_ends_bit_for_bit_the_same(tiny, tmp_path) -> None:
    _kill_and_resume(tiny, tmp_path, kills=3, seed=0)


@pytest.mark.slow
def test_killed_twenty_times(tiny, tmp_path) -> None:
    tiny.write_text(tiny.read_text().replace("steps: 24", "steps: 200"))
    _kill_and_resume(tiny, tmp_path, kills=20, seed=1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(tiny, tmp_path, signum) -> None:
    output = tmp_path / "stopped"
    process = _start(tiny, output, "--set", "steps=100000")
    _wait_for_step(output, 4, process)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "continue with: hot train" in errors and "--resume" in errors and "Traceback" not in errors
    state = load_checkpoint(checkpoints(output / "hot-seed0")[-1])
    assert f"stopped after step {state['step']} of 100000" in " ".join(errors.split())
    assert (output / "hot-seed0/metrics.jsonl").stat().st_size == state["metrics_size"]
    assert not list((output / "hot-seed0").glob(".*"))


def test_stopped_between_checkpoints_and_resumed_is_the_same(tiny, tmp_path) -> None:
    experiment = load_experiment(str(tiny))
    whole = run_experiment(experiment, tmp_path / "whole")
    with pytest.raises(Interrupted), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hot.train.loop.Run._update", _interrupting_update(at=11))
        run_experiment(experiment, tmp_path / "stopped")
    assert load_checkpoint(checkpoints(tmp_path / "stopped/hot-seed0")[-1])["step"] == 11
    resumed = run_experiment(experiment, tmp_path / "stopped", resume=True)
    _assert_same(tmp_path / "whole", tmp_path / "stopped")
    for key in ("accuracy", "loss", "train_loss", "saved_bytes"):
        assert whole[0][key] == resumed[0][key]


def _interrupting_update(at: int):
    from hot.train.loop import Run

    original, count = Run._update, iter(range(1, 1000))

    def update(self, inputs, labels):
        if next(count) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, inputs, labels)

    return update


def test_the_second_signal_acts_as_always() -> None:
    with pytest.raises(KeyboardInterrupt), stop_on_signal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signum == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_finished_run_stays_as_it_is(tiny, tmp_path) -> None:
    experiment = load_experiment(str(tiny), ["steps=6"])
    first = run_experiment(experiment, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run/hot-seed0").iterdir()}
    assert run_experiment(experiment, tmp_path / "run", resume=True) == first
    assert {path.name: path.read_bytes() for path in (tmp_path / "run/hot-seed0").iterdir()} == before


def test_another_configuration_is_refused_by_the_key_that_differs(tiny, tmp_path) -> None:
    output = tmp_path / "run"
    run_experiment(load_experiment(str(tiny), ["steps=6"]), output)
    policy = (output / "hot-seed0/policy.yaml").read_text()
    with pytest.raises(HotError, match=r"another configuration: optimizer\.lr was 0\.003, is 0\.1"):
        run_experiment(load_experiment(str(tiny), ["steps=6", "optimizer.lr=0.1"]), output, resume=True)
    changed = tmp_path / "hot.yaml"
    changed.write_text("version: 1\nextends: hot\ndefaults: {grad_weight: {transform: {rank: 4}}}\n")
    with pytest.raises(HotError, match=r"policy\.defaults\.grad_weight\.transform\.rank was 8, is 4"):
        run_experiment(load_experiment(str(tiny), ["steps=6", f"policy={changed}"]), output, resume=True)
    assert (output / "hot-seed0/policy.yaml").read_text() == policy
    harmless = ["steps=6", "log_every=5", "eval_every=2", "checkpoint_every=2"]
    run_experiment(load_experiment(str(tiny), harmless), output, resume=True)


def test_a_taken_folder_needs_a_decision(tiny, tmp_path) -> None:
    experiment = load_experiment(str(tiny), ["steps=3"])
    run_experiment(experiment, tmp_path)
    with pytest.raises(HotError, match=r"--resume continues, --overwrite starts anew"):
        run_experiment(experiment, tmp_path)
    run_experiment(experiment, tmp_path, overwrite=True)


def test_weights_load_into_a_plain_model(tiny, tmp_path) -> None:
    experiment = load_experiment(str(tiny), ["steps=3"])
    run_experiment(experiment, tmp_path)
    state = torch.load(checkpoints(tmp_path / "hot-seed0")[-1], weights_only=True)
    data = experiment.data.load()
    experiment.model.build(data.shape, data.classes).load_state_dict(state["model"], strict=True)
