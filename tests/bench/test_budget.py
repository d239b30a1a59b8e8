"""The search for the largest batch of a budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hot
from hot.bench.budget import fits_budget, largest_batch
from hot.bench.steps import TORCH
from hot.bench.workloads import VitStep

CPU = torch.device("cpu")
TINY = VitStep(size=32, classes=10, patch=8, dim=64, depth=2, heads=2)


@given(st.integers(0, 5000), st.integers(1, 300))
def test_the_largest_batch_is_found_to_three_percent(limit: int, first: int) -> None:
    asked: list[int] = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= limit

    found = largest_batch(fits, first)
    assert found <= limit <= found + max(found // 32, 1) and len(asked) < 30


def test_a_budget_needs_a_gpu() -> None:
    with pytest.raises(hot.HotError, match="--budget needs a GPU"):
        fits_budget(TINY, TORCH[0], 2**30, CPU)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A GPU of 16 GiB on which a batch takes 1 GiB an image; the fractions that were asked for, in order."""
    fractions = [0.75]

    class Properties:
        total_memory = 16 * 2**30

    class Fake:
        def __init__(self, workload: object, variant: object, batch: int, device: torch.device) -> None:
            self.batch = batch

        def step(self) -> None:
            if self.batch * 2**30 > fractions[-1] * Properties.total_memory:
                raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("hot.bench.budget.Training", Fake)
    monkeypatch.setattr("hot.bench.budget.free", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def limits(device: torch.device) -> list[float]:
        if device.index is None:
            raise ValueError("Expected a torch.device with a specified index")  # as torch's own do
        return fractions

    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: limits(device)[-1])
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda value, device: limits(device).append(value)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("hot.bench.steps.free", lambda device: None)
    return fractions


def test_a_budget_limits_the_allocator_and_is_lifted_again(gpu: list[float]) -> None:
    fits = fits_budget(TINY, TORCH[0], 6 * 2**30, torch.device("cuda"))
    assert largest_batch(fits, 2) == 6
    assert set(gpu) == {0.75, 0.375} and gpu[-1] == 0.75


def test_a_budget_beyond_the_gpu(gpu: list[float]) -> None:
    with pytest.raises(hot.HotError, match=r"--budget 17\.0GiB is more than the 16\.0 GiB of this GPU"):
        fits_budget(TINY, TORCH[0], 17 * 2**30, torch.device("cuda"))
