"""The Triton backend: kernels for NVIDIA GPUs from compute capability 8.0 on.

Importing this package imports no Triton and needs no driver. With ``TRITON_INTERPRET=1`` in the environment before Triton is
imported, the kernels run under Triton's interpreter, on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
from importlib import import_module, metadata

from hot.backends.devices import probe_gpu

OLDEST = (3, 4)


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
    return probe_gpu(f"Triton {version}")


def _version() -> str:
    """The version of the installed Triton, under the names that it is published by."""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return str(import_module("triton").__version__)


def load() -> None:
    """Import the modules that register the kernels."""
    from hot.backends.triton import activations, bits, columns, fused, packing, products, quantization, transforms  # noqa: F401
