"""Law 3: one input, one buffer: found by the identity and the version of a living tensor, and owned by nobody here."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers import HOT, grads, normal
from torch import Tensor, nn

from hot import sharing
from hot.convert import HotLinear
from hot.executor import linear
from hot.sharing import shared


@pytest.fixture(autouse=True)
def _fresh_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_shared", {})


class Maker:
    """Counts how often something is made."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> tuple[Tensor, ...]:
        self.calls += 1
        return torch.full((3,), self.calls), torch.full((2,), self.calls)


def test_found_again_while_it_lives() -> None:
    x, make = torch.ones(4), Maker()
    held = shared(x, "key", make)
    again = shared(x, "key", make)
    assert make.calls == 1 and all(a is b for a, b in zip(held, again, strict=True))


@pytest.mark.parametrize("lost", [[0], [1], [0, 1]], ids=str)
def test_made_again_when_a_part_is_gone(lost: list[int]) -> None:
    x, make = torch.ones(4), Maker()
    held = list(shared(x, "key", make))
    for i in lost:
        held[i] = torch.empty(0)
    again = shared(x, "key", make)
    assert make.calls == 2 and all(t.unique().tolist() == [2] for t in again)


def test_another_key_another_buffer() -> None:
    x, make = torch.ones(4), Maker()
    held = shared(x, "a", make), shared(x, "b", make)
    assert make.calls == 2 and held[0][0] is not held[1][0]


@pytest.mark.parametrize(
    "change",
    [lambda x: x.add_(1), lambda x: x[:2].zero_(), lambda x: x.copy_(torch.zeros(4)), lambda x: torch.relu_(x.view(2, 2))],
)  # fmt: skip
def test_a_change_in_place_is_seen(change: object) -> None:
    x, make = torch.ones(4), Maker()
    held = [shared(x, "key", make)]
    change(x)  # type: ignore[operator]
    held.append(shared(x, "key", make))
    assert make.calls == 2
    held.append(shared(x, "key", make))
    assert make.calls == 2


def test_an_equal_tensor_is_another_one() -> None:
    x, make = torch.ones(4), Maker()
    held = shared(x, "key", make), shared(x.detach(), "key", make), shared(x.clone(), "key", make)
    assert make.calls == 3 and len(held) == 3


def test_a_reused_id_is_no_hit() -> None:
    """Neither an address nor an id says which tensor it is."""
    make, held, ids = Maker(), [], set()
    for n in range(50):
        x = torch.full((4,), float(n))
        ids.add(id(x))
        held.append(shared(x, "key", make))
        del x
    assert make.calls == 50 and len(ids) < 50 and not sharing._shared


def test_a_stale_entry_is_no_hit() -> None:
    """Even one that stands under the id of a living tensor, as when a thread was between the two: identity decides."""
    x, other, make = torch.ones(4), torch.ones(4), Maker()
    held = shared(other, "key", make)
    sharing._shared[id(x), "key"] = sharing._shared[id(other), "key"]
    again = shared(x, "key", make)
    assert make.calls == 2 and again[0] is not held[0]


def test_inference_tensors_are_not_shared() -> None:
    """They have no version, so a change in place would go unnoticed."""
    with torch.inference_mode():
        x = torch.ones(4)
    make = Maker()
    held = shared(x, "key", make), shared(x, "key", make)
    assert make.calls == 2 and len(held) == 2


def test_the_table_owns_nothing() -> None:
    """Neither inputs nor buffers outlive the graph, and the table empties with its inputs."""
    import weakref

    layers, x = [hot_linear() for _ in range(3)], normal(4, 20, 16)
    outputs = [layer(x) for layer in layers]
    assert len(sharing._shared) == 1
    (entry,) = sharing._shared.values()
    buffers = entry[2]
    assert all(b() is not None for b in buffers)
    del outputs, entry
    assert all(b() is None for b in buffers)
    input_of = weakref.ref(x)
    del x
    gc.collect()
    assert input_of() is None and not sharing._shared


def hot_linear() -> nn.Linear:
    layer = nn.Linear(16, 16)
    layer.__class__, layer.hot_plan = HotLinear, HOT
    return layer


def test_many_steps_leave_nothing() -> None:
    model = nn.Sequential(hot_linear(), nn.GELU(), hot_linear())
    for _ in range(5):
        model(normal(4, 20, 16)).sum().backward()
    gc.collect()
    assert not sharing._shared


def test_a_static_input_buffer() -> None:
    """An input tensor that every step fills anew, as CUDA graphs want it, gives each step its own gradient."""
    weight, static = normal(8, 16), torch.zeros(4, 20, 16)
    for step in range(3):
        static.copy_(normal(4, 20, 16, seed=step))
        w = weight.clone().requires_grad_()
        linear(static, w, None, HOT).backward(normal(4, 20, 8))
        alone = grads(lambda x, w: linear(x, w, None, HOT), normal(4, 20, 16, seed=step), weight, g=normal(4, 20, 8))
        assert torch.equal(w.grad, alone.grad_weight)


def test_interleaved_graphs() -> None:
    """Two forwards before two backwards over recycled memory, as in gradient accumulation, do not mix."""
    weight, outputs = normal(8, 16).requires_grad_(), []
    for step in range(20):
        outputs.append(linear(normal(2, 20, 16, seed=step), weight, None, HOT))
    for step, y in enumerate(outputs):
        (got,) = torch.autograd.grad(y, weight, normal(2, 20, 8))
        alone = grads(lambda x, w: linear(x, w, None, HOT), normal(2, 20, 16, seed=step), weight, g=normal(2, 20, 8))
        assert torch.equal(got, alone.grad_weight)
