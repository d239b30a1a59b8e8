"""How good the gradients are: errors inside bands, and training runs that end where exact ones do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import FLOAT, FULL, HOT, I4, NONE, PLANS, Grads, decibels, for_conv, grads, normal, plan
from torch import Tensor, nn

from hot.convert import HotLinear
from hot.executor import conv2d, linear
from hot.policies.buffers import Raw
from hot.policies.plan import LayerPlan

# (least, most) decibels of grad_input and of grad_weight on white noise, where a projection to r of n keeps r/n of the
# product: −10·log10(1 − r/n) = 3 dB for 8 of 16. Outside a band something is wrong, above it too.
BANDS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "hot": ((12, 24), (1.5, 5)),
    "int8": ((38, 46), (38, 46)),
    "int4": ((14, 22), (12, 22)),
    "hadamard_int8": ((38, 46), (38, 46)),
    "raw_buffer": ((38, 46), (38, 46)),
    "quantized_buffer": ((38, 46), (36, 46)),
    "tensor_scales": ((34, 46), (34, 46)),
    "block_scales": ((40, 52), (40, 52)),
    "token_scales": ((38, 46), (38, 46)),
    "float8": ((22, 34), (26, 36)),
    "sawb": ((30, 46), (30, 46)),
    "random_signs": ((38, 46), (38, 46)),
    "random_rows": ((38, 46), (-6, 3)),
    "stochastic": ((34, 44), (34, 44)),
    "pseudo_stochastic": ((34, 44), (34, 44)),
    "luq": ((4, 14), (4, 14)),
    "projected_tokens": ((1.5, 5), (1.5, 5)),
    "class_token": ((38, 46), (1.5, 6)),
    "float_grad_output": ((40, 50), (40, 50)),
}


def within(got: Grads, exact: Grads, bands: tuple[tuple[float, float], tuple[float, float]]) -> None:
    for name, (least, most) in zip(("grad_input", "grad_weight"), bands, strict=True):
        snr = decibels(getattr(got, name), getattr(exact, name))
        assert least < snr < most, f"{name}: {snr:.1f} dB"


@pytest.mark.parametrize("name", BANDS)
def test_linear_errors(name: str) -> None:
    operands = normal(4, 160, 96), normal(128, 96, seed=1), normal(128)
    within(grads(lambda *t: linear(*t, PLANS[name]), *operands), grads(F.linear, *operands), BANDS[name])


@pytest.mark.parametrize("name", ["int8", "int4", "hadamard_int8", "tensor_scales", "stochastic"])
def test_conv_errors(name: str) -> None:
    operands = normal(4, 16, 12, 12), normal(24, 16, 3, 3, seed=1), normal(24)
    ours = grads(lambda *t: conv2d(*t, for_conv(PLANS[name]), padding=1), *operands)
    least = [band[0] - 4 for band in BANDS[name]]
    within(ours, grads(lambda *t: F.conv2d(*t, padding=1), *operands), ((least[0], 60), (least[1], 60)))


def test_a_hadamard_transform_tames_outliers() -> None:
    """One output of each token is twenty times as large, as in real gradients: 4 bits need the transform."""
    operands, g = (normal(256, 32), normal(64, 32, seed=1)), normal(256, 64, seed=2)
    g[torch.arange(256), torch.arange(256) % 64] = 20
    exact = grads(F.linear, *operands, g=g)
    transformed = plan((FULL, I4, FLOAT), buffer=Raw())
    plain = plan((NONE, I4, FLOAT), buffer=Raw())
    snr = [
        decibels(grads(lambda *t, p=p: linear(*t, None, p), *operands, g=g)[1], exact[1]) for p in (plain, transformed)
    ]
    assert snr[1] > snr[0] + 6


def test_smooth_tokens_lose_little() -> None:
    """The case that the low rank is for: tokens that vary slowly keep nearly all of grad_weight at half of the memory."""
    x = torch.cumsum(normal(4, 128, 32), 1) * 0.1
    operands, g = (x, normal(24, 32)), torch.cumsum(normal(4, 128, 24, seed=2), 1) * 0.1
    ours, theirs = (grads(f, *operands, g=g) for f in (lambda *t: linear(*t, None, HOT), F.linear))
    assert decibels(ours.grad_weight, theirs.grad_weight) > 20


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)


class Rows(nn.Module):
    """The 8 rows of an image as tokens, two layers over them and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(8 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        return self.head((x + F.gelu(self.second(x))).flatten(1))


def train(plan: LayerPlan | None, steps: int = 120) -> float:
    """The mean loss of the last steps."""
    torch.manual_seed(0)
    model, (images, labels) = Rows(), digits()
    for layer in (model.first, model.second) if plan is not None else ():
        layer.__class__, layer.hot_plan = HotLinear, plan
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


@pytest.mark.parametrize(("name", "most"), [("hot", 1.6), ("int8", 1.15), ("luq", 2.0), ("projected_tokens", 2.0)])
def test_training_ends_near_exact(name: str, most: float) -> None:
    exact, quantized = train(None), train(PLANS[name])
    assert exact < 0.2 and quantized < most * exact + 0.01
