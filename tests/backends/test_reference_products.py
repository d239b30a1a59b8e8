"""matmul: integer products exact, the others as dequantized floats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hot.backends import ops_for
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


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_block_scales_of_a_ragged_axis(group: int, dtype: torch.dtype) -> None:
    a, b = codes(3, 41), codes(4, 41)
    a_scale, b_scale = torch.rand(3, -(-41 // group)), torch.rand(4, 1)
    spread = a_scale.double().repeat_interleave(group, 1)[:, :41]
    expected = (a.double() * spread) @ (b.double() * b_scale).T
    got = ops.matmul(a, a_scale, group, b, b_scale, 0, dtype)
    assert got.dtype == dtype
    assert torch.allclose(
        got.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-2 if dtype != torch.float64 else 0
    )


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


def test_the_reference_compiles_as_one_graph() -> None:
    a, b = codes(3, 41), codes(4, 41)
    compiled = torch.compile(lambda a, b: product(a, b), fullgraph=True, backend="eager")
    assert torch.equal(compiled(a, b), product(a, b))
