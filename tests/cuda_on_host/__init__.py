"""CUDA C++ on the CPU: the kernels of the CuPy backend where there is no GPU, compiled by g++.

with emulation() as ops:
    ops.hadamard(x, 16)
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hot.backends import Ops, cupy
from hot.backends.cupy.compile import FOLDER
from hot.backends.cupy.launch import Kernel

HERE = Path(__file__).parent
OPTIONS = ["-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-fPIC", "-shared"]
"""No contraction, as for the GPU; chunks of numbers are moved as another type, which CUDA allows."""
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@cache
def _folder() -> Path:
    """The kernels' sources, with the headers that take the GPU's place, and the library that runs threads."""
    folder = Path(tempfile.mkdtemp(prefix="hot-cuda-on-host-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for path in (*FOLDER.glob("*.cu*"), *HERE.glob("*.[ch]*")):
        shutil.copy(path, folder)  # ours come last: conversions.cuh is another one
    _build(folder / "threads.cpp", "-O2", ctypes.RTLD_GLOBAL)
    return folder


def _build(source: Path, optimization: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    made = source.with_suffix(".so")
    command = ["g++", *OPTIONS, optimization, f"-I{source.parent}", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(made), mode)


def library(text: str) -> ctypes.CDLL:
    """C++ that may include cuda.h and the kernels' sources."""
    path = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp"
    path.write_text(text)
    return _build(path, "-O1")


@cache
def _entry(source: str | Path, name: str) -> Any:
    made = library(f"""
#include "cuda.h"
#include "{source}"
extern "C" const char* entry(const void* bytes, unsigned grid, unsigned block) {{
    return launch({name}, bytes, grid, block);
}}
""")
    made.entry.restype = ctypes.c_char_p
    return made.entry


def _launch(kernel: Kernel, grid: int, block: int, *values: Any, shared: int = 0) -> None:
    assert 0 < grid < 2**31 and 0 < block <= 1024 and 0 <= shared <= 99 * 1024
    failure = _entry(kernel.source, kernel.name)(kernel._pack(*values), grid, block)
    assert not failure, f"{kernel}: {failure.decode()}"


@contextmanager
def emulation() -> Iterator[Ops]:
    """The kernels of the CuPy backend, on the CPU."""
    cupy.load()
    with mock.patch.object(Kernel, "__call__", _launch):
        yield Ops("cupy", "cpu", ("cupy",))
