"""The two kernels of one's own that README shows: run on the CPU, compiled for three generations of chips, run on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_on_host import emulation, needs_compiler
from readme import own_kernel, write_kernel

from hot.backends import backends, cupy, ops_for
from hot.backends.cupy import compile
from hot.checking import Row, check
from hot.checking.sources import LAYOUTS

CHIPS = (80, 90, 100)
CASES = 56
"""Of pack4 in the table of `hot check`."""
not_interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton is interpreted")


def assert_right(rows: list[Row]) -> None:
    """Every case was served, and served right."""
    assert [row.failure for row in rows if not row.ok] == []
    assert {row.layout for row in rows} == set(LAYOUTS) and {row.op for row in rows} == {"pack4"}
    assert sum(row.cases for row in rows) == CASES and not any(row.skipped for row in rows)


def test_in_triton_under_the_interpreter(tmp_path: Path) -> None:
    """By the command that README gives, in a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton", reason="triton is not installed")
    write_kernel("triton", tmp_path)
    command = [sys.executable, "-m", "hot", "check", "--plugin", "mine.py", "--backend", "mine"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_right([Row(**row) for row in json.loads(done.stdout)])


@needs_compiler
def test_in_cuda_by_the_compiler_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy, "devices", lambda: ("cpu",))
    monkeypatch.setattr(cupy, "probe", lambda: (True, "emulated"))
    with own_kernel("cupy", tmp_path), emulation():
        assert ops_for("auto", "cpu").serving("pack4") == "mine"
        assert_right(check("mine", device="cpu"))


@not_interpreted
@pytest.mark.parametrize("like", ["triton", "cupy"])
def test_where_there_is_no_gpu_the_reason_is_said(like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip({"triton": "triton", "cupy": "cupy_backends"}[like])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with own_kernel(like, tmp_path):
        available, reason = backends["mine"].availability()
        assert not available and reason.endswith("is there, but torch finds no CUDA device")


@not_interpreted
@pytest.mark.parametrize("number", ["i32", "i64"])
@pytest.mark.parametrize("chip", CHIPS)
def test_triton_compiles_it(chip: int, number: str, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with own_kernel("triton", tmp_path) as mine:
        types = {"codes": "*i8", "packed": "*u8", "BLOCK": "constexpr"}
        signature = {name: types.get(name, number) for name in mine.pack_kernel.arg_names}
        source = ASTSource(mine.pack_kernel, signature, {"BLOCK": 1024})
        assert triton.compile(source, target=GPUTarget("cuda", chip, 32)).asm["cubin"]


@pytest.mark.parametrize("chip", CHIPS)
def test_nvrtc_compiles_it(chip: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="cupy is not installed")
    try:
        nvrtc.getVersion()
    except Exception as error:  # whatever CuPy raises where the library is not to be found
        pytest.skip(f"no NVRTC: {error}")
    monkeypatch.setenv("HOT_CACHE", str(tmp_path / "cache"))
    with own_kernel("cupy", tmp_path) as mine:
        code = compile.compiled(mine.PACK.source, mine.PACK.name, compile.size_of(mine.PACK.layout), divmod(chip, 10))
    assert code.image and "pack_kernel" in code.name


@pytest.mark.gpu
@not_interpreted
@pytest.mark.parametrize("like", ["triton", "cupy"])
def test_on_a_gpu(like: str, tmp_path: Path) -> None:
    available, reason = backends[like].availability()
    if not available or not torch.cuda.is_available():
        pytest.skip(reason)
    with own_kernel(like, tmp_path):
        assert ops_for("auto", "cuda").serving("pack4") == "mine"
        assert_right(check("mine", device="cuda"))
        ops, reference = ops_for("mine", "cuda"), ops_for("reference", "cuda")
        codes, stream = torch.zeros(64, 1001, dtype=torch.int8, device="cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):  # queued there, behind the input's last change
            torch.cuda._sleep(100_000_000)
            codes.fill_(-3)
            packed = ops.pack4(codes)
        torch.cuda.synchronize()
        assert torch.equal(packed, reference.pack4(codes))
        elsewhere = codes.to(f"cuda:{torch.cuda.device_count() - 1}")  # not the current device, if there is another
        assert torch.equal(ops.pack4(elsewhere), reference.pack4(elsewhere))
