"""The Triton backend: kernels for NVIDIA GPUs from compute capability 8.0 on.

Importing this package imports no Triton and needs no driver. With ``TRITON_INTERPRET=1`` in the environment before Triton is
imported, the kernels run under Triton's interpreter, on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
from importlib import import_module, metadata

import torch

OLDEST = (3, 4)
CAPABILITY = (8, 0)


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def devices() -> tuple[str, ...]:
    """The torch device types that the kernels run on."""
    return ("cuda", "cpu") if interpreted() else ("cuda",)


def probe() -> tuple[bool, str]:
    """(available, reason), without importing Triton."""
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed: pip install 'hot-training[triton]'"
    version = _version()
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return False, f"Triton {version} is too old: {'.'.join(map(str, OLDEST))} or newer is needed"
    if interpreted():
        return True, f"Triton {version}, interpreted: TRITON_INTERPRET=1"
    if torch.version.hip is not None:
        return False, "this torch is built for ROCm: an NVIDIA GPU is needed"
    if not torch.cuda.is_available():
        return False, f"Triton {version} is there, but torch finds no CUDA device"
    chip = f"{torch.cuda.get_device_name()}, sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
    if torch.cuda.get_device_capability() < CAPABILITY:
        return False, f"{chip}: compute capability {'.'.join(map(str, CAPABILITY))} or newer is needed"
    return True, f"Triton {version} on {chip}"


def _version() -> str:
    """The version of the installed Triton, under the names that it is published by."""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return str(import_module("triton").__version__)


def float8() -> bool:
    """Whether every GPU here has float8 tensor cores: capability 8.9 and up."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count > 0 and all(torch.cuda.get_device_capability(index) >= (8, 9) for index in range(count))


def load() -> None:
    """Import the modules that register the kernels."""
    from hot.backends.triton import fused, packing, products, quantization, transforms  # noqa: F401
