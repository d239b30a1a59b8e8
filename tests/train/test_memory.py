"""Bytes saved for backward, against sums done by hand."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hot
from hot.memory import PeakMemory, count_saved_bytes, saved_by_op, saved_bytes

BATCH, INPUTS, HIDDEN, OUTPUTS = 32, 8, 16, 4
FLOAT = 4


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS))


def test_mlp_saves_each_layers_input_once_and_no_weight() -> None:
    model, x = _mlp(), torch.randn(BATCH, INPUTS)
    saved = saved_bytes(model, lambda: model(x))
    first, second = BATCH * INPUTS * FLOAT, BATCH * HIDDEN * FLOAT  # ReLU's output is the second layer's input
    assert saved.total == first + second
    assert saved.layers == {"0": first, "2": second}
    assert saved.in_layers == saved.total


def test_gelu_saves_its_own_input_which_is_no_layers() -> None:
    model, x = (
        nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, OUTPUTS)),
        torch.randn(BATCH, INPUTS),
    )
    saved = saved_bytes(model, lambda: model(x))
    assert saved.total - saved.in_layers == BATCH * HIDDEN * FLOAT


def test_frozen_layers_save_nothing_that_backward_does_not_need() -> None:
    model, x = _mlp().requires_grad_(False), torch.randn(BATCH, INPUTS)
    assert saved_bytes(model, lambda: model(x)).total == 0


def test_layers_that_share_an_input_count_it_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(INPUTS, OUTPUTS), nn.Linear(INPUTS, OUTPUTS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) + self.k(x)

    model, x = Twice(), torch.randn(BATCH, INPUTS)
    saved = saved_bytes(model, lambda: model(x))
    assert saved.layers == {"q": BATCH * INPUTS * FLOAT, "k": 0}
    assert saved.total == BATCH * INPUTS * FLOAT


def test_a_slice_counts_the_whole_storage_that_it_keeps_alive() -> None:
    model, x = nn.Linear(INPUTS, OUTPUTS), torch.randn(4 * BATCH, INPUTS)
    assert saved_bytes(model, lambda: model(x[:BATCH])).total == 4 * BATCH * INPUTS * FLOAT


def test_what_the_graph_let_go_before_the_end_does_not_count() -> None:
    model, x = nn.Linear(INPUTS, OUTPUTS), torch.randn(BATCH, INPUTS)

    def run() -> torch.Tensor:
        model(torch.randn(1000, INPUTS))
        return model(x)

    assert saved_bytes(model, run).total == BATCH * INPUTS * FLOAT


def test_a_counted_step_trains_exactly_as_an_uncounted_one() -> None:
    gradients = []
    for counted in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3))
        x = torch.randn(5, 1, 8, 8)
        if counted:
            with count_saved_bytes(model):
                loss = model(x).square().mean()
        else:
            loss = model(x).square().mean()
        loss.backward()
        gradients.append([*(p.grad for p in model.parameters()), model[1].running_mean, torch.rand(3)])
        assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_failing_forward_leaves_no_hooks() -> None:
    model = _mlp()
    with pytest.raises(RuntimeError):
        saved_bytes(model, lambda: model(torch.randn(2, INPUTS + 1)))
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


def test_peak_sees_what_was_freed_again() -> None:
    meter = PeakMemory(torch.device("cpu"))
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    del block
    assert 60 * 2**20 < meter.read()["rss_growth"] < 160 * 2**20
    assert PeakMemory(torch.device("cpu")).read()["rss_growth"] < 32 * 2**20


def test_saved_by_op_names_module_and_node() -> None:
    model, x = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.GELU(), nn.Linear(OUTPUTS, 3)), torch.randn(BATCH, INPUTS)
    found = saved_by_op(model, lambda: model(x).exp().sum())
    assert found == {
        ("0", "Addmm"): BATCH * INPUTS * FLOAT,
        ("1", "Gelu"): BATCH * OUTPUTS * FLOAT,
        ("2", "Addmm"): BATCH * OUTPUTS * FLOAT,
        ("", "Exp"): BATCH * 3 * FLOAT,
    }
    assert sum(found.values()) == saved_bytes(model, lambda: model(x).exp().sum()).total


def test_saved_by_op_of_converted_and_checkpointed_blocks() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.GELU(), nn.Linear(64, 64)), nn.Linear(64, 64))
    hot.convert(model, hot.load_policy("memory"))
    runs = []

    class Count(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return x.tanh().tanh()

    counted = Count()
    model.append(counted)
    counted.forward = partial(checkpoint, counted.forward, use_reentrant=False)
    x = torch.randn(32, 64)
    found = saved_by_op(model, lambda: model(x).sum())
    assert len(runs) == 1  # nothing was made again to be counted
    assert {module for module, _ in found} == {"0", "1.0", "2", "3"}
    assert found["3", ""] == 32 * 64 * FLOAT and found["0", "Hot"] < 32 * 64
    assert sum(found.values()) == saved_bytes(model, lambda: model(x).sum()).total
