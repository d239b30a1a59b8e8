"""Facts of a tensor's device, for launchers of every backend."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

OLDEST = (8, 0)
"""The compute capability that the kernels of every backend need."""


def probe_gpu(library: str, mismatch: str = "") -> tuple[bool, str]:
    """(available, reason) of kernels by `library`, such as ``Triton 3.6.0``, on torch's current GPU.

    mismatch: why the library, on any GPU, is not for this torch; "" if it is.
    """
    if torch.version.hip is not None:
        return False, "this torch is built for ROCm: an NVIDIA GPU is needed"
    if not torch.cuda.is_available():
        return False, f"{library} is there, but torch finds no CUDA device"
    if mismatch:
        return False, mismatch
    major, minor = torch.cuda.get_device_capability()
    chip = f"{torch.cuda.get_device_name()}, sm_{major}{minor}"
    if (major, minor) < OLDEST:
        return False, f"{chip}: compute capability {OLDEST[0]}.{OLDEST[1]} or newer is needed"
    return True, f"{library} on {chip}"


def on_device(t: Tensor) -> AbstractContextManager[object]:
    """A context in which t's device is the current one: kernels are launched there, on torch's current stream of it."""
    if not t.is_cuda or t.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(t.device)


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability (major, minor); (0, 0) for what is no GPU. Kept in a dict, which torch.compile can read."""
    if device.type != "cuda":
        return 0, 0
    index = _index(device)
    if index not in _capabilities:
        _capabilities[index] = torch.cuda.get_device_capability(index)
    return _capabilities[index]


def has_fp8(device: torch.device) -> bool:
    """Whether the tensor cores multiply float8: capability 8.9 and up."""
    return capability(device) >= (8, 9)


def float8_from() -> float:
    """From how many elements on a product of small integers is faster in float8 than in int8 on these GPUs: where it has a tile
    of 128 × 128 for every multiprocessor. On an H200 int8 takes 0.5 to 0.9 of the time below. inf where a GPU has no float8.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.device("cuda", index) for index in range(count)]
    if not found or not all(map(has_fp8, found)):
        return math.inf
    return 128 * 128 * max(map(multiprocessors, found))


def multiprocessors(device: torch.device) -> int:
    """How many streaming multiprocessors there are; 1 for what is no GPU."""
    return _multiprocessors(_index(device)) if device.type == "cuda" else 1


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


_capabilities: dict[int, tuple[int, int]] = {}


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
