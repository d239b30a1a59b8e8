"""What README shows is run: its examples, its commands, its tables."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from readme import README, block
from torch import nn

import hot


@pytest.fixture
def _forget_ternary():
    yield
    hot.policies.quantizers.quantizers.remove("ternary")


@pytest.mark.usefixtures("_forget_ternary")
def test_quantizer_example_trains_under_its_policy(tmp_path) -> None:
    (tmp_path / "ternary.py").write_text(block("example: quantizer"))
    policy_text = next(text for text in re.findall(r"```yaml\n(.*?)```", README, re.S) if "plugins:" in text)
    (tmp_path / "mine.yaml").write_text(policy_text)
    with pytest.raises(hot.PolicyError, match="allow"):
        hot.load_policy(tmp_path / "mine.yaml")
    policy = hot.load_policy(tmp_path / "mine.yaml", allow_plugins=True)
    torch.manual_seed(0)
    layer, exact, x = nn.Linear(32, 48), nn.Linear(32, 48), torch.randn(2, 16, 32)
    exact.load_state_dict(layer.state_dict())
    assert hot.convert(nn.Sequential(layer), policy)["0"].grad_input.weight.threshold == 0.7
    grads = []
    for module in (layer, exact):
        own = x.clone().requires_grad_()
        module(own).square().sum().backward()
        grads.append(own.grad)
    cosine = torch.cosine_similarity(grads[0].flatten(), grads[1].flatten(), dim=0)
    assert 0.7 < cosine < 0.999  # ternary weights: the right direction, and really quantized


def test_policy_example_is_a_policy(tmp_path) -> None:
    text = next(text for text in re.findall(r"```yaml\n(.*?)```", README, re.S) if "attn.qkv" in text)
    (tmp_path / "mine.yaml").write_text(text)
    policy = hot.load_policy(tmp_path / "mine.yaml")
    model = nn.ModuleDict(
        {"blocks": nn.ModuleList([nn.ModuleDict({"attn": nn.ModuleDict({"qkv": nn.Linear(4, 12)})})])}
    )
    model["stem"] = nn.Conv2d(3, 4, 1)
    plans = hot.resolve(policy, model)
    assert plans["blocks.0.attn.qkv"].grad_weight.transform.rank == 12
    assert isinstance(plans["stem"], hot.Skip)


def test_every_preset_is_in_the_table() -> None:
    from hot.policies.presets import preset_names

    table = README.partition("| preset |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", table, re.M)) == preset_names()


def test_commands_are_there() -> None:
    assert "hot train quickstart" in block("main-command")
    assert "pytest" in block("test-command")


def test_tables_are_those_of_the_results() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "readme_tables.py"
    spec = importlib.util.spec_from_file_location("readme_tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.render(README) == README
