"""Law 8: rounding without hidden state: deterministic where promised, unbiased, and another one at the next step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import FLOAT, I8, LOW, NONE, grads, integer, normal, plan, relative
from torch import Tensor

from hot.executor import linear
from hot.policies.plan import LayerPlan
from hot.policies.quantizers import Float8, Luq
from hot.policies.transforms import Hadamard, HadamardLowRank

T, O, I = 4096, 12, 8  # noqa: E741


def noisy(rounding: str, bits: int = 4) -> LayerPlan:
    q = integer(bits, rounding)
    return plan((Hadamard(), q, FLOAT), (Hadamard(), q, FLOAT))


def run(plan: LayerPlan, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return grads(lambda *t: linear(*t, None, plan), x, w, g=g)[1:3]  # type: ignore[return-value]


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("rounding", ["nearest", "hashed", "pseudo_stochastic"])
def test_deterministic(rounding: str) -> None:
    """The same tensors give the same gradients, whatever the seed is."""
    operands = normal(40, I), normal(O, I), normal(40, O, seed=1)
    first = run(noisy(rounding), *operands)
    torch.manual_seed(99)
    assert same(run(noisy(rounding), *operands), first)


@pytest.mark.parametrize(
    "p",
    [noisy("stochastic"), plan((NONE, Luq(), FLOAT), (NONE, Luq(), FLOAT)), plan(grad_weight=(HadamardLowRank(order="random"), FLOAT, FLOAT))],
    ids=["stochastic", "luq", "random rows"],
)  # fmt: skip
def test_follows_manual_seed(p: LayerPlan) -> None:
    """The same seed gives the same gradients, the next draw others, another seed others."""
    operands = normal(40, I), normal(O, I), normal(40, O, seed=1)
    torch.manual_seed(1)
    first, second = run(p, *operands)[1], run(p, *operands)[1]
    torch.manual_seed(1)
    again = run(p, *operands)[1]
    torch.manual_seed(2)
    other = run(p, *operands)[1]
    assert torch.equal(first, again) and not torch.equal(first, second) and not torch.equal(first, other)


def error(p: LayerPlan, g: Tensor) -> Tensor:
    """The rounding error of grad_input, with the identity as the weight: of the gradient itself."""
    got = run(p, torch.zeros(len(g), g.shape[1]), torch.eye(g.shape[1]), g)[0]
    return got - g


def test_the_next_step_rounds_otherwise() -> None:
    """Values that barely changed get new noise, and neighbours of one value do too: errors do not repeat themselves."""
    g = normal(512, 16)
    q = integer(4, "hashed")
    p = plan((NONE, q, FLOAT))
    now, then = error(p, g), error(p, g * (1 + 1e-6))
    correlation = torch.corrcoef(torch.stack([now.flatten(), then.flatten()]))[0, 1]
    assert abs(correlation) < 0.05
    nearest = plan((NONE, integer(4), FLOAT))
    assert (
        torch.corrcoef(torch.stack([error(nearest, g).flatten(), error(nearest, g * (1 + 1e-6)).flatten()]))[0, 1] > 0.9
    )
    g = torch.full((512, 16), 0.3)
    g[:, 0] = 1.0  # the scale of the row
    assert 0.3 < (error(p, g)[:, 1:] > 0).float().mean() < 0.7 or len(error(p, g)[:, 1:].unique()) > 1


@pytest.mark.parametrize("rounding", ["hashed", "stochastic"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("transform", [NONE, Hadamard()], ids=["none", "hadamard"])
def test_unbiased(transform: Hadamard, bits: int, rounding: str) -> None:
    """The mean over many tokens of one and the same gradient is that gradient: each token has its own noise."""
    row, w = normal(1, 16), normal(16, I)
    p = plan((transform, integer(bits, rounding), FLOAT))
    got = run(p, torch.zeros(T, I), w, row.expand(T, 16))[0]
    spread = got.std(0) / T**0.5
    assert (got.std(0) > 0).all() and ((got.mean(0) - (row @ w)[0]).abs() < 5 * spread + 1e-6).all()


@pytest.mark.parametrize("rounding", ["nearest"])
def test_nearest_is_biased(rounding: str) -> None:
    """The counterpart, so that the test above can fail: nearest rounding of one gradient never averages out."""
    row, w = normal(1, 16), normal(16, I)
    got = run(plan((NONE, integer(4, rounding), FLOAT)), torch.zeros(T, I), w, row.expand(T, 16))[0]
    assert relative(got.mean(0), (row @ w)[0]) > 0.01


@pytest.mark.parametrize(
    "quantizer",
    [Luq(), Luq(rounding="hashed"), Float8(rounding="stochastic"), Float8(rounding="hashed", format="e5m2"), integer(4, "hashed", "block", block=16)],
    ids=str,
)  # fmt: skip
def test_unbiased_kinds(quantizer: object) -> None:
    row, w = normal(1, 16), normal(16, I)
    got = run(plan((NONE, quantizer, FLOAT)), torch.zeros(T, I), w, row.expand(T, 16))[0]  # type: ignore[arg-type]
    spread = got.std(0) / T**0.5
    assert ((got.mean(0) - (row @ w)[0]).abs() < 5 * spread + 1e-6).all()


@pytest.mark.parametrize("rounding", ["hashed", "stochastic"])
def test_grad_weight_is_unbiased(rounding: str) -> None:
    """Over 400 draws. hashed needs other bits to draw again: g comes scaled by powers of… nothing exact but 1 + k·2⁻²⁰."""
    x, w, g = normal(32, I), normal(O, I), normal(32, O, seed=1)
    draws = torch.stack([run(noisy(rounding), x, w, g * (1 + k * 2.0**-20))[1] for k in range(400)])
    spread = draws.std(0) / 400**0.5
    assert ((draws.mean(0) - g.T @ x).abs() < 5 * spread + 1e-3).all()


@pytest.mark.parametrize("path", ["grad_input", "grad_weight", "tokens"])
def test_random_rows_are_unbiased(path: str) -> None:
    """Each draw keeps 4 of 16 coefficients, the mean of many keeps all; both operands of a product see one draw."""
    transform = HadamardLowRank(order="random", rank=4, axis="tokens" if path == "tokens" else "contracted")
    p = plan(grad_weight=(transform, FLOAT, FLOAT)) if path == "grad_weight" else plan((transform, FLOAT, FLOAT))
    x, w, g = normal(32, I), normal(32, I), normal(32, 32, seed=1)
    at = 1 if path == "grad_weight" else 0
    draws = torch.stack([run(p, x, w, g)[at] for _ in range(1000)])
    exact = (g @ w, g.T @ x)[at]
    assert relative(draws[0], exact) > 0.3
    spread = draws.std(0) / len(draws) ** 0.5
    assert (draws.std(0) > 0).all() and ((draws.mean(0) - exact).abs() < 5 * spread).all()


def test_ranks_draw_alike_only_by_their_seed() -> None:
    """Noise that diverges between ranks, or is one for all, is a matter of the seed, not of a hidden state."""
    from torch.utils.checkpoint import checkpoint

    p = plan(grad_weight=(LOW, integer(8, "stochastic"), integer(8, "stochastic")))
    x, w, g = normal(2, 20, I), normal(O, I), normal(2, 20, O)
    functions: tuple[Callable[..., Tensor], ...] = (
        lambda *t: linear(*t, None, p),
        lambda *t: checkpoint(lambda *t: linear(*t, None, p), *t, use_reentrant=False),
    )
    for seed in (1, 2):
        found = []
        for f in functions:
            torch.manual_seed(seed)
            found.append(grads(f, x, w, g=g)[1:3])
        assert same(*found)


def test_tie_of_nearest() -> None:
    """nearest rounds ties to even, so half a code is no bias: codes 0.5, 1.5, 2.5 → 0, 2, 2."""
    g = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    got = run(plan((NONE, I8, FLOAT)), torch.zeros(1, 6), torch.eye(6), g)[0]
    assert got.tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0]]
    assert torch.equal(F.linear(g, torch.eye(6)), g)
