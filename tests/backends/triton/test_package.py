"""Triton as a backend: what is said where it is missing, and that importing it asks nothing of the machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from hot.backends import backends, get_ops, ops_for, table
from hot.backends import triton as package
from hot.errors import BackendError


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter without a GPU prints."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    return done.stdout.strip()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(package, "_version", lambda: "3.6.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert backends["triton"].availability() == (False, "triton is not installed: pip install 'hot-training[triton]'")


def test_without_a_gpu(no_gpu: None) -> None:
    assert package.probe() == (False, "Triton 3.6.0 is there, but torch finds no CUDA device")
    with pytest.raises(
        BackendError, match=r"'triton' is not available: Triton 3\.6\.0 is there, but torch finds no CUDA device"
    ):
        ops_for("triton", "cuda")


def test_too_old(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "_version", lambda: "3.3.1")
    assert package.probe() == (False, "Triton 3.3.1 is too old: 3.4 or newer is needed")
    monkeypatch.setattr(package, "_version", lambda: "3.10.0+git1")
    assert "too old" not in package.probe()[1]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), (True, "Triton 3.6.0 on NVIDIA Chip, sm_90")),
        ((7, 5), (False, "NVIDIA Chip, sm_75: compute capability 8.0 or newer is needed")),
    ],
)
def test_on_a_gpu(
    capability: tuple[int, int], expected: tuple[bool, str], no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Chip")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert package.probe() == expected


def test_auto_on_the_cpu_does_not_miss_it(recwarn: pytest.WarningsRecorder) -> None:
    table._ready.clear()
    assert get_ops("auto", "cpu").serving("quantize") == ("triton" if package.interpreted() else "reference")
    assert not recwarn.list


def test_it_is_not_for_the_cpu(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if package.interpreted():
        pytest.skip("interpreted kernels are for the CPU")
    monkeypatch.setattr(package, "probe", lambda: (True, "a test"))
    with pytest.raises(BackendError, match=r"'triton' is not available|runs on cuda, not on cpu"):
        ops_for("triton", "cpu")


def test_importing_hot_imports_no_triton() -> None:
    code = "import sys, torch; before = set(sys.modules); import hot; print([m for m in set(sys.modules) - before if m.split('.')[0] == 'triton'])"
    assert run(code) == "[]"


def test_the_kernels_import_without_a_driver() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    code = """
import torch
from hot.backends import kernels, triton
triton.load()
triton.load()
print(len([name for name in kernels if name.startswith("triton.")]), torch.cuda.is_initialized())
"""
    count, initialized = run(code).split()
    assert int(count) >= 7 and initialized == "False"


def test_the_interpreter_makes_it_a_backend_of_the_cpu() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    code = """
import torch, hot
from hot.backends import backends, ops_for
print(backends["triton"].availability(), ops_for("auto", "cpu").serving("quantize"))
"""
    printed = run(code, TRITON_INTERPRET="1")
    assert printed.startswith("(True, 'Triton ") and printed.endswith("interpreted: TRITON_INTERPRET=1') triton")


def test_info_says_why() -> None:
    from hot.cli.info import machine

    assert backends["triton"].availability()[1] in machine()["backends"]["triton"]
