"""One training step of a workload in several variants: its memory and its time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from hot.bench.timing import Timing
from hot.bench.workloads import Workload, checkpointed, workloads
from hot.convert import convert
from hot.memory import PeakMemory, count_saved_bytes, saved_by_op
from hot.policies.blocks import NESTED
from hot.policies.configs import find_config, load_plugins, named, names_in, read_config
from hot.policies.presets import preset_folder
from hot.policies.schema import Policy

NESTED[Workload] = workloads  # for `validate`
FOLDER = preset_folder().parent / "memory"


class StepConfig(BaseModel):
    """A workload, how much of it makes a batch, and the policies that are measured beside torch's own ways.

    plugins: files that register workloads of yours; loaded only with --allow-plugins.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    name: str = Field(min_length=1)
    workload: Workload
    batch: int = Field(ge=1)
    policies: list[str] = ["hot", "memory"]
    plugins: list[str] = []


def config_names() -> list[str]:
    """The configurations that come with HOT."""
    return names_in(FOLDER)


def load_config(name: str, *, allow_plugins: bool = False) -> StepConfig:
    """The configuration of that name, or in that file, at whose folder the paths in it start. Raises PolicyError with every
    problem, HotError for an unknown name or code that may not run."""
    path = find_config(name, FOLDER, "configuration")
    root = read_config(path, ("policies", "plugins"))
    load_plugins(root, allow_plugins)
    return named(StepConfig, root, path, "a configuration")


@dataclass(frozen=True)
class Variant:
    """One way to take the step. low: under bf16 autocast; tf32: float32 products in TF32; policy: of the converted layers."""

    name: str
    low: bool = False
    tf32: bool = False
    checkpoints: bool = False
    policy: Policy | None = None


TORCH = (
    Variant("fp32"),
    Variant("tf32", tf32=True),
    Variant("bf16", low=True),
    Variant("bf16 + checkpointing", low=True, checkpoints=True),
)
"""torch's own ways. bf16: autocast, with float32 weights."""


@dataclass(frozen=True)
class Row:
    """A step of one variant. Bytes; milliseconds. saved: what autograd holds between forward and backward, by all ops and by
    linear and conv layers; peak_…: of a whole step, beyond what was allocated before the model was built; on a CPU `allocated`
    is the growth of the process, reserved is None.

    reason: why there are no numbers.
    """

    workload: str
    batch: int
    variant: str
    saved: int | None = None
    saved_in_layers: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    reason: str = ""


class Training:
    """A model in one variant, its optimizer (AdamW) and one batch. ``step()`` takes a whole step and returns the loss."""

    def __init__(self, workload: Workload, variant: Variant, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.workload, self.variant, self.device = workload, variant, device
        with device:
            self.model: nn.Module = workload.build()
        if variant.checkpoints:
            checkpointed(workload.blocks(self.model))
        if variant.policy is not None:
            convert(self.model, variant.policy)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 1e-4, fused=device.type == "cuda")
        self.batch = workload.batch(batch, device)

    def forward(self) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.variant.low):
            return self.workload.loss(self.model, self.batch)

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def saved(self) -> tuple[int, int]:
        """Bytes that a forward saves, by all ops and by layers."""
        with count_saved_bytes(self.model) as counted:
            loss = self.forward()
        loss.backward()  # and with it goes what was saved
        return counted.total, counted.in_layers


def measure_step(
    workload: Workload, name: str, variant: Variant, batch: int, device: torch.device, repeats: int = 8
) -> Row:
    """Memory and time of a variant, from a fresh model on an emptied allocator. Out of memory is a row that says so."""
    try:
        with settled(variant, device):
            return _measure(workload, name, variant, batch, device, repeats)
    except torch.OutOfMemoryError:
        hint = f"try --batch {batch // 2}, or --budget" if batch > 1 else "not even one fits"
        return Row(name, batch, variant.name, reason=f"out of memory at batch {batch}: {hint}")
    finally:
        free(device)


def _measure(workload: Workload, name: str, variant: Variant, batch: int, device: torch.device, repeats: int) -> Row:
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    training = Training(workload, variant, batch, device)
    for _ in range(3):  # kernels are compiled, and the optimizer has its state
        training.step()
    saved = training.saved()
    training.optimizer.zero_grad(set_to_none=True)
    peak = PeakMemory(device)
    training.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    peaks = peak.read()
    times = Timing.of([_milliseconds(training.step, device) for _ in range(repeats)])
    allocated = peaks["allocated"] - before if "allocated" in peaks else peaks.get("rss_growth")
    return Row(name, batch, variant.name, *saved, allocated, peaks.get("reserved"), times.p20, times.p50, times.p80)


def measure_ops(workload: Workload, variant: Variant, batch: int, device: torch.device) -> dict[tuple[str, str], int]:
    """Bytes that a forward of a fresh model saves, by module and op, as `saved_by_op`; nothing where memory runs out."""
    try:
        with settled(variant, device):
            training = Training(workload, variant, batch, device)
            return saved_by_op(training.model, training.forward)
    except torch.OutOfMemoryError:
        return {}
    finally:
        free(device)


def _milliseconds(step: Callable[[], object], device: torch.device) -> float:
    """A step's time; on CUDA the host may run ahead within it, as it does in training."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    step()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)


@contextmanager
def settled(variant: Variant, device: torch.device) -> Iterator[None]:
    """The variant's precision of float32 products; all as it was afterwards."""
    precision = torch.get_float32_matmul_precision()
    free(device)
    torch.set_float32_matmul_precision("high" if variant.tf32 else "highest")
    cudnn: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.flags(enabled=True, allow_tf32=variant.tf32)
    try:
        with cudnn:
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def free(device: torch.device) -> None:
    """Give back what nobody holds: after an error its traceback may have held the whole step."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
