"""YAML 1.2 core scalars, marks, and files that are no policy at all."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hot.errors import PolicyError
from hot.policies.schema import load_policy
from hot.policies.transforms import Hadamard
from hot.policies.yaml_source import MAX_BYTES, Mark, Problems, core_scalar, from_python, read_yaml

SCALARS = {
    "1e-5": 1e-5, "1.": 1.0, ".5": 0.5, "+1.5E+3": 1500.0, "-.inf": -math.inf, ".Inf": math.inf, "0": 0, "-17": -17,
    "007": 7, "0o17": 15, "0xfF": 255, "true": True, "False": False, "TRUE": True, "null": None, "~": None, "": None,
    "no": "no", "Off": "Off", "y": "y", "4_8": "4_8", "12:30": "12:30", "2024-01-01": "2024-01-01", "0b1": "0b1",
    "1e": "1e", ".": ".", "+": "+", "inf": "inf", "-.nan": "-.nan", "tRue": "tRue", "١": "١", "1 ": "1 ",
}  # fmt: skip


@pytest.mark.parametrize("text", SCALARS)
def test_core_scalar(text: str) -> None:
    value = core_scalar(text)
    assert value == SCALARS[text] and type(value) is type(SCALARS[text])


def test_nan_is_a_number() -> None:
    assert math.isnan(core_scalar(".nan"))


@given(st.integers() | st.floats(allow_nan=False))
def test_a_number_reads_back(number: float) -> None:
    text = repr(number).replace("inf", ".inf")
    assert core_scalar(text) == number and type(core_scalar(text)) is type(number)


def read(text: str, folder: Path) -> Any:
    problems = Problems()
    path = folder / "a.yaml"
    path.write_bytes(text.encode())
    node = read_yaml(path, problems)
    problems.raise_any()
    assert node is not None
    return node


def test_values_keep_their_place(tmp_path: Path) -> None:
    root = read("a: 1\nb:\n  - x\n  - {c: 'é', d: 2}\n", tmp_path)
    file = str(tmp_path / "a.yaml")
    inner = root.value["b"].value[1].value["d"]
    assert inner.mark == Mark("b[1].d", file, 4, 17) and inner.key == Mark("b[1].d", file, 4, 14)
    assert str(inner.mark) == f"{file}:4:17 b[1].d" and inner.mark.place == f"{file}:4"
    assert root.plain() == {"a": 1, "b": ["x", {"c": "é", "d": 2}]}


def test_quotes_make_strings_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    root = read('\ufeffa: "1"\nb: |\n  true\n', tmp_path)
    assert root.plain() == {"a": "1", "b": "true\n"}


def test_an_alias_repeats_a_value(tmp_path: Path) -> None:
    assert read("a: &x {k: [1, 2]}\nb: *x\n", tmp_path).plain() == {"a": {"k": [1, 2]}, "b": {"k": [1, 2]}}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.characters(categories=["L", "N", "P", "Zs"])),
        lambda child: st.lists(child, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), child),
        max_leaves=8,
    )
)
def test_reads_what_a_dumper_of_explicit_strings_wrote(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    class Quoted(yaml.SafeDumper):
        pass

    Quoted.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))
    data = {"value": value}
    assert read(yaml.dump(data, Dumper=Quoted, allow_unicode=True), tmp_path_factory.getbasetemp()).plain() == data


def test_python_data_has_paths_for_marks() -> None:
    problems = Problems()
    node = from_python({"a": [1, {"b": Hadamard(block=8)}], "p": Path("x"), "t": (1, 2)}, problems)
    assert node.value["a"].value[1].value["b"].value["block"].mark == Mark("a[1].b.block")
    assert node.plain()["p"] == "x" and node.plain()["t"] == [1, 2] and not len(problems)
    from_python({"a": {1: 2}, "b": [{3}]}, problems)
    with pytest.raises(PolicyError) as caught:
        problems.raise_any()
    assert caught.value.problems == ("a: keys must be strings, not 1", "b[0]: a set cannot stand in a policy: {3}")


NO_POLICY = {
    "binary": (b"\x93NUMPY\x00\x01", "is binary: there is a NUL byte at offset 6"),
    "latin-1": ("defaults: {} # é".encode("latin-1"), "is not UTF-8 text: byte 0xe9 at offset 15"),
    "huge": (b"#" * (MAX_BYTES + 1), "is larger than 1 MiB"),
    "many values": (b"rules: [" + b"1," * 30_000 + b"]", "more than 20000 values"),
}


@pytest.mark.parametrize("name", NO_POLICY)
def test_what_is_no_policy_is_named(name: str, tmp_path: Path) -> None:
    data, message = NO_POLICY[name]
    path = tmp_path / "p.yaml"
    path.write_bytes(data)
    with pytest.raises(PolicyError) as caught:
        load_policy(path)
    assert len(caught.value.problems) == 1 and message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_folder_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="is a directory; name a file in it"):
        load_policy(tmp_path)
    (tmp_path / "mine.yaml").write_text("version: 1")
    with pytest.raises(
        PolicyError, match=r"no preset and no file .*mien.yaml', did you mean '.*mine.yaml'\?; presets: e"
    ):
        load_policy(tmp_path / "mien.yaml")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1")
    path.chmod(0)
    with pytest.raises(PolicyError, match="cannot be read: Permission denied"):
        load_policy(path)
