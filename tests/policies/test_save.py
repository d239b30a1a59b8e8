"""Saved policies: flat, readable, equal when they are loaded again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hot.policies.presets import preset_names
from hot.policies.save import flow, save_policy
from hot.policies.schema import Policy, load_policy
from hot.policies.yaml_source import Problems, read_text

Write = Callable[..., Path]


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_back_equal(name: str, tmp_path: Path) -> None:
    policy = load_policy(name)
    save_policy(policy, tmp_path / "saved.yaml")
    saved = load_policy(tmp_path / "saved.yaml")
    assert saved == policy and saved.description == policy.description


def test_reads_well(tmp_path: Path) -> None:
    policy = Policy(
        defaults={"grad_input": {"transform": {"kind": "hadamard", "block": 8}}, "buffer": {"kind": "packed"}},
        rules=[
            {"match": "blocks.*.mlp", "optional": True, "grad_input": {"transform": {"block": 16}}},
            {"match": {"type": "Conv2d", "groups": ">1"}, "policy": "exact"},
        ],
    )
    path = tmp_path / "saved.yaml"
    save_policy(policy, path, comments={1: "error 1.5e-3\nof many \x1b figures"})
    assert path.read_text() == (
        "version: 1\n"
        "backend: auto\n"
        "defaults:\n"
        "  grad_input:\n"
        "    transform: {kind: hadamard, block: 8}\n"
        "    grad_output: {kind: none}\n"
        "    weight: {kind: none}\n"
        "  grad_weight:\n"
        "    transform: {kind: none}\n"
        "    grad_output: {kind: none}\n"
        "    input: {kind: none}\n"
        "  buffer: {kind: packed}\n"
        "rules:\n"
        '  - match: "blocks.*.mlp"\n'
        "    optional: true\n"
        "    grad_input: {transform: {block: 16}}\n"
        "  # error 1.5e-3\n"
        "  # of many   figures\n"
        '  - match: {type: Conv2d, groups: ">1"}\n'
        "    policy: exact\n"
    )
    assert load_policy(path) == policy and os.listdir(tmp_path) == ["saved.yaml"]


def test_paths_are_relative_to_the_new_file(write: Write) -> None:
    write("defaults: {buffer: {kind: packed}}\n", "start/from.yaml")
    write("", "start/nothing.py")
    policy = load_policy(
        write("plugins: [start/nothing.py]\nrules: [{match: a, policy: start/from.yaml}]\n"), allow_plugins=True
    )
    Path("other").mkdir()
    save_policy(policy, "other/saved.yaml")
    text = Path("other/saved.yaml").read_text()
    assert "policy: ../start/from.yaml" in text and "plugins: [../start/nothing.py]" in text
    assert load_policy("other/saved.yaml", allow_plugins=True) == policy


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved.yaml"
    save_policy(load_policy("hot"), path)
    before = path.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_policy(load_policy("int8"), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["saved.yaml"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]+x", fullmatch=True), child),
    max_leaves=6,
)


@given(VALUES)
def test_every_value_reads_back(value: Any) -> None:
    node = read_text(f"value: {flow(value)}\n", "x", Problems())
    assert node is not None and node.plain() == {"value": value}


@given(st.text() | st.sampled_from(["no", "on", "Y", "1e-5", "0o7", "~", "null", "4_8", "a: b", "# a", "a b", "- a"]))
def test_strings_stay_strings_for_other_readers(text: str) -> None:
    assert yaml.safe_load(flow(text)) == text
