"""The op table and the backends that serve it. `ops_for(backend, device)` gives the ops; kernels know no policy."""

from __future__ import annotations

import torch

from hot.backends import activation_ops as activation_ops  # with ops, declares every op
from hot.backends import cupy as cupy  # the package, which imports no CuPy
from hot.backends import ops as ops
from hot.backends import triton as triton  # the package, which imports no Triton
from hot.backends.devices import float8_from
from hot.backends.table import (
    AUTO,
    OPS,
    REFERENCE,
    Backend,
    Kernel,
    Op,
    Ops,
    backends,
    get_ops,
    kernels,
    ops_for,
    register_backend,
    register_kernel,
    require,
)

__all__ = [
    "AUTO", "OPS", "REFERENCE", "Backend", "Kernel", "Op", "Ops", "backends", "get_ops", "kernels", "ops_for",
    "register_backend", "register_kernel", "require",
]  # fmt: skip

register_backend(
    Backend(
        REFERENCE,
        devices=("cpu", "cuda", "meta"),
        probe=lambda: (True, f"plain torch {torch.__version__}"),
    )
)
register_backend(
    Backend("triton", devices=triton.devices(), probe=triton.probe, load=triton.load, priority=10, float8=float8_from)
)
register_backend(
    Backend("cupy", devices=cupy.devices(), probe=cupy.probe, load=cupy.load, priority=5, float8=float8_from)
)

from hot.backends import reference as reference  # noqa: E402  registers the reference kernels
