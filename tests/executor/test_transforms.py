"""Law 7: transforms cancel in the product whatever the sizes, and blocks keep to their sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import FLOAT, UNQUANTIZED, for_conv, grads, normal, plan, relative
from torch import Tensor

from hot.executor import conv2d, linear
from hot.hadamard import hadamard_matrix, lp_l1_rows, random_signs, sequency_order
from hot.policies.plan import LayerPlan
from hot.policies.transforms import Hadamard, HadamardLowRank

DIMS = [1, 7, 16, 41, 137, 197, 341]
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}


def low_rank(**params: object) -> LayerPlan:
    """Only the projection of grad_weight, nothing quantized."""
    return plan(grad_weight=(HadamardLowRank(**params), FLOAT, FLOAT))  # type: ignore[arg-type]


def grad_weight(plan: LayerPlan, x: Tensor, g: Tensor) -> Tensor:
    return grads(
        lambda x, w: linear(x, w, None, plan), x, normal(g.shape[-1], x.shape[-1], dtype=x.dtype), g=g
    ).grad_weight


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("axis", ["tokens", "inputs", "outputs"])
@pytest.mark.parametrize("name", UNQUANTIZED)
def test_linear_of_every_size(name: str, axis: str, dim: int, dtype: torch.dtype) -> None:
    """Padded, never truncated: exact gradients to rounding, of (T, I) and of (B, T, I)."""
    sizes = {"tokens": 9, "inputs": 10, "outputs": 11, axis: dim}
    for lead in ((sizes["tokens"],), (2, sizes["tokens"])):
        operands = (
            normal(*lead, sizes["inputs"], dtype=dtype),
            normal(sizes["outputs"], sizes["inputs"], dtype=dtype, seed=1),
        )
        ours = grads(lambda *t: linear(*t, None, UNQUANTIZED[name]), *operands)
        theirs = grads(F.linear, *operands)
        assert relative(ours.grad_input, theirs.grad_input) < ROUNDING[dtype]
        assert relative(ours.grad_weight, theirs.grad_weight) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("size", [(1, 7), (7, 1), (4, 4), (41, 5), (13, 16)], ids=str)
@pytest.mark.parametrize("name", UNQUANTIZED)
def test_convolution_of_every_size(name: str, size: tuple[int, int], kernel: int, dtype: torch.dtype) -> None:
    plan = UNQUANTIZED[name] if kernel == 1 else for_conv(UNQUANTIZED[name])
    operands = normal(2, 5, *size, dtype=dtype), normal(7, 5, kernel, kernel, dtype=dtype, seed=1)
    ours = grads(lambda *t: conv2d(*t, None, plan, padding=kernel // 2), *operands)
    theirs = grads(lambda *t: F.conv2d(*t, padding=kernel // 2), *operands)
    assert relative(ours.grad_input, theirs.grad_input) < ROUNDING[dtype]
    assert relative(ours.grad_weight, theirs.grad_weight) < ROUNDING[dtype]


@pytest.mark.parametrize("block", [2, 4, 64, 256])
@pytest.mark.parametrize("signs", ["none", "random"])
def test_full_rank_is_no_projection(block: int, signs: str) -> None:
    """Every order at rank = block is the whole basis."""
    operands = normal(2, 41, 12, dtype=torch.float64), normal(20, 12, dtype=torch.float64)
    theirs = grads(F.linear, *operands)
    for transform in (
        Hadamard(block=block, signs=signs), HadamardLowRank(block=block, rank=block, signs=signs),
        HadamardLowRank(block=block, rank=block, order="random", signs=signs),
    ):  # fmt: skip
        ours = grads(
            lambda *t, p=plan((transform, FLOAT, FLOAT), (transform, FLOAT, FLOAT)): linear(*t, None, p), *operands
        )
        assert relative(ours.grad_input, theirs.grad_input) < 1e-12
        assert relative(ours.grad_weight, theirs.grad_weight) < 1e-12


@pytest.mark.parametrize(
    "params", [{}, {"rank": 3}, {"order": "lp_l1", "rank": 10}, {"prefix_tokens": 1}, {"tail": "keep"}], ids=str
)
@pytest.mark.parametrize("tokens", [9, 41, 48])
def test_blocks_keep_to_their_sample(tokens: int, params: dict) -> None:
    """What two samples contribute is the sum of what each contributes alone; seen as one sequence it is not."""
    x, g = normal(2, tokens, 6, dtype=torch.float64), normal(2, tokens, 5, dtype=torch.float64, seed=1)
    both = grad_weight(low_rank(**params), x, g)
    alone = sum(grad_weight(low_rank(**params), x[i : i + 1], g[i : i + 1]) for i in range(2))
    assert relative(both, alone) < 1e-12  # type: ignore[arg-type]
    if tokens % 16:
        assert relative(grad_weight(low_rank(**params), x.flatten(0, 1), g.flatten(0, 1)), alone) > 1e-3  # type: ignore[arg-type]


def test_convolution_blocks_keep_to_their_sample() -> None:
    x, g = normal(2, 3, 5, 5, dtype=torch.float64), normal(2, 4, 5, 5, dtype=torch.float64, seed=1)
    for kernel in (1, 3):
        p = low_rank() if kernel == 1 else for_conv(low_rank())
        run = lambda x, w, p=p, k=kernel: conv2d(x, w, None, p, padding=k // 2)  # noqa: E731
        w = normal(4, 3, kernel, kernel, dtype=torch.float64)
        alone = sum(grads(run, x[i : i + 1], w, g=g[i : i + 1]).grad_weight for i in range(2))
        assert relative(grads(run, x, w, g=g).grad_weight, alone) < 1e-12  # type: ignore[arg-type]
        assert (
            relative(
                grads(run, x, w, g=g).grad_weight, grads(lambda x, w: F.conv2d(x, w, padding=kernel // 2), x, w, g=g)[2]
            )
            > 0.1
        )


@pytest.mark.parametrize(("rank", "neighbours"), [(8, 2), (4, 4), (2, 8), (1, 16)])
def test_sequency_keeps_neighbour_averages(rank: int, neighbours: int) -> None:
    """The 2^k lowest rows span the averages of 16 / 2^k neighbours: such an input loses nothing, any other one does."""
    smooth = normal(2, 48 // neighbours, 6, dtype=torch.float64).repeat_interleave(neighbours, 1)
    g = normal(2, 48, 5, dtype=torch.float64, seed=1)
    exact = torch.einsum("bto,bti->oi", g, smooth)
    assert relative(grad_weight(low_rank(rank=rank), smooth, g), exact) < 1e-12
    rough = normal(2, 48, 6, dtype=torch.float64)
    assert relative(grad_weight(low_rank(rank=rank), rough, g), torch.einsum("bto,bti->oi", g, rough)) > 0.1


@pytest.mark.parametrize("prefix", [1, 3])
def test_prefix_tokens_are_kept(prefix: int) -> None:
    """A class token contributes exactly, and the blocks start after it."""
    x, g = torch.zeros(2, 33 + prefix, 6, dtype=torch.float64), normal(2, 33 + prefix, 5, dtype=torch.float64)
    x[:, :prefix] = normal(2, prefix, 6, dtype=torch.float64)
    exact = torch.einsum("bto,bti->oi", g, x)
    assert relative(grad_weight(low_rank(prefix_tokens=prefix), x, g), exact) < 1e-12
    assert relative(grad_weight(low_rank(), x, g), exact) > 0.1
    x = normal(2, 33 + prefix, 6, dtype=torch.float64)
    split = grad_weight(low_rank(), x[:, prefix:], g[:, prefix:]) + torch.einsum(
        "bto,bti->oi", g[:, :prefix], x[:, :prefix]
    )
    assert relative(grad_weight(low_rank(prefix_tokens=prefix), x, g), split) < 1e-12


@pytest.mark.parametrize("tail", [1, 5, 15])
def test_a_kept_tail_is_exact(tail: int) -> None:
    """tail: keep leaves the tokens of a ragged last block alone; pad projects them."""
    x, g = torch.zeros(2, 32 + tail, 6, dtype=torch.float64), normal(2, 32 + tail, 5, dtype=torch.float64)
    x[:, 32:] = normal(2, tail, 6, dtype=torch.float64)
    exact = torch.einsum("bto,bti->oi", g, x)
    assert relative(grad_weight(low_rank(tail="keep"), x, g), exact) < 1e-12
    assert relative(grad_weight(low_rank(tail="pad"), x, g), exact) > 0.1


@pytest.mark.parametrize(
    "params", [{}, {"signs": "random"}, {"signs": "random", "seed": 7}, {"order": "lp_l1", "rank": 10}], ids=str
)
def test_low_rank_by_hand(params: dict) -> None:
    """grad_weight is gᵀ PᵀP x for the rows P = H[kept] · signs / √n of each block; another seed, other signs."""
    x, g = normal(2, 32, 6, dtype=torch.float64), normal(2, 32, 5, dtype=torch.float64, seed=1)
    kept = lp_l1_rows(16) if "order" in params else sequency_order(16)[:8]
    signs = random_signs(16, params.get("seed", 0)) if "signs" in params else (1,) * 16
    rows = hadamard_matrix(16)[list(kept)] * torch.tensor(signs) / 4
    projector = torch.block_diag(*[rows.T @ rows] * 2)
    assert relative(grad_weight(low_rank(**params), x, g), torch.einsum("bto,ts,bsi->oi", g, projector, x)) < 1e-12
    assert random_signs(16, 0) != random_signs(16, 7) and -1 in random_signs(16, 0)


def test_projected_tokens_of_grad_input() -> None:
    """axis: tokens gives PᵀP g w for the projection P of the tokens of each sample, as one writes it by hand."""
    transform = HadamardLowRank(axis="tokens", rank=5)
    x, w, g = (
        normal(2, 32, 6, dtype=torch.float64),
        normal(5, 6, dtype=torch.float64),
        normal(2, 32, 5, dtype=torch.float64),
    )
    rows = hadamard_matrix(16)[list(sequency_order(16)[:5])] / 4
    projector = torch.block_diag(*[rows.T @ rows] * 2)
    got = grads(lambda *t: linear(*t, None, plan((transform, FLOAT, FLOAT))), x, w, g=g)
    assert relative(got.grad_input, projector @ g @ w) < 1e-12


@pytest.mark.parametrize(
    "params",
    [{"prefix_tokens": 3}, {"tail": "keep"}, {"signs": "random"}, {"prefix_tokens": 1, "tail": "keep"}],
    ids=str,
)
@pytest.mark.parametrize("quantized", [False, True])
def test_every_field_on_grad_input(params: dict, quantized: bool) -> None:
    """Both operands of grad_input see the same transform, in the fused op and beside it."""
    from helpers import I8

    operands, q = (normal(2, 9, 24), normal(41, 24)), I8 if quantized else FLOAT
    theirs = grads(F.linear, *operands)
    ours = grads(lambda *t: linear(*t, None, plan((Hadamard(**params), q, q), (Hadamard(**params), q, q))), *operands)
    assert relative(ours.grad_input, theirs.grad_input) < (0.05 if quantized else 1e-5)
    assert relative(ours.grad_weight, theirs.grad_weight) < (0.05 if quantized else 1e-5)
