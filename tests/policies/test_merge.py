"""The merge law: field by field, later wins, another kind replaces its block whole, marks survive."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hot.policies.merge import merge
from hot.policies.yaml_source import Node, Problems, from_python


def node(data: Any, path: str = "") -> Node:
    return from_python(data, Problems(), path)


def merged(*layers: Any) -> Any:
    result = node(layers[0])
    for layer in layers[1:]:
        result = merge(result, node(layer))
    return result.plain()


def test_field_by_field_and_later_wins() -> None:
    block = {"kind": "int", "bits": 4}
    assert merged({"a": block, "b": 1}, {"a": {"bits": 8}}, {"a": {"rounding": "hashed"}}) == {
        "a": {"kind": "int", "bits": 8, "rounding": "hashed"},
        "b": 1,
    }


def test_the_same_kind_keeps_the_other_fields_and_another_one_drops_them() -> None:
    assert merged({"kind": "int", "bits": 4}, {"kind": "int"}) == {"kind": "int", "bits": 4}
    assert merged({"kind": "int", "bits": 4}, {"kind": "luq"}) == {"kind": "luq"}
    inner = {"kind": "quantized", "quantizer": {"kind": "int", "bits": 4}}
    assert merged({"b": inner}, {"b": {"quantizer": {"kind": "luq"}}}) == {
        "b": {"kind": "quantized", "quantizer": {"kind": "luq"}}
    }


def test_a_list_and_a_null_replace() -> None:
    assert merged({"a": [1, 2], "b": 3}, {"a": [4], "b": None}) == {"a": [4], "b": None}


def test_changing_a_kind_there_and_back_forgets_the_fields() -> None:
    # Why layers are merged one by one: the last two merged beforehand would say {kind: a} and keep p.
    assert merged({"kind": "a", "p": 1}, {"kind": "b"}, {"kind": "a"}) == {"kind": "a"}
    assert merge(node({"kind": "a", "p": 1}), merge(node({"kind": "b"}), node({"kind": "a"}))).plain() != {"kind": "a"}


def test_every_value_keeps_its_mark_and_the_latest_comes_last() -> None:
    result = merge(node({"kind": "int", "bits": 4, "seed": 1}, "base"), node({"bits": 8}, "over"))
    assert {key: child.mark.path for key, child in result.value.items()} == {
        "kind": "base.kind",
        "seed": "base.seed",
        "bits": "over.bits",
    }
    assert list(result.value)[-1] == "bits" and result.mark.path == "over"


KEYS = st.sampled_from("abc")
TREES = st.dictionaries(
    KEYS, st.recursive(st.integers(0, 3), lambda t: st.dictionaries(KEYS, t, max_size=3)), max_size=3
)
KINDED = st.fixed_dictionaries(
    {"kind": st.sampled_from("xy")}, optional={"p": st.integers(0, 3), "q": st.integers(0, 3)}
)


@given(TREES, TREES)
def test_later_wins_and_nothing_is_lost(base: dict[str, Any], over: dict[str, Any]) -> None:
    result = merged(base, over)
    assert result.keys() == base.keys() | over.keys()
    for key in result:
        both_maps = isinstance(base.get(key), dict) and isinstance(over.get(key), dict)
        expected = merged(base[key], over[key]) if both_maps else over.get(key, base.get(key))
        assert result[key] == expected


@given(TREES)
def test_nothing_and_itself_change_nothing(tree: dict[str, Any]) -> None:
    assert merged(tree, {}) == merged({}, tree) == merged(tree, tree) == tree


def same_shape(a: Any, b: Any, c: Any) -> bool:
    """Whether no two of the trees have a mapping and a scalar at one place."""
    present = [tree for tree in (a, b, c) if tree is not None]
    if not all(isinstance(tree, dict) for tree in present):
        return not any(isinstance(tree, dict) for tree in present)
    return all(same_shape(*((tree or {}).get(key) for tree in (a, b, c))) for tree in present for key in tree)


@given(TREES, TREES, TREES)
def test_is_associative_where_no_block_is_replaced(a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]) -> None:
    if same_shape(a, b, c):
        assert merge(merge(node(a), node(b)), node(c)) == merge(node(a), merge(node(b), node(c)))


@given(KINDED, KINDED)
def test_a_block_never_mixes_two_kinds(base: dict[str, Any], over: dict[str, Any]) -> None:
    expected = {**base, **over} if base["kind"] == over["kind"] else over
    assert merged(base, over) == expected
