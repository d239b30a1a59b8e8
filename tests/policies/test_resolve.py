"""Plans of a model's layers: which rule decides, what a layer can do, what must not be."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hot.errors import PolicyError, UnknownNameError
from hot.policies.buffers import Packed, Quantized, Raw
from hot.policies.plan import LayerPlan, Skip
from hot.policies.quantizers import Int
from hot.policies.resolve import explain, resolve, resolve_detailed
from hot.policies.schema import Policy, load_policy

Write = Callable[..., Path]
EIGHT_BITS = {"kind": "int", "bits": 8}
PACKED = {"grad_weight": {"input": EIGHT_BITS}, "buffer": {"kind": "packed"}}


def plan(policy: Policy, model: nn.Module, name: str) -> LayerPlan:
    found = resolve(policy, model)[name]
    assert isinstance(found, LayerPlan)
    return found


def problems(policy: Policy, model: nn.Module) -> tuple[str, ...]:
    with pytest.raises(PolicyError) as caught:
        resolve(policy, model)
    return caught.value.problems


def test_is_pure(model: nn.Module) -> None:
    policy = load_policy("hot")
    before, state = copy.deepcopy(policy), pickle.dumps(model)
    assert resolve(policy, model) == resolve(policy, model)
    assert policy == before and pickle.dumps(model) == state


def test_layers_in_order_and_reasons_first(model: nn.Module) -> None:
    found = resolve(load_policy("int8"), model)
    assert list(found) == [
        "conv", "point", "depthwise", "blocks.0.qkv", "blocks.0.proj", "blocks.1.qkv", "blocks.1.proj",
        "attention.out_proj", "head",
    ]  # fmt: skip
    assert found["depthwise"] == Skip("groups=32: only groups=1 is supported")
    assert "nn.MultiheadAttention" in str(found["attention.out_proj"])


def test_later_rules_win_field_by_field(model: nn.Module) -> None:
    rules = [
        {"match": "blocks.**", "grad_weight": {"transform": {"rank": 4, "block": 8}}},
        {"match": "blocks.1.*", "grad_weight": {"transform": {"rank": 2}}},
        {"match": "**.proj", "grad_weight": {"input": {"kind": "sawb"}}},
    ]
    policy = Policy(extends="hot", rules=rules)
    transforms = [plan(policy, model, f"blocks.{i}.qkv").grad_weight.transform for i in (0, 1)]
    assert [(t.kept, t.block) for t in transforms] == [(4, 8), (2, 8)]
    proj = plan(policy, model, "blocks.1.proj").grad_weight
    assert proj.transform.kept == 2 and proj.input.to_dict() == {
        "kind": "sawb", "granularity": "tensor", "block": 128, "rounding": "nearest", "bits": 4, "coefficients": None,
    }  # fmt: skip


def test_a_rule_with_a_policy_starts_anew_and_later_ones_go_on(model: nn.Module) -> None:
    rules: list[dict[str, Any]] = [
        {"match": "blocks.**", "policy": "exact", "grad_input": {"weight": EIGHT_BITS}},
        {"match": "blocks.0.qkv", "grad_input": {"weight": {"bits": 4}}},
        {"match": "head", "policy": "int8"},
    ]
    policy = Policy(extends="hot", rules=rules)
    assert plan(policy, model, "blocks.0.proj") == Policy(defaults={"grad_input": {"weight": EIGHT_BITS}}).defaults
    assert plan(policy, model, "blocks.0.qkv").grad_input.weight == Int(bits=4)
    assert plan(policy, model, "head") == load_policy("int8").defaults


def test_who_made_a_layer_exact(model: nn.Module, write: Write) -> None:
    path = write(
        "extends: int8\nrules:\n  - {match: point, policy: exact}\n  - {match: '**', policy: exact, optional: true}\n"
    )
    assert resolve(load_policy(path), model)["point"] == Skip("policy exact by rule 3 (mine.yaml:3)")
    assert resolve(load_policy(path), model)["conv"] == Skip("policy exact by rule 4 (mine.yaml:4)")
    assert resolve(load_policy("exact"), model)["conv"] == Skip("the policy's defaults are exact")
    python = Policy(extends="int8", rules=[{"match": "conv", "policy": "exact"}])
    assert resolve(python, model)["conv"] == Skip("policy exact by rule 3")


def test_all_unmatched_rules_are_reported_with_the_nearest_layer(model: nn.Module, write: Write) -> None:
    text = (
        "rules:\n  - {match: blocks.*.qvk, policy: int8}\n  - {match: 're:(.*)\\.projj', policy: int8}\n"
        "  - {match: {type: Conv1d}, policy: int8}\n  - {match: none, policy: int8, optional: true}\n"
    )
    found = problems(load_policy(write(text)), model)
    assert len(found) == 3
    assert found[0].startswith(
        "mine.yaml:2:13 rules[0].match: matches no layer of the model; the nearest layer is 'blocks."
    )
    assert ".qkv'" in found[0] and found[0].endswith("(optional: true allows it)")
    assert ".proj'" in found[1]
    assert "the model has " in found[2] and "Linear 'blocks.0.qkv'" in found[2] and "Conv2d 'conv'" in found[2]
    assert "no nn.Linear and no nn.Conv2d" in problems(Policy(rules=[{"match": "a", "policy": "int8"}]), nn.ReLU())[0]


def test_rules_that_make_no_plan_together(model: nn.Module) -> None:
    rules = [
        {"match": "**.qkv", "grad_weight": {"transform": {"rank": 12}}},
        {"match": "blocks.**", "grad_weight": {"transform": {"block": 8, "rank": 8}}},
        {"match": "blocks.0.*", "grad_weight": {"transform": {"rank": 10}}},
    ]
    assert problems(Policy(extends="hot", rules=rules), model) == (
        "rules[2].grad_weight.transform.rank: 10 is larger than block: 8 (in layer 'blocks.0.qkv')",
        "rules[2].grad_weight.transform.rank: 10 is larger than block: 8 (in layer 'blocks.0.proj')",
    )


def test_layers_with_one_weight_have_one_plan() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    found = problems(Policy(extends="int8", rules=[{"match": "2", "policy": "exact"}]), model)
    assert found == ("rules[0].match: layers '0' and '2' share one weight but not one plan",)
    both = Policy(extends="int8", rules=[{"match": "0", "policy": "exact"}, {"match": "2", "policy": "exact"}])
    assert isinstance(resolve(both, model)["2"], Skip)


def test_a_layer_used_twice_is_one_layer_with_two_names() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared})
    policy = Policy(rules=[{"match": "b", "policy": "int8"}])
    assert list(resolve(policy, model)) == ["a"] and isinstance(resolve(policy, model)["a"], LayerPlan)
    assert len(explain(policy, model, "b")) == 2


@pytest.mark.parametrize(
    ("layer", "buffer"),
    [
        (nn.Linear(4, 4), Packed()),
        (nn.Conv2d(4, 4, 1), Packed()),
        (nn.Conv2d(4, 4, 1, stride=2), Packed()),
        (nn.Conv2d(4, 4, 1, padding="same"), Packed()),
        (nn.Conv2d(4, 4, 1, padding=(0, 1)), Quantized(quantizer=Int())),
        (nn.Conv2d(4, 4, (1, 3), padding="same"), Quantized(quantizer=Int())),
        (nn.Conv2d(4, 4, 3), Quantized(quantizer=Int())),
    ],
    ids=str,
)
def test_a_convolution_that_unfolds_saves_codes(layer: nn.Module, buffer: object) -> None:
    assert plan(Policy(defaults=PACKED), layer, "").buffer == buffer


def test_packing_nothing_is_raw() -> None:
    low_rank = {"grad_weight": {"transform": {"kind": "hadamard_low_rank"}}, "buffer": {"kind": "packed"}}
    assert plan(Policy(defaults=low_rank), nn.Linear(4, 4), "").buffer == Packed()
    assert plan(Policy(defaults=low_rank), nn.Conv2d(4, 4, 3), "").buffer == Raw()
    gradient = {"grad_weight": {"grad_output": EIGHT_BITS}, "buffer": {"kind": "packed"}}
    assert plan(Policy(defaults=gradient), nn.Linear(4, 4), "").buffer == Raw()
    packed = Policy(defaults={"buffer": {"kind": "packed"}})
    assert resolve(packed, nn.Linear(4, 4)) == {"": Skip("the policy's defaults are exact")}


def test_explain_tells_the_chain(model: nn.Module, write: Write) -> None:
    path = write(
        "defaults: {grad_weight: {input: {kind: int}}, buffer: {kind: packed}}\n"
        "rules:\n  - {match: 'conv', grad_weight: {input: {bits: 4}}}\n  - {match: '**', buffer: {kind: packed}}\n"
    )
    policy = load_policy(path)
    assert [str(step) for step in explain(policy, model, "conv")] == [
        "the policy's defaults\n"
        "  grad_weight.input: {kind: none} → {kind: int}\n"
        "  buffer: {kind: raw} → {kind: packed}",
        "rule 1 (mine.yaml:3)\n  grad_weight.input.bits: null → 4",
        "rule 2 (mine.yaml:4)\n  changes nothing",
        "what the layer can do\n  buffer: {kind: packed} → {kind: quantized, quantizer: "
        "{kind: int, granularity: tensor, block: 128, rounding: nearest, bits: 4}}",
    ]
    detailed = resolve_detailed(policy, model)
    assert (
        detailed["conv"].decided_by == "rule 1 (mine.yaml:3)" and detailed["head"].decided_by == "the policy's defaults"
    )
    assert detailed["depthwise"].decided_by == "the layer"
    with pytest.raises(UnknownNameError, match="no layer 'cnov', did you mean 'conv'"):
        explain(policy, model, "cnov")
