"""hadamard, project, expand: their laws, and exact values. Parity over dtypes and layouts is in test_checking.py."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hot.backends import ops_for
from hot.backends.ops import projected_length
from hot.hadamard import hadamard_matrix, random_signs, sequency_order

ops = ops_for("reference", "cpu")
BLOCKS = [2**k for k in range(11)]


def transform(block: int, rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "block": block, "rows": sequency_order(block)[:rank], "signs": (), "prefix": 0, "tail": "pad", "draw": None,
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS)
def test_hadamard_is_its_own_inverse(block: int) -> None:
    x = torch.randn(3, 2 * block, dtype=torch.float64)
    assert torch.allclose(ops.hadamard(ops.hadamard(x, block), block), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", BLOCKS)
def test_hadamard_of_the_identity_is_the_matrix(block: int) -> None:
    got = ops.hadamard(torch.eye(block, dtype=torch.float64), block)
    assert torch.allclose(got * block**0.5, hadamard_matrix(block), rtol=0, atol=1e-12)


def test_values_by_hand() -> None:
    assert ops.hadamard(torch.tensor([1.0, 2.0, 3.0, 4.0]), 4).tolist() == [5.0, -1.0, -2.0, 0.0]
    low = ops.project(torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0]), **transform(4, 2))
    assert low.tolist() == [5.0, -2.0, 4.5, 4.5]  # sequency order: natural rows 0 and 2; the tail is zero-padded
    kept = ops.project(torch.tensor([7.0, 1.0, 2.0, 3.0, 4.0, 9.0]), **transform(4, 2, prefix=1, tail="keep"))
    assert kept.tolist() == [7.0, 5.0, -2.0, 9.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_floats_are_transformed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(2, 32).to(dtype)
    got = ops.hadamard(x, 16)
    assert got.dtype == torch.float32 and torch.equal(got, ops.hadamard(x.float(), 16))


lengths, blocks, ranks, prefixes = (
    st.integers(0, 70),
    st.sampled_from([2, 4, 16]),
    st.integers(1, 16),
    st.integers(0, 6),
)
shapes = st.tuples(
    lengths, blocks, ranks, prefixes, st.sampled_from(["pad", "keep"]), st.booleans(), st.integers(0, 2**31)
)


def _case(case: tuple[int, int, int, int, str, bool, int]) -> tuple[int, dict[str, Any], torch.Generator]:
    length, block, rank, prefix, tail, signed, seed = case
    signs = random_signs(block, 1) if signed else ()
    how = transform(block, min(rank, block), signs=signs, prefix=prefix, tail=tail)
    return length, how, torch.Generator().manual_seed(seed)


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_expand_is_the_transpose_of_project(case: Any) -> None:
    length, how, generator = _case(case)
    x = torch.randn(length, generator=generator, dtype=torch.float64)
    projected = ops.project(x[None], **how)[0]
    c = torch.randn(len(projected), generator=generator, dtype=torch.float64)
    assert torch.allclose(projected @ c, x @ ops.expand(c[None], length, **how)[0], rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_the_projected_length_is_as_declared(case: Any) -> None:
    length, how, generator = _case(case)
    x = torch.randn(2, length, generator=generator)
    shape = ops.project(x, **how).shape
    assert shape == (2, projected_length(length, how["block"], len(how["rows"]), how["prefix"], how["tail"]))


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_projecting_again_keeps_the_coefficients(case: Any) -> None:
    length, how, generator = _case(case)
    if how["tail"] == "pad":  # a padded block loses what expand cuts off
        length = how["prefix"] + max(length - how["prefix"], 0) // how["block"] * how["block"]
    c = ops.project(torch.randn(1, length, generator=generator, dtype=torch.float64), **how)
    assert torch.allclose(ops.project(ops.expand(c, length, **how), **how), c, rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(shapes)
def test_a_full_transform_cancels_in_a_product(case: Any) -> None:
    length, how, generator = _case(case)
    how = {**how, "rows": range(how["block"])}
    a, b = (torch.randn(3, length, generator=generator, dtype=torch.float64) for _ in range(2))
    product = ops.project(a, **how) @ ops.project(b, **how).T
    assert torch.allclose(product, a @ b.T, rtol=0, atol=1e-11)


def test_the_lowest_half_is_the_average_of_pairs() -> None:
    x = torch.randn(3, 64, dtype=torch.float64)
    averaged = x.unflatten(1, (-1, 2)).mean(2).repeat_interleave(2, 1)
    assert torch.allclose(ops.expand(ops.project(x, **transform(16, 8)), 64, **transform(16, 8)), averaged, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_a_uniform_draw_is_unbiased(rank: int) -> None:
    x = torch.randn(2, 11, dtype=torch.float64)
    how = transform(4, 4, rows=tuple(range(4)), signs=(1, -1, -1, 1), prefix=1)
    draws = [torch.tensor(subset) for subset in combinations(range(4), rank)]
    estimates = [ops.expand(ops.project(x, **{**how, "draw": draw}), 11, **{**how, "draw": draw}) for draw in draws]
    assert torch.allclose(torch.stack(estimates).mean(0), x, rtol=0, atol=1e-12)


def views() -> list[Tensor]:
    """Tensors (5, 3, 40) that are laid out otherwise."""
    return [
        torch.randn(3, 40, 5).permute(2, 0, 1),
        torch.randn(40, 3, 5).permute(2, 1, 0),
        torch.randn(10, 6, 80)[::2, ::2, ::2],
        torch.randn(1, 1, 40).expand(5, 3, 40),
        torch.randn(5, 1, 1).expand(5, 3, 40),
        torch.randn(()).expand(5, 3, 40),
    ]


@pytest.mark.parametrize(
    "x", views(), ids=["rows innermost", "rows then samples", "sliced", "a row", "a column", "one"]
)
def test_strides_do_not_matter(x: Tensor) -> None:
    how = transform(16, 8, prefix=1)
    assert torch.allclose(
        ops.project(x, **how), ops.project(x.clone(memory_format=torch.contiguous_format), **how), atol=1e-6
    )


def test_the_input_is_left_alone() -> None:
    x = torch.randn(3, 16)
    before = x.clone()
    ops.hadamard(x, 1).add_(1)
    ops.project(x, **transform(16, 8, prefix=16)).add_(1)
    ops.hadamard(x, 16)
    assert torch.equal(x, before)


def test_the_reference_compiles_as_one_graph() -> None:
    how = transform(16, 8, signs=random_signs(16, 2))
    compiled = torch.compile(lambda x: ops.project(x, **how), fullgraph=True, backend="eager")
    x = torch.randn(3, 64)
    assert torch.equal(compiled(x), ops.project(x, **how))
