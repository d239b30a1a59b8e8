"""Policies in Python and in files: parents, rules, plug-ins, equality."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hot.errors import PolicyError
from hot.policies.plan import LayerPlan
from hot.policies.presets import preset_names
from hot.policies.quantizers import Int, NoQuantizer, Sawb, quantizers
from hot.policies.schema import Policy, load_policy
from hot.policies.transforms import Hadamard

Write = Callable[..., Path]
EIGHT_BITS = {"kind": "int", "bits": 8}


def test_without_anything_all_is_exact() -> None:
    assert Policy().defaults == LayerPlan() and Policy().backend == "auto" and Policy().rules == ()
    assert Policy() == load_policy("exact")


def test_python_and_yaml_say_the_same(write: Write) -> None:
    path = write(
        "version: 1\nextends: hot\nbackend: reference\ndefaults:\n  grad_input: {weight: {bits: 8}}\n"
        "rules:\n  - match: {type: Conv2d}\n    policy: exact\n"
    )
    built = Policy(
        version=1,
        extends="hot",
        backend="reference",
        defaults={"grad_input": {"weight": {"bits": 8}}},
        rules=[{"match": {"type": "Conv2d"}, "policy": "exact"}],
    )
    assert load_policy(path) == built == Policy(extends=load_policy(path))
    assert built != load_policy("hot") and built.defaults.backend == "reference"


def test_objects_may_stand_for_blocks() -> None:
    policy = Policy(defaults={"grad_input": {"transform": Hadamard(block=8), "weight": Sawb(coefficients=(1.0, 0.5))}})
    assert policy.defaults.grad_input.transform == Hadamard(block=8)
    assert policy.defaults.grad_input.weight == Sawb(coefficients=(1.0, 0.5))


def test_python_problems_have_a_path_and_come_together() -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(
            backend="mine", defaults={"grad_input": {"weight": {"kind": "int", "bits": True}}}, rules=[{"match": "a"}]
        )
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        "backend",
        "rules[0]",
        "defaults.grad_input.weight.bits",
    ]
    with pytest.raises(PolicyError, match=r"^version: must be a whole number, not true$"):
        Policy(version=True)
    with pytest.raises(PolicyError, match=r"^rules: must be a list, not 'a'$"):
        Policy(rules="a")  # type: ignore[arg-type]


def test_a_child_changes_its_parent_field_by_field(write: Write) -> None:
    write(
        "extends: hot\ndefaults:\n  grad_input:\n    weight: {bits: 8}\n    grad_output: {kind: none}\n",
        "a/parent.yaml",
    )
    child = load_policy(write("extends: a/parent.yaml\ndefaults:\n  grad_input: {weight: {rounding: hashed}}\n"))
    assert child.defaults.grad_input.weight == Int(bits=8, granularity="row", rounding="hashed")
    assert child.defaults.grad_input.grad_output == NoQuantizer()
    assert child.defaults.grad_weight == load_policy("hot").defaults.grad_weight


def test_the_rules_of_the_parent_come_first(write: Write) -> None:
    write("backend: reference\nrules:\n  - match: a\n    buffer: {kind: packed}\n", "parent.yaml")
    child = load_policy(write("extends: parent.yaml\nrules:\n  - match: b\n    buffer: {kind: packed}\n"))
    assert [rule.match.plain() for rule in child.rules] == ["a", "b"] and child.backend == "reference"
    assert [str(rule.mark) for rule in child.rules] == [
        "parent.yaml:3:12 rules[0].match",
        "mine.yaml:3:12 rules[0].match",
    ]


def test_a_problem_of_the_parent_is_cited_in_its_file(write: Write) -> None:
    write("defaults:\n  bufer: {kind: raw}\n  grad_input: {transform: {kind: hadamard, block: 3}}\n", "parent.yaml")
    path = write("extends: parent.yaml\nbackend: nope\n")
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [
        "parent.yaml:2:3",
        "parent.yaml:3:51",
        "mine.yaml:2:10",
    ]


def test_the_blame_is_where_the_last_word_was_written(write: Write) -> None:
    write("defaults: {grad_weight: {transform: {kind: hadamard_low_rank, block: 16, rank: 16}}}\n", "parent.yaml")
    path = write("extends: parent.yaml\ndefaults: {grad_weight: {transform: {block: 8}}}\n")
    with pytest.raises(PolicyError, match=r"^mine.yaml:2:45 .*block: rank: 16 is larger than block: 8$"):
        load_policy(path)


def test_a_longer_cycle_is_named(write: Write) -> None:
    write("extends: b.yaml\n", "a.yaml")
    write("extends: c.yaml\n", "b.yaml")
    write("extends: ./a.yaml\n", "c.yaml")
    with pytest.raises(PolicyError, match=r"^c.yaml:1:10 extends: extends itself: a.yaml → b.yaml → c.yaml → a.yaml$"):
        load_policy("a.yaml")


def test_a_rule_may_start_from_a_file_and_even_from_its_own(write: Write) -> None:
    write("defaults: {buffer: {kind: packed}}\nrules: [{match: none, policy: ../mine.yaml}]\n", "a/start.yaml")
    policy = load_policy(
        write(
            "extends: int8\nrules:\n  - {match: a, policy: a/start.yaml, grad_input: {weight: {kind: luq}}}\n"
            "  - {match: b, policy: mine.yaml}\n"
        )
    )
    first, second = (rule.apply(policy.tree).plain() for rule in policy.rules[2:])
    assert first["buffer"] == {"kind": "packed"} and first["grad_input"]["weight"] == {"kind": "luq"}
    assert first["grad_weight"]["input"] == {"kind": "none"}
    assert second == policy.tree.plain()


def test_a_rule_may_build_on_an_earlier_one() -> None:
    rules = [{"match": "**", "grad_weight": {"grad_output": EIGHT_BITS}}]
    policy = Policy(rules=rules).with_rules([{"match": "a", "grad_weight": {"grad_output": {"granularity": "token"}}}])
    assert len(policy.rules) == 2
    with pytest.raises(PolicyError, match="quantizer 'none' takes no parameters"):
        Policy(rules=[{"match": "a", "grad_weight": {"grad_output": {"granularity": "token"}}}])


def test_token_means_row_on_the_gradient_of_grad_input() -> None:
    token = {**EIGHT_BITS, "granularity": "token"}
    plan = Policy(
        defaults={"grad_input": {"grad_output": token}, "grad_weight": {"grad_output": token, "input": token}}
    )
    assert plan.defaults.grad_input.grad_output == Int(granularity="row")
    assert plan.defaults.grad_weight.grad_output == plan.defaults.grad_weight.input == Int(granularity="token")


@pytest.mark.parametrize("name", preset_names())
def test_equality_copies_and_plain_data(name: str) -> None:
    policy = load_policy(name)
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == Policy(**policy.to_dict()) == policy
    assert policy.is_exact == (name == "exact")
    assert policy.description


def test_is_exact_looks_at_the_rules() -> None:
    assert Policy(rules=[{"match": "a", "policy": "exact"}]).is_exact
    assert not Policy(rules=[{"match": "a", "policy": "int8"}]).is_exact


PLUGIN = """
from hot.policies.quantizers import Quantizer, register_quantizer

@register_quantizer("halves")
class Halves(Quantizer):
    levels: tuple[int, ...] = (1,)
    step: float = 0.5
"""


@pytest.fixture
def forget_halves() -> Iterator[None]:
    yield
    quantizers.remove("halves")


def test_a_plug_in_extends_the_kinds(write: Write, forget_halves: None) -> None:
    write(PLUGIN, "plug/halves.py")
    path = write(
        "plugins: [plug/halves.py]\ndefaults: {grad_input: {weight: {kind: halves, levels: [1, 2], step: 1}}}\n"
    )
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    assert "allow_plugins=True" in caught.value.problems[0] and "--allow-plugins" in caught.value.problems[0]
    assert "unknown quantizer 'halves'" in caught.value.problems[1]
    policy = load_policy(path, allow_plugins=True)
    assert policy.plugins == (str(Path("plug/halves.py").resolve()),)
    assert policy.defaults.grad_input.weight.to_dict() == {"kind": "halves", "levels": [1, 2], "step": 1.0}
    assert Policy(**policy.to_dict(), allow_plugins=True) == policy
    path = write("plugins: [plug/halves.py]\ndefaults: {grad_input: {weight: {kind: halves, levels: [1, x]}}}\n")
    with pytest.raises(PolicyError, match=r"weight.levels\[1\]: must be a whole number, not 'x'$"):
        load_policy(path, allow_plugins=True)


def test_a_broken_plug_in_is_named(write: Write) -> None:
    write("raise RuntimeError('no luck')", "bad.py")
    path = write("plugins: [bad.py, gone.py]\nversion: 2\n")
    with pytest.raises(PolicyError) as caught:
        load_policy(path, allow_plugins=True)
    first, second, third = caught.value.problems
    assert first.startswith("mine.yaml:1:11 plugins[0]: plug-in") and first.endswith(
        "bad.py failed to import: RuntimeError: no luck"
    )
    assert "there is no plug-in file" in second and third.startswith("mine.yaml:2:10 version")


def test_a_local_file_does_not_hide_a_preset(write: Write) -> None:
    write("version: 1\n", "hot")
    assert load_policy("hot").rules and not load_policy("./hot").rules
