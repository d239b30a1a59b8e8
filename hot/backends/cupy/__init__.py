"""The CuPy backend: CUDA C++ kernels for NVIDIA GPUs from compute capability 8.0 on, compiled at run time.

Importing this package imports no CuPy and needs no driver, no CUDA headers and no compiler but NVRTC, which comes with CuPy's
wheels or with torch's.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata

import torch

from hot.backends.devices import probe_gpu

OLDEST = 14
WHEELS = {"cupy-cuda13x": "13", "cupy-cuda12x": "12", "cupy": ""}
"""The names that CuPy is published by, and the CUDA that each is for."""


def devices() -> tuple[str, ...]:
    """The torch device types that the kernels run on."""
    return ("cuda",)


def probe() -> tuple[bool, str]:
    """(available, reason), without importing CuPy."""
    if importlib.util.find_spec("cupy_backends") is None:
        return False, "cupy is not installed: pip install 'hot-training[cupy]'"
    version, cuda = _installed()
    if int(version.split(".")[0]) < OLDEST:
        return False, f"CuPy {version} is too old: {OLDEST}.0 or newer is needed"
    wanted = (torch.version.cuda or "").split(".")[0]
    mismatch = f"CuPy {version} is for CUDA {cuda}, this torch for CUDA {wanted}: pip install cupy-cuda{wanted}x"
    return probe_gpu(f"CuPy {version}", mismatch if cuda and cuda != wanted else "")


def _installed() -> tuple[str, str]:
    """The version of the installed CuPy, and the major version of the CUDA that it is for, "" for any."""
    for name, cuda in WHEELS.items():
        try:
            return metadata.version(name), cuda
        except metadata.PackageNotFoundError:
            continue
    return str(importlib.import_module("cupy").__version__), ""


def load() -> None:
    """Import the modules that register the kernels."""
    from hot.backends.cupy import fused, packing, products, quantization, transforms  # noqa: F401
