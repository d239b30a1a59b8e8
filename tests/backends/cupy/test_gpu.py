"""What only kernels that are compiled at run time can get wrong on a GPU. The rest is in tests/backends/test_gpu.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hot.backends import backends, ops_for
from hot.backends.cupy import compile
from hot.backends.cupy.launch import Kernel
from hot.backends.cupy.transforms import _kernel
from hot.errors import BackendError

AVAILABLE, REASON = backends["cupy"].availability()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not AVAILABLE, reason=REASON)]


def test_a_kernel_that_is_loaded_during_a_capture() -> None:
    ops, x = ops_for("cupy", "cuda"), torch.randn(64, 256, device="cuda")
    want = ops.hadamard(x, 16)
    _kernel(torch.float32, 16, False, False, False)._loaded.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.hadamard(x, 16)
    graph.replay()
    assert torch.equal(got, want)


def test_code_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOT_CACHE", str(tmp_path))
    x, out = torch.randn(4, 256, device="cuda"), torch.empty(4, 256, device="cuda")
    specimen = _kernel(torch.float32, 16, False, False, False)
    name, template = specimen.name.rstrip(">").split("<")

    def launch() -> None:
        kernel = Kernel(specimen.source, name, tuple(template.split(", ")), specimen.layout)
        kernel(1, 256, x.data_ptr(), out.data_ptr(), 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1024, 64, 0.25, 16, 1, 1)

    launch()
    (kept,) = (tmp_path / "cubin").iterdir()
    assert torch.equal(out, ops_for("cupy", "cuda").hadamard(x, 16))
    with monkeypatch.context() as patch:
        patch.setattr(compile, "build", None)  # nothing is compiled again
        launch()
    kept.write_bytes(b"damaged")
    launch()
    assert len(kept.read_bytes()) > 1000


def test_a_launch_that_cannot_be() -> None:
    kernel = _kernel(torch.float32, 16, False, False, False)
    values = 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1.0, 16, 0, 0
    with pytest.raises(BackendError, match="was not launched with grid 1, block 2048"):
        kernel(1, 2048, *values)
    with pytest.raises(BackendError, match="was not launched with grid 1, block 256, 1048576 bytes of shared memory"):
        kernel(1, 256, *values, shared=2**20)
    torch.cuda.synchronize()
