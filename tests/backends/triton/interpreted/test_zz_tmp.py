"""The kernels on a GPU: the whole table of `hot check`, other streams and threads, CUDA graphs, the reference's own codes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from hot.backends import OPS, backends, kernels, ops_for
from hot.backends.table import Kernel
from hot.checking import cases
from hot.checking.runner import ONE_DTYPE, _judge, _settled
from hot.checking.sources import DTYPES, LAYOUTS

AVAILABLE, REASON = backends["triton"].availability()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(False, reason="no CUDA device"),
    pytest.mark.skipif(not AVAILABLE, reason=REASON),
]
GPU = torch.device("cpu")
TABLE = [(op, dtype) for op in OPS for dtype in (DTYPES[:1] if op in ONE_DTYPE else DTYPES)]


def kernel_of(op: str) -> Kernel:
    ops_for("triton", "cpu")
    if f"triton.{op}" not in kernels:
        pytest.skip(f"no kernel for {op}")
    return kernels[f"triton.{op}"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "dtype"), TABLE)
def test_the_table_of_hot_check(op: str, dtype: str, layout: str) -> None:
    kernel = kernel_of(op)
    with _settled(GPU):
        served = [case for case in cases(op, dtype, layout, GPU) if kernel.supports(*case.args.values())]
        if not served and dtype == "float64":
            pytest.skip("the kernel leaves float64 to others")
        assert served, "no case was tried"
        verdicts = [(case, _judge(kernel, case, GPU)) for case in served]
    assert [f"{case}: {verdict.what}" for case, verdict in verdicts if not verdict.ok] == []


def calls(op: str) -> list[Callable[[], Any]]:
    """The op on the cases of bfloat16 (or of codes) that its kernel serves, those that draw noise left out."""
    kernel, dtype = kernel_of(op), DTYPES[0] if op in ONE_DTYPE else "bfloat16"
    found = [case for case in cases(op, dtype, "contiguous", GPU) if kernel.supports(*case.args.values())]
    return [
        lambda args=tuple(case.args.values()): kernel.call(*args)
        for case in found
        if "stochastic" not in case.args.values()
    ]


def tensors(result: Any) -> list[Tensor]:
    return [t.float() for t in (result if isinstance(result, (tuple, list)) else [result])]


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(tensors(got), tensors(want), strict=True):
        assert torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))


@pytest.mark.parametrize("op", OPS)
def test_on_another_stream(op: str) -> None:
    """What is launched there waits for what was queued there: a long sleep, then the input's last change."""
    for call in calls(op):
        want, stream = call(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            got = call()
        stream.synchronize()
        assert_same(got, want)


def test_a_launch_is_queued_behind_what_its_stream_does() -> None:
    ops, stream = ops_for("triton", "cpu"), torch.cuda.Stream()
    x = torch.zeros(64, 256, device=GPU)
    ops.hadamard(x, 16)  # compiled
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.fill_(1.0)
        got = ops.hadamard(x, 16)
    torch.cuda.synchronize()
    assert torch.equal(got[:, ::16], torch.full((64, 16), 4.0, device=GPU))


@pytest.mark.parametrize("op", OPS)
def test_from_another_thread(op: str) -> None:
    ready = calls(op)
    want, got = [call() for call in ready], []
    thread = threading.Thread(target=lambda: got.extend(call() for call in ready))
    thread.start()
    thread.join()
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one() -> None:
    x, ops = torch.randn(64, 256), ops_for("triton", "cpu")
    first, second = (ops.quantize(x.to(f"cuda:{index}"), "int4", "row", 0, "hashed", ()) for index in (0, 1))
    assert torch.equal(first[0].cpu(), second[0].cpu()) and torch.cuda.current_device() == 0


@pytest.mark.parametrize("op", OPS)
def test_in_a_cuda_graph(op: str) -> None:
    for call in calls(op):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            want = call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call()
        graph.replay()
        assert_same(got, want)


@pytest.mark.parametrize("format", ["int4", "int8", "int4.e4m3", "log4", "e4m3", "e5m2"])
@pytest.mark.parametrize("rounding", ["nearest", "hashed", "pseudo_stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_codes_are_those_of_the_reference(format: str, rounding: str, dtype: torch.dtype) -> None:
    """Layers as large as real ones, in every granularity, both layouts, one pass and two."""
    ours, reference = ops_for("triton", "cpu"), ops_for("reference", "cpu")
    for rows, k in ((30, 410), (5, 20_001)):
        x = (torch.randn(rows, k, device=GPU) * torch.logspace(-3, 3, rows, device=GPU)[:, None]).to(dtype)
        for granularity, group in (("row", 0), ("block", 128), ("token", 0), ("tensor", 0)):
            for view in (x, x.T.contiguous().T):
                got = ours.quantize(view, format, granularity, group, rounding, ())
                want = reference.quantize(view, format, granularity, group, rounding, ())
                assert torch.equal(got[1], want[1])
                assert torch.equal(got[0].float(), want[0].float()), (granularity, rows)


def test_compiles_without_graph_breaks() -> None:
    ops = ops_for("triton", "cpu")
    x = torch.randn(64, 256, device=GPU)

    def step(x: Tensor) -> Tensor:
        codes, scale = ops.quantize(ops.hadamard(x, 16), "int8", "row", 0, "nearest", ())
        return ops.dequantize(codes, scale, 0, torch.float32)

    assert torch.equal(torch.compile(step, fullgraph=True)(x), step(x))
