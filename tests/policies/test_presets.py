"""The presets: what each one plans for a small model, word by word (tests/policies/plans/NAME.txt)."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from hot.policies import presets
from hot.policies.plan import LayerPlan, Skip
from hot.policies.presets import find_policy, preset_folder, preset_names
from hot.policies.resolve import resolve, resolve_activations
from hot.policies.schema import load_policy

PLANS = Path(__file__).parent / "plans"


def table(name: str, model: nn.Module) -> str:
    """One line a layer; a skip's place without the folder, which differs between machines."""
    lines = []
    for layer, plan in resolve(load_policy(name), model).items():
        words = str(plan)
        if " (" in words and isinstance(plan, Skip):
            words = words.partition(" (")[0] + " of " + Path(words.partition(" (")[2]).name.partition(":")[0]
        lines.append(f"{layer:20} {words}\n")
    plans = resolve_activations(load_policy(name), model)
    return "".join(lines + [f"{module:20} {plan}\n" for module, plan in plans.items()])


def test_there_is_a_table_of_every_preset() -> None:
    assert sorted(path.stem for path in PLANS.iterdir()) == preset_names()


@pytest.mark.parametrize("name", preset_names())
def test_plans_as_written(name: str, model: nn.Module) -> None:
    assert table(name, model) == (PLANS / f"{name}.txt").read_text()


class LoraLinear(nn.Module):
    """The names that PEFT gives."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(32, 32)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 8, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, 32, bias=False)})


def test_hot_lora_leaves_grad_input_of_the_adapters_exact() -> None:
    classifier = nn.ModuleDict({"modules_to_save": nn.ModuleDict({"default": nn.Linear(32, 2)})})
    model = nn.ModuleDict({"query": LoraLinear(), "classifier": classifier})
    plans, hot = resolve(load_policy("hot-lora"), model), load_policy("hot").defaults
    assert plans["query"] == hot
    for name in ("query.lora_A.default", "query.lora_B.default"):
        adapter = plans[name]
        assert isinstance(adapter, LayerPlan)
        assert adapter.grad_input.is_exact and adapter.grad_weight == hot.grad_weight and adapter.buffer == hot.buffer
    assert isinstance(plans["classifier.modules_to_save.default"], Skip)


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "exact"])
def test_heads_are_left_exact_at_any_depth(name: str) -> None:
    linear = nn.Linear(4, 4)
    names = {"head": True, "fc": True, "classifier.6": True, "model.lm_head": True, "heads": False, "mlp.fc1": False}
    for path, is_head in names.items():
        model: nn.Module = linear
        for segment in reversed(path.split(".")):
            model = nn.ModuleDict({segment: model})
        assert isinstance(resolve(load_policy(name), model)[path], Skip) is is_head, path


def test_presets_are_found_in_a_checkout_and_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_policy("hot", tmp_path) == preset_folder() / "hot.yaml"
    for folder, name in (("configs", "beside"), ("hot/configs", "inside")):
        (tmp_path / folder / "policies").mkdir(parents=True)
        (tmp_path / folder / "policies" / f"{name}.yaml").touch()
        monkeypatch.setattr(presets, "__file__", str(tmp_path / "hot" / "policies" / "presets.py"))
        assert preset_names() == [name]


@pytest.mark.parametrize("path", sorted(preset_folder().glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_says_why(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ") and "\nversion: 1\n" in text and "\ndescription: " in text


@pytest.mark.parametrize("name", ["hot", "hot-paper", "hot-lora", "hlq", "int8", "lbp-wht", "luq"])
@pytest.mark.parametrize(
    ("layer", "exact"),
    [
        ("patch_embed.proj", True), ("vit.embeddings.patch_embeddings.projection", True), ("stem.0", True), ("conv1", True),
        ("features.0", True), ("head", True), ("model.lm_head", True), ("classifier.6", True), ("fc", True),
        ("layer1.0.conv1", False), ("features.3", False), ("blocks.0.mlp.fc1", False), ("system", False), ("heads.0", False),
    ],
)  # fmt: skip
def test_stems_and_heads_are_left_exact(name: str, layer: str, exact: bool) -> None:
    model = nn.Module()
    at = model
    *folders, last = layer.split(".")
    for folder in folders:
        at.add_module(folder, nn.Module())
        at = at.get_submodule(folder)
    at.add_module(last, nn.Linear(32, 32))
    assert isinstance(resolve(load_policy(name), model)[layer], Skip) is exact
