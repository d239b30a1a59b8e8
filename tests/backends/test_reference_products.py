"""matmul: integer products exact, run by run of K where scales change along it; the others as dequantized floats."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hot.backends import ops_for
from hot.backends.ops import scale_shape
from hot.backends.reference import products

ops = ops_for("reference", "cpu")


@pytest.fixture(params=[True, False], ids=["_int_mm", "float32"])
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to multiply integers on a CPU: by torch._int_mm where that is exact, and without it."""
    if request.param and not products.INT_MM_ON_CPU:
        pytest.skip("torch._int_mm is not exact on this CPU")
    monkeypatch.setattr(products, "INT_MM_ON_CPU", request.param)


def unit(rows: int) -> Tensor:
    return torch.ones(rows, 1)


def product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return ops.matmul(a, unit(a.shape[0]), 0, b, unit(b.shape[0]), 0, dtype)


def codes(rows: int, k: int) -> Tensor:
    return torch.randint(-127, 128, (rows, k), dtype=torch.int8)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("m", [1, 2, 17])
@pytest.mark.parametrize("n", [1, 3, 16])
@pytest.mark.parametrize("k", [1, 2, 8, 41, 1025])
def test_integer_products_are_exact(m: int, n: int, k: int) -> None:
    a, b = codes(m, k), codes(n, k)
    assert torch.equal(product(a, b), (a.long() @ b.long().T).double())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1)])
@pytest.mark.parametrize("k", [64, products.INT32_TERMS, products.INT32_TERMS + 1, 2 * products.INT32_TERMS + 3])
def test_the_largest_codes_do_not_overflow(signs: tuple[int, int], k: int) -> None:
    a, b = (torch.full((2, k), sign * 127, dtype=torch.int8) for sign in signs)
    assert (product(a, b) == signs[0] * signs[1] * k * 127**2).all()
    assert torch.equal(product(a, b, torch.float32), torch.full((2, 2), signs[0] * signs[1] * k * 127.0**2))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("stride", [(0, 1), (77, 1), (1, 40), (200, 2), (0, 0)])
@pytest.mark.parametrize("shape", [(1, 40), (5, 40), (5, 1), (40, 1)])
def test_strides_do_not_matter(stride: tuple[int, int], shape: tuple[int, int]) -> None:
    a, b = codes(1, 20_000)[0].as_strided(shape, stride), codes(3, shape[1])
    expected = (a.long() @ b.long().T).double()
    assert torch.equal(product(a, b), expected) and torch.equal(product(b, a), expected.T)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 8), (3, 0, 8), (3, 2, 0), (0, 0, 0)])
def test_empty(m: int, n: int, k: int) -> None:
    assert torch.equal(product(codes(m, k), codes(n, k), torch.bfloat16), torch.zeros(m, n, dtype=torch.bfloat16))


def test_scales_per_row_and_tensor() -> None:
    a, b = codes(3, 40), codes(4, 40)
    a_scale, b_scale = torch.rand(3, 1), torch.rand(1, 1)
    expected = (a.double() * a_scale) @ (b.double() * b_scale).T
    for dtype, eps in ((torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        got = ops.matmul(a, a_scale, 0, b, b_scale, 0, dtype)
        assert got.dtype == dtype and torch.allclose(got.double(), expected, rtol=eps, atol=0)


@st.composite
def operands(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, Tensor, Tensor, int]:
    """Two operands of one K with scales of any granularity, in whole, in common and in no common runs of K."""
    k, found = draw(st.integers(1, 400)), []
    torch.manual_seed(draw(st.integers(0, 9)))
    for _ in "ab":
        rows, group = draw(st.integers(1, 200)), draw(st.sampled_from([16, 64, 96, 128, 192, 256]))
        granularity = draw(st.sampled_from(["tensor", "row", "block", "tile", "token"]))
        scale = torch.rand(scale_shape(rows, k, granularity, group))
        found += [codes(rows, k), scale, group if granularity in ("block", "tile") else 0]
    return tuple(found)


def spread(scale: Tensor, group: int, rows: int, k: int) -> Tensor:
    """The scale of every element, looked up one by one."""
    row = torch.arange(rows) // (group if group and scale.shape[0] < rows else 1) % scale.shape[0]
    column = torch.arange(k) // (group or 1) % scale.shape[1]
    return scale.double()[row][:, column]


@pytest.mark.usefixtures("on_cpu")
@given(operands(), st.sampled_from([1, 300, 2**20]))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_are_those_of_the_dequantized_operands(args: tuple[Any, ...], strip: int) -> None:
    left, right = (codes.double() * spread(scale, group, *codes.shape) for codes, scale, group in (args[:3], args[3:]))
    expected, terms = left @ right.T, left.abs() @ right.abs().T
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        with patch.object(products, "STRIP", strip):
            got = ops.matmul(*args, dtype)
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        rounding = 0 if dtype != torch.bfloat16 else torch.finfo(dtype).eps / 2
        assert got.dtype == dtype
        assert ((got.double() - expected).abs() <= 8 * eps * terms + rounding * expected.abs() * 1.01).all()


@pytest.mark.usefixtures("on_cpu")
@given(operands())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_scales_of_powers_of_two_lose_nothing(args: tuple[Any, ...]) -> None:
    """Whatever the runs are, the integers are exact and so is float64."""
    a, a_scale, a_group, b, b_scale, b_group = args
    a_scale, b_scale = (torch.exp2((8 * scale).floor()) for scale in (a_scale, b_scale))
    left, right = a * spread(a_scale, a_group, *a.shape).long(), b * spread(b_scale, b_group, *b.shape).long()
    got = ops.matmul(a, a_scale, a_group, b, b_scale, b_group, torch.float64)
    assert torch.equal(got, (left @ right.T).double())


@pytest.mark.usefixtures("on_cpu")
def test_the_rows_of_a_long_product_are_those_of_its_strips() -> None:
    a, b, a_scale, b_scale = codes(1100, 300), codes(1000, 300), torch.rand(1100, 3), torch.rand(8, 3)
    assert a.shape[0] * b.shape[0] > products.STRIP
    whole = ops.matmul(a, a_scale, 128, b, b_scale, 128, torch.float32)
    parts = zip(a.split(137), a_scale.split(137), strict=True)
    assert torch.equal(whole, torch.cat([ops.matmul(*part, 128, b, b_scale, 128, torch.float32) for part in parts]))


def test_a_scale_on_the_contracted_axis() -> None:
    a, b, scale = codes(3, 41), codes(4, 41), torch.rand(1, 41)
    expected = (a.double() * scale) @ b.double().T
    assert torch.allclose(ops.matmul(a, scale, 0, b, unit(4), 0, torch.float64), expected, rtol=1e-12)


def test_float8_codes() -> None:
    a, b = torch.randn(3, 40).to(torch.float8_e4m3fn), torch.randn(4, 40).to(torch.float8_e5m2)
    expected = a.double() @ b.double().T
    assert torch.allclose(ops.matmul(a, unit(3), 0, b, unit(4), 0, torch.float64), expected, rtol=1e-12)


def test_a_nan_scale_spoils_its_row_alone() -> None:
    scale = unit(3)
    scale[1] = float("nan")
    got = ops.matmul(torch.zeros(3, 8, dtype=torch.int8), scale, 0, codes(2, 8), unit(2), 0, torch.float32)
    assert got.isnan().tolist() == [[False, False], [True, True], [False, False]]


def test_a_nan_scale_of_a_block_or_tile_spoils_the_rows_that_it_covers() -> None:
    a, b, a_scale, b_scale = codes(3, 300), codes(130, 300), torch.rand(3, 3), torch.rand(2, 3)
    a_scale[1, 2] = b_scale[1, 0] = float("nan")
    spoilt = ops.matmul(a, a_scale, 128, b, b_scale, 128, torch.float32).isnan()
    assert spoilt[1].all() and spoilt[:, 128:].all() and not spoilt[[0, 2], :128].any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("a_group", "b_group"), [(0, 0), (128, 0), (64, 128)])
def test_the_reference_compiles_as_one_graph(a_group: int, b_group: int, dynamic: bool, backend: str) -> None:
    def call(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        return ops.matmul(a, a_scale, a_group, b, b_scale, b_group, torch.float64)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    for m in (33, 40):
        args = (
            codes(m, 300),
            torch.rand(m, -(-300 // a_group) if a_group else 1),
            codes(17, 300),
            torch.rand(1 if b_group else 17, 3 if b_group else 1),
        )
        assert torch.allclose(compiled(*args), call(*args), rtol=1e-12)


@pytest.mark.parametrize("group", [0, 128])
def test_a_product_of_fakes_has_its_shape(group: int) -> None:
    scales = (torch.rand(33, 3), torch.rand(17, 3)) if group else (unit(33), unit(17))
    args = codes(33, 300), scales[0], group, codes(17, 300), scales[1], group, torch.bfloat16
    with FakeTensorMode() as mode:
        found = ops.matmul(*(mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args))
    meta = ops.matmul(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args))
    assert found.shape == meta.shape == (33, 17) and found.dtype == meta.dtype == torch.bfloat16
