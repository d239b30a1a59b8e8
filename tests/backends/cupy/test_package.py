"""CuPy as a backend: what is said where it is missing, and that importing it asks nothing of the machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from hot.backends import backends, ops_for
from hot.backends import cupy as package
from hot.backends.cupy.compile import FOLDER
from hot.errors import BackendError


def run(code: str) -> str:
    """What a fresh interpreter without a GPU prints."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    return done.stdout.strip()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(package, "_installed", lambda: ("14.2.0", "13"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    assert backends["cupy"].availability() == (False, "cupy is not installed: pip install 'hot-training[cupy]'")


def test_without_a_gpu(no_gpu: None) -> None:
    assert package.probe() == (False, "CuPy 14.2.0 is there, but torch finds no CUDA device")
    with pytest.raises(BackendError, match=r"'cupy' is not available: CuPy 14\.2\.0 is there, but torch finds no CUDA"):
        ops_for("cupy", "cuda")


def test_too_old(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "_installed", lambda: ("13.6.0", "13"))
    assert package.probe() == (False, "CuPy 13.6.0 is too old: 14.0 or newer is needed")


def test_on_rocm(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert package.probe() == (False, "this torch is built for ROCm: an NVIDIA GPU is needed")


def test_another_cuda_than_that_of_torch(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert package.probe() == (False, "CuPy 14.2.0 is for CUDA 13, this torch for CUDA 12: pip install cupy-cuda12x")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), (True, "CuPy 14.2.0 on NVIDIA Chip, sm_90")),
        ((7, 5), (False, "NVIDIA Chip, sm_75: compute capability 8.0 or newer is needed")),
    ],
)
def test_on_a_gpu(
    capability: tuple[int, int], expected: tuple[bool, str], no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Chip")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert package.probe() == expected


def test_importing_hot_imports_no_cupy() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import hot
print([m for m in set(sys.modules) - before if m.split(".")[0] in ("cupy", "cupy_backends", "numpy")])
"""
    assert run(code) == "[]"


def test_the_kernels_import_without_cupy_or_a_driver() -> None:
    code = """
import sys
sys.modules["cupy"] = sys.modules["cupy_backends"] = None
import torch
from hot.backends import cupy, kernels
cupy.load()
cupy.load()
print(len([name for name in kernels if name.startswith("cupy.")]), torch.cuda.is_initialized())
"""
    count, initialized = run(code).split()
    assert int(count) >= 8 and initialized == "False"


def test_the_sources_are_part_of_the_package() -> None:
    """Beside the modules, each with what it includes."""
    sources = {path.name: path.read_text() for path in FOLDER.glob("*.cu*")}
    included = {
        line.split('"')[1] for text in sources.values() for line in text.splitlines() if line.startswith("#include")
    }
    assert included <= set(sources) and "quantization.cu" in sources


def test_info_says_why() -> None:
    from hot.cli.info import machine

    assert backends["cupy"].availability()[1] in machine()["backends"]["cupy"]
