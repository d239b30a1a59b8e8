"""The named sets: what networks really have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hot.bench.shapes import SETS, layer_set, linear, resnet50
from hot.errors import HotError, UnknownNameError


def test_resnet50_has_its_convolutions_and_their_work() -> None:
    """52 convolutions behind the stem, and the 4.09 G multiply-adds of the network without those of stem and head."""
    layers = resnet50(1)
    assert sum(layer.count for layer in layers) == 52 and len({layer.name for layer in layers}) == len(layers) == 22
    work = sum(layer.count * layer.tokens * layer.outputs * layer.inputs for layer in layers)
    assert work == pytest.approx(4.089e9 - 0.118e9 - 0.002e9, rel=2e-3)
    assert {layer.kind for layer in layers} == {"conv1x1", "conv3x3"}
    assert sum(layer.count for layer in layers if layer.stride == 2) == 6


@pytest.mark.parametrize("name", sorted(SETS))
def test_shapes_are_those_that_torch_gives(name: str) -> None:
    for layer in layer_set(name)[1]:
        x, weight = torch.empty(layer.x, device="meta"), torch.empty(layer.weight, device="meta")
        y = F.conv2d(x, weight, None, layer.stride, layer.kernel // 2) if layer.kernel else F.linear(x, weight)
        assert y.shape == layer.y
        assert layer.tokens * layer.outputs == y.numel() and layer.inputs * layer.outputs == weight.numel()


def test_sets_and_batches() -> None:
    assert [(x.tokens, x.outputs, x.inputs) for x in layer_set("llm")[1]] == [
        (16384, 14336, 4096), (16384, 4096, 14336), (16384, 4096, 4096),
    ]  # fmt: skip
    assert {layer.tokens for layer in layer_set("vit")[1]} == {50432}
    assert {layer.x[:2] for layer in layer_set("vit", 2)[1]} == {(2, 197)}
    assert len(layer_set("latency")[1]) == 16
    assert linear(2, 3, 4).name == "2x3x4" and linear(2, 3, 4).weight == (3, 4)
    with pytest.raises(HotError, match="--batch 2: the layers of 'llm' have a fixed size"):
        layer_set("llm", 2)
    with pytest.raises(UnknownNameError, match="unknown set 'resnet5', did you mean 'resnet50'"):
        layer_set("resnet5")
