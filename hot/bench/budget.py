"""The largest batch of a variant whose step fits a budget of memory, found by taking steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hot.bench.steps import Training, Variant, free, settled
from hot.bench.workloads import Workload
from hot.errors import HotError


def largest_batch(fits: Callable[[int], bool], first: int = 8, most: int = 2**16) -> int:
    """The largest batch that fits, where every smaller one does too: doubled, then halved the interval. 0: not even one."""
    low, high = 0, first
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(low // 32, 1):  # to 3 %, which is finer than what a step takes varies
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fits_budget(workload: Workload, variant: Variant, budget: int, device: torch.device) -> Callable[[int], bool]:
    """Whether two steps of a batch stay within so many bytes of a GPU's memory, by taking them: the allocator is given no more.

    Raises HotError on a CPU, and where the budget is more than the GPU has.
    """
    if device.type != "cuda":
        raise HotError("--budget needs a GPU: a process's memory on a CPU can't be limited so")
    if device.index is None:  # for calls that ask which one
        device = torch.device(device.type, torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    if budget > total:
        raise HotError(f"--budget {budget / 2**30:.1f}GiB is more than the {total / 2**30:.1f} GiB of this GPU")

    def fits(batch: int) -> bool:
        before = torch.cuda.get_per_process_memory_fraction(device)
        try:
            with settled(variant, device):
                torch.cuda.set_per_process_memory_fraction(budget / total, device)
                _take_steps(workload, variant, batch, device)
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            torch.cuda.set_per_process_memory_fraction(before, device)
            free(device)

    return fits


def _take_steps(workload: Workload, variant: Variant, batch: int, device: torch.device) -> None:
    """Two: the optimizer makes its state in the first. What they held goes when this returns."""
    training = Training(workload, variant, batch, device)
    training.step()
    training.step()
    torch.cuda.synchronize(device)
