"""Runs tests/backends/triton/interpreted with Triton's interpreter switched on before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

HALVES = ("fused", "not fused")
"""The fused ops take the interpreter half of the time, so they have a process of their own."""


def start(which: str) -> subprocess.Popen[str]:
    folder = str(Path(__file__).parent / "interpreted")
    command = [sys.executable, "-m", "pytest", folder, "-k", which, "--color=no", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_what_runs_under_the_interpreter() -> None:
    running = [start(which) for which in HALVES]
    for process in running:
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0 and " passed" in output, output  # 5: nothing was collected
