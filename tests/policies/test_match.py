"""Globs by segment, anchored regular expressions, conditions on types and sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hot.errors import PolicyError
from hot.policies.layers import layers_of
from hot.policies.match import glob_matches, name_matches, parse_match
from hot.policies.yaml_source import Problems, from_python


def matched(match: Any, model: nn.Module) -> list[str]:
    problems = Problems()
    matcher = parse_match(from_python(match, problems), problems)
    problems.raise_any()
    assert matcher is not None
    assert matcher.plain() == match
    return [layer.name for layer in layers_of(model) if matcher.matches(layer)]


@pytest.mark.parametrize(
    ("pattern", "name", "yes"),
    [
        ("blocks.1", "blocks.1", True),
        ("blocks.1", "blocks.11", False),
        ("blocks.*", "blocks.11", True),
        ("blocks.*", "blocks.1.attn", False),
        ("*", "head", True),
        ("*", "", False),
        ("**", "", True),
        ("", "", True),
        ("", "head", False),
        ("**", "a.b.c", True),
        ("**.head", "head", True),
        ("**.head", "a.head", True),
        ("**.head", "overhead", False),
        ("a.**.z", "a.z", True),
        ("a.**.z", "a.b.c.z", True),
        ("a.**.z", "a.b.c", False),
        ("**.b.**.b", "b", False),
        ("re:blocks\\.(0|11)\\..*", "blocks.11.qkv", True),
        ("re:blocks\\.1", "blocks.11", False),
        ("re:1", "blocks.1", False),
        ("re:", "", True),
    ],
)
def test_name_matches(pattern: str, name: str, yes: bool) -> None:
    assert name_matches(pattern, name) is yes


def naive(pattern: list[str], name: list[str]) -> bool:
    """The meaning of a glob, said by trying everything."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(naive(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and pattern[0] in ("*", name[0]) and naive(pattern[1:], name[1:])


@given(st.lists(st.sampled_from(["a", "b", "*", "**"]), max_size=6), st.lists(st.sampled_from("ab"), max_size=6))
def test_globs_mean_what_the_naive_search_finds(pattern: list[str], name: list[str]) -> None:
    assert glob_matches(".".join(pattern), ".".join(name)) is naive(pattern, name)


def test_many_stars_are_no_trap() -> None:
    assert not glob_matches(".".join(["**", "a"] * 30) + ".b", ".".join("a" * 60))


@pytest.mark.parametrize(
    ("match", "names"),
    [
        ("blocks.*.qkv", ["blocks.0.qkv", "blocks.1.qkv"]),
        ("head", ["head"]),
        ({"type": "Conv2d"}, ["conv", "point", "depthwise"]),
        ({"type": "Conv2d", "groups": ">1"}, ["depthwise"]),
        ({"type": "Module", "name": "blocks.1.*"}, ["blocks.1.qkv", "blocks.1.proj"]),
        ({"name": "re:.*proj", "bias": False}, ["blocks.0.proj", "blocks.1.proj"]),
        ({"in_features": 32, "out_features": ">= 96"}, ["blocks.0.qkv", "blocks.1.qkv"]),
        ({"out_features": "<32"}, ["head"]),
        ({"in_channels": "<=8", "out_channels": "!=8"}, ["point"]),
        ({"kernel_size": 3}, ["conv"]),
        ({"kernel_size": [1, 3]}, ["depthwise"]),
        ({"kernel_size": ">1"}, ["conv"]),
        ({"kernel_size": "!=1"}, ["conv", "depthwise"]),
        ({"stride": 1, "dilation": [1, 1], "name": "conv"}, ["conv"]),
        ({"type": "Conv1d"}, []),
    ],
)
def test_matches(match: Any, names: list[str], model: nn.Module) -> None:
    assert matched(match, model) == names


def test_subclasses_and_every_name_of_a_layer_match() -> None:
    class MyLinear(nn.Linear):
        pass

    shared = MyLinear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert matched({"type": "Linear"}, model) == matched({"type": "MyLinear"}, model) == matched("b", model) == ["a"]


def test_the_model_itself_may_be_the_layer() -> None:
    assert matched("", nn.Linear(2, 2)) == matched("**", nn.Linear(2, 2)) == [""]


def test_a_broken_pattern_suggests_one_that_works(model: nn.Module) -> None:
    with pytest.raises(PolicyError) as caught:
        matched("**.1*.fc?", model)
    pattern = str(caught.value).split("'")[-2]
    assert name_matches(pattern, "blocks.11.fc?") and not name_matches(pattern, "blocks.2.fc?")
