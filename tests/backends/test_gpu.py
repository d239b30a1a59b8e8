"""The kernels of every backend on a GPU: the whole table of `hot check`, other streams and threads, CUDA graphs, the reference's
own codes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hot.backends import OPS, backends, kernels, ops_for
from hot.backends.table import Kernel
from hot.checking import cases
from hot.checking.runner import ONE_DTYPE, _judge, _settled
from hot.checking.sources import DTYPES, LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPU = torch.device("cuda")
TABLE = [(op, dtype) for op in OPS for dtype in (DTYPES[:1] if op in ONE_DTYPE else DTYPES)]


@pytest.fixture(params=["triton", "cupy"])
def backend(request: pytest.FixtureRequest) -> str:
    available, reason = backends[request.param].availability()
    if not available:
        pytest.skip(reason)
    return request.param


def kernel_of(backend: str, op: str) -> Kernel:
    ops_for(backend, "cuda")
    if f"{backend}.{op}" not in kernels:
        pytest.skip(f"no kernel for {op}")
    return kernels[f"{backend}.{op}"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "dtype"), TABLE)
def test_the_table_of_hot_check(backend: str, op: str, dtype: str, layout: str) -> None:
    kernel = kernel_of(backend, op)
    with _settled(GPU):
        served = [case for case in cases(op, dtype, layout, GPU) if kernel.supports(*case.args.values())]
        if not served:
            pytest.skip("left to others")
        verdicts = [(case, _judge(kernel, case, GPU)) for case in served]
    assert [f"{case}: {verdict.what}" for case, verdict in verdicts if not verdict.ok] == []


def calls(backend: str, op: str) -> list[Callable[[], Any]]:
    """The op on the cases of bfloat16 (or of codes) that its kernel serves, those that draw noise left out."""
    kernel, dtype = kernel_of(backend, op), DTYPES[0] if op in ONE_DTYPE else "bfloat16"
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
def test_on_another_stream(backend: str, op: str) -> None:
    """What is launched there waits for what was queued there: a long sleep, then the input's last change."""
    for call in calls(backend, op):
        want, stream = call(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            got = call()
        stream.synchronize()
        assert_same(got, want)


def test_a_launch_is_queued_behind_what_its_stream_does(backend: str) -> None:
    ops, stream = ops_for(backend, "cuda"), torch.cuda.Stream()
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
def test_from_another_thread(backend: str, op: str) -> None:
    ready = calls(backend, op)
    want, got = [call() for call in ready], []
    thread = threading.Thread(target=lambda: got.extend(call() for call in ready))
    thread.start()
    thread.join()
    assert len(got) == len(want) > 0
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one(backend: str) -> None:
    x, ops = torch.randn(64, 256), ops_for(backend, "cuda")
    first, second = (ops.quantize(x.to(f"cuda:{index}"), "int4", "row", 0, "hashed", ()) for index in (0, 1))
    assert torch.equal(first[0].cpu(), second[0].cpu()) and torch.cuda.current_device() == 0


@pytest.mark.parametrize("op", OPS)
def test_in_a_cuda_graph(backend: str, op: str) -> None:
    for call in calls(backend, op):
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
def test_codes_are_those_of_the_reference(backend: str, format: str, rounding: str, dtype: torch.dtype) -> None:
    """Layers as large as real ones, in every granularity, both layouts, one pass and two."""
    ours, reference = ops_for(backend, "cuda"), ops_for("reference", "cuda")
    for rows, k in ((300, 4100), (65, 20_001)):
        x = (torch.randn(rows, k, device=GPU) * torch.logspace(-3, 3, rows, device=GPU)[:, None]).to(dtype)
        for granularity, group in (("row", 0), ("block", 128), ("token", 0), ("tensor", 0)):
            for view in (x, x.T.contiguous().T):
                got = ours.quantize(view, format, granularity, group, rounding, ())
                want = reference.quantize(view, format, granularity, group, rounding, ())
                assert torch.equal(got[1], want[1])
                assert torch.equal(got[0].float(), want[0].float()), (granularity, rows)


def test_compiles_without_graph_breaks(backend: str) -> None:
    ops = ops_for(backend, "cuda")
    x = torch.randn(64, 256, device=GPU)

    def step(x: Tensor) -> Tensor:
        codes, scale = ops.quantize(ops.hadamard(x, 16), "int8", "row", 0, "nearest", ())
        return ops.dequantize(codes, scale, 0, torch.float32)

    assert torch.equal(torch.compile(step, fullgraph=True)(x), step(x))


PRODUCTS = [(256, 192, 4096), (384, 640, 8192), (3072, 768, 26624), (32, 16, 16), (130, 48, 1040), (1024, 4096, 512)]


@pytest.mark.parametrize(("m", "n", "k"), PRODUCTS)
@pytest.mark.parametrize("codes", ["random", "all largest", "alternating"])
@pytest.mark.parametrize(("format", "largest"), [("int4.e4m3", 7), ("int8", 127)])
def test_products_of_codes_are_exact(
    backend: str, format: str, largest: int, codes: str, m: int, n: int, k: int
) -> None:
    """Bit for bit the integer product, the worst case included, by whatever kernel serves the size."""
    a, b = (torch.randint(-largest, largest + 1, (rows, k), device=GPU, dtype=torch.int8) for rows in (m, n))
    if codes != "random":
        a.fill_(largest), b.fill_(largest)
    if codes == "alternating":
        a[:, ::2] = -largest
        b[:, ::3] = -largest
    want = torch._int_mm(a, b.T)
    if format.endswith("e4m3"):
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones(1, 1, device=GPU)
    for dtype in (torch.float32, torch.bfloat16):
        operands = a, one.expand(m, 1), 0, b, one, 0, dtype
        if not kernel_of(backend, "matmul").supports(*operands):
            pytest.skip("left to others")
        got = ops_for(backend, "cuda").matmul(*operands)
        assert torch.equal(got, want.to(torch.float32).to(dtype))


def test_what_is_launched_again_sees_its_own_arguments(backend: str) -> None:
    """`start` keeps compiled kernels by what they were specialized on: sizes, alignment and dtype may change between calls."""
    ops, reference = ops_for(backend, "cuda"), ops_for("reference", "cuda")
    store = torch.randn(3 * 65 * 129 + 1, device=GPU).bfloat16()
    for offset, rows, k in [(0, 64, 128), (0, 65, 129), (1, 64, 128), (0, 1, 128), (1, 65, 1), (0, 64, 128)]:
        x = store[offset : offset + rows * k].view(rows, 1, k)
        for t in (x, x.transpose(0, 2)):
            how = 16, range(16), (), 0, "pad", None, "int8", "row", 0, "nearest", ()
            got, want = ops.transform_quantize(t, *how), reference.transform_quantize(t, *how)
            assert (got[0].int() - want[0].int()).abs().max() <= 1
            torch.testing.assert_close(got[1], want[1])


@pytest.mark.parametrize("samples, length, outputs", [(1, 512, 256), (8, 197, 384), (64, 5, 128), (3, 49, 1000)])
def test_the_largest_code_is_never_passed(backend: str, samples: int, length: int, outputs: int) -> None:
    """Codes are not clamped: the maximum and the codes come from the same arithmetic."""
    g = torch.randn(samples, length, outputs, device=GPU, dtype=torch.bfloat16) * 100
    g[..., ::7] = 3.0
    row, column = (16, range(16), ()), (16, range(8), (), 0, "pad", None)
    how = "row", 0, "hashed", ()
    i, _, w, _, bias = ops_for(backend, "cuda").grad_output_operands(
        g, *row, "int4.e4m3", *how, *column, "int8", *how, True
    )
    assert i.float().abs().max() == 7 and w.int().abs().max() == 127
    torch.testing.assert_close(bias.float(), g.float().sum((0, 1)), rtol=0.01, atol=1.0)


BLOCKS_BY_TILES = [
    *((512, n, k) for n in (128, 256, 384, 640, 2304) for k in (128, 256, 384, 512, 768, 2304)),
    *((m, 384, k) for m in (4, 100, 197, 198, 1576) for k in (128, 384, 2304)),
    (100, 128, 1024), (64, 96, 256),
]  # fmt: skip


@pytest.mark.parametrize(("m", "n", "k"), BLOCKS_BY_TILES)
def test_blocks_by_tiles(backend: str, m: int, n: int, k: int) -> None:
    """4-bit codes with a scale a row and 128 columns, by tiles of 128: the library's product where it fits, or ours. The library
    reads rows of tiles in whole fours, and columns of rows too: K / 128 and m that are none of these are the trap."""
    a, b = (torch.randint(-7, 8, (rows, k), device=GPU).to(torch.float8_e4m3fn) for rows in (m, n))
    a_scale, b_scale = torch.rand(m, k // 128, device=GPU) + 0.1, torch.rand(-(-n // 128), k // 128, device=GPU) + 0.1
    operands = a, a_scale, 128, b, b_scale, 128, torch.bfloat16
    if not kernel_of(backend, "matmul").supports(*operands):
        pytest.skip("left to others")
    got = ops_for(backend, "cuda").matmul(*operands)
    wide = [
        codes.double()
        * scale.double()
        .repeat_interleave(128, 1)
        .repeat_interleave(codes.shape[0] // scale.shape[0], 0)[: codes.shape[0]]
        for codes, scale in ((a, a_scale), (b, b_scale))
    ]
    want = wide[0] @ wide[1].T
    assert ((got.double() - want).norm() / want.norm()).item() < 3e-3


class Backward(torch.autograd.Function):
    """The identity, whose backward is an op: it runs in a thread of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.op = op
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.op(g), None


def test_in_autograds_threads(backend: str) -> None:
    ops, x = ops_for(backend, "cuda"), torch.randn(64, 256, device=GPU, requires_grad=True)
    g, stream = torch.randn(64, 256, device=GPU), torch.cuda.Stream()
    for context in (torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.stream(stream)):
        x.grad = None
        stream.wait_stream(torch.cuda.current_stream())
        with context:
            Backward.apply(x, lambda g: ops.hadamard(g, 32)).backward(g)
        torch.cuda.synchronize()
        assert x.grad is not None and torch.equal(x.grad, ops.hadamard(g, 32))


def test_torchs_device_and_stream_stay(backend: str) -> None:
    stream, x = torch.cuda.Stream(), torch.randn(64, 256, device=f"cuda:{torch.cuda.device_count() - 1}")
    with torch.cuda.stream(stream):
        ops_for(backend, "cuda").hadamard(x, 16)
        assert torch.cuda.current_stream() == stream and torch.cuda.current_device() == stream.device_index
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
