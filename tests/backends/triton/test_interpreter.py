"""Runs tests/backends/triton/interpreted with Triton's interpreter switched on before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_what_runs_under_the_interpreter() -> None:
    folder = str(Path(__file__).parent / "interpreted")
    command = [sys.executable, "-m", "pytest", folder, "--color=no", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr  # 5: nothing was collected
