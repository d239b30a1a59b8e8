"""The training loop of one run: one model, one policy, one seed, one folder. Resumes bit for bit on the CPU."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hot.convert import convert
from hot.errors import HotError
from hot.memory import PeakMemory, count_saved_bytes
from hot.policies.save import save_policy
from hot.policies.schema import Policy
from hot.train.checkpoint import MetricsLog, checkpoints, load_checkpoint, read_metrics, save_checkpoint, write_json
from hot.train.config import Experiment
from hot.train.data import Data, order_of_epoch

TIMED_STEPS = 1000
"""Step times are medians over at most so many last steps."""


class Interrupted(HotError):
    """Training stopped on a signal, after a checkpoint."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


class Stop:
    """The signal that asked to stop, once one came."""

    signum: int | None = None


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Inside the block the first SIGINT or SIGTERM only asks to stop; a second one does what it always does."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield stop
        return
    former = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def ask(signum: int, frame: FrameType | None) -> None:
        stop.signum = signum
        restore()

    def restore() -> None:
        for signum, handler in former.items():
            signal.signal(signum, handler)

    for signum in former:
        signal.signal(signum, ask)
    try:
        yield stop
    finally:
        restore()


def pick_device(name: str) -> torch.device:
    """auto: CUDA where there is one. Raises HotError if CUDA is asked for and missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise HotError("device: cuda was asked for, but torch sees no CUDA device; use --set device=auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


class Run:
    """One run in a folder: metrics.jsonl, checkpoint-*.pt, policy.yaml, conversion.txt; summary.json at its end."""

    def __init__(self, experiment: Experiment, policy: Policy, label: str, seed: int, folder: Path, data: Data) -> None:
        self.experiment, self.label, self.seed, self.folder, self.data = experiment, label, seed, folder, data
        self.device = pick_device(experiment.device)
        self.steps_per_epoch = len(data.train) // experiment.batch_size
        if self.steps_per_epoch == 0:
            raise HotError(
                f"batch_size: {experiment.batch_size} is larger than the {len(data.train)} training examples"
            )
        self.steps = experiment.steps or (experiment.epochs or 0) * self.steps_per_epoch
        torch.manual_seed(seed)
        self.model = experiment.model.build(data.shape, data.classes).to(self.device)
        self.report = convert(self.model, policy)
        self.optimizer = experiment.optimizer.build(self.model)
        self.policy = policy
        effect = {key: value for key, value in policy.to_dict().items() if key != "description"}
        self.identity = {**experiment.identity(), "seed": seed, "policy": effect}
        self.step = 0
        self.metrics_size = 0
        self.saved: dict[str, Any] = {}
        self.peak: dict[str, int] = {}
        self.times: deque[tuple[float, float, float]] = deque(maxlen=TIMED_STEPS)

    def resume(self) -> None:
        """Take up the last checkpoint, if there is one. Raises HotError if it is of another configuration."""
        found = checkpoints(self.folder)
        if not found:
            return
        state = load_checkpoint(found[-1])
        if differing := _differing(state["config"], self.identity):
            raise HotError(f"{self.folder} was started with another configuration: " + "; ".join(differing))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"]["cpu"])
        if self.device.type == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"], self.device)
        self.step, self.metrics_size = state["step"], state["metrics_size"]
        self.saved, self.peak = state["saved_bytes"], state["peak_bytes"]
        self.times.extend((f, b, t) for f, b, t in state["times"].tolist())

    def train(self, stop: Stop, progress: Callable[[int, str], None]) -> dict[str, Any]:
        """Train to the last step and return the summary. Raises Interrupted, after a checkpoint, once `stop` is set."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_policy(self.policy, self.folder / "policy.yaml")
        (self.folder / "conversion.txt").write_text(f"{self.report}\n")
        log = MetricsLog(self.folder / "metrics.jsonl", self.metrics_size)
        try:
            peak = PeakMemory(self.device)
            while self.step < self.steps:
                self._one_step(log, progress)
                if stop.signum is not None or self._due(self.experiment.checkpoint_every):
                    self._save(log, peak.read())
                if stop.signum is not None and self.step < self.steps:
                    raise Interrupted(f"stopped after step {self.step} of {self.steps}", stop.signum)
        finally:
            log.close()
        summary = self.summary()
        write_json(self.folder / "summary.json", summary)
        return summary

    def _due(self, every: int | None) -> bool:
        """Whether something that happens every so many steps (None: every epoch), and at the end, is due."""
        return self.step % (every or self.steps_per_epoch) == 0 or self.step == self.steps

    def _one_step(self, log: MetricsLog, progress: Callable[[int, str], None]) -> None:
        epoch, position = divmod(self.step, self.steps_per_epoch)
        rate = self.experiment.optimizer.lr * self.experiment.schedule.factor(self.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, norm = self._update(*self.batch(epoch, position))
        self.step += 1
        if self._due(self.experiment.log_every):
            log.write(kind="train", step=self.step, epoch=epoch, loss=loss, lr=rate, grad_norm=norm)
        if self._due(self.experiment.eval_every):
            log.write(kind="eval", step=self.step, epoch=epoch, **self.evaluate())
        progress(self.step, f"loss {loss:.3f}")

    def batch(self, epoch: int, position: int) -> tuple[Tensor, Tensor]:
        """The inputs and labels of one step, on the device."""
        order = order_of_epoch(len(self.data.train), self.seed, epoch)
        size = self.experiment.batch_size
        return self.data.batch(self.data.train, order[position * size : (position + 1) * size], self.device)

    def _update(self, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        """One optimizer step; its loss and the norm of its gradient."""
        start = self._clock()
        if self.saved:
            loss = self.loss(inputs, labels)
        else:
            with count_saved_bytes(self.model) as saved:
                loss = self.loss(inputs, labels)
            self.saved = {"total": saved.total, "in_layers": saved.in_layers, "layers": saved.layers}
        forward = self._clock()
        loss.backward()
        backward = self._clock()
        limit = self.experiment.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if limit is None else limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append((forward - start, backward - forward, self._clock() - start))
        return loss.item(), norm.item()

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss that is trained, a scalar."""
        with self._autocast():
            return F.cross_entropy(self.model(inputs), labels, label_smoothing=self.experiment.label_smoothing)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.experiment.precision == "bf16")

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Accuracy and mean cross-entropy (without smoothing) on the test set."""
        self.model.eval()
        right, loss, size = 0, 0.0, self.experiment.batch_size
        for start in range(0, len(self.data.test), size):
            inputs, labels = self.data.batch(self.data.test, slice(start, start + size), self.device)
            with self._autocast():
                logits = self.model(inputs)
            right += int((logits.argmax(-1) == labels).sum())
            loss += F.cross_entropy(logits.float(), labels, reduction="sum").item()
        self.model.train()
        return {"accuracy": right / len(self.data.test), "loss": loss / len(self.data.test)}

    def _save(self, log: MetricsLog, peak: Mapping[str, int]) -> None:
        self.peak = {name: max(value, self.peak.get(name, 0)) for name, value in peak.items()}
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            "config": self.identity, "step": self.step, "metrics_size": log.sync(), "rng": rng,
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "saved_bytes": self.saved, "peak_bytes": self.peak,
            "times": torch.tensor(list(self.times), dtype=torch.float64),
        }  # fmt: skip
        save_checkpoint(self.folder, self.step, state)

    def summary(self) -> dict[str, Any]:
        """What the run came to: from the metrics file and the measurements, so a resumed run tells the whole."""
        lines = read_metrics(self.folder / "metrics.jsonl")
        last = {line["kind"]: line for line in lines}
        forward, backward, total = (1000 * statistics.median(column) for column in zip(*self.times, strict=True))
        return {
            "policy": self.label,
            "seed": self.seed,
            "steps": self.steps,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "accuracy": last["eval"]["accuracy"],
            "loss": last["eval"]["loss"],
            "train_loss": last["train"]["loss"],
            "step_ms": {"forward": forward, "backward": backward, "total": total},
            "saved_bytes": self.saved,
            "peak_bytes": self.peak,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


def _differing(before: Any, now: Any, key: str = "") -> list[str]:
    """Where two trees of plain data differ, by dotted key, with both values."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = sorted({*before, *now})
        return [
            text
            for name in keys
            for text in _differing(before.get(name), now.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if before == now else [f"{key} was {before!r}, is {now!r}"]
