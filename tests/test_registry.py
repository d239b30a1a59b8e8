"""Registries: names, suggestions, plug-ins from files and from installed packages."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from hot import registry as module
from hot.errors import HotError, UnknownNameError
from hot.policies.quantizers import quantizers
from hot.policies.transforms import transforms
from hot.registry import Registry, load_plugin_file

EXAMPLE = Path(__file__).parent / "example_plugin"


@pytest.fixture
def fruits() -> Registry[str]:
    registry: Registry[str] = Registry("fruit")
    for name in ("apple", "apricot", "pear"):
        registry.register(name)(name.upper())
    return registry


def test_look_up_and_query(fruits: Registry[str]) -> None:
    assert fruits["pear"] == "PEAR"
    assert list(fruits) == ["apple", "apricot", "pear"]
    assert fruits.names("ap*") == ["apple", "apricot"]
    assert "pear" in fruits and "plum" not in fruits


def test_an_unknown_name_lists_the_known_ones_and_suggests(fruits: Registry[str]) -> None:
    with pytest.raises(UnknownNameError) as error:
        fruits["appel"]
    assert str(error.value) == "unknown fruit 'appel', did you mean 'apple'? Known: apple, apricot, pear"
    with pytest.raises(KeyError, match=r"unknown fruit 'zzz'\. Known"):
        fruits["zzz"]


def test_a_name_is_registered_once(fruits: Registry[str]) -> None:
    with pytest.raises(HotError, match="fruit 'pear' is registered already"):
        fruits.register("pear")("another")
    assert fruits["pear"] == "PEAR"
    assert fruits.remove("pear") == "PEAR"
    assert fruits.register("pear")("another") == "another"


GOOD = """
from hot.policies.quantizers import Int, register_quantizer

@register_quantizer('test_mine')
class Mine(Int): ...
"""


def test_a_plugin_file_is_loaded_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    load_plugin_file(path)
    load_plugin_file(tmp_path / ".." / tmp_path.name / "mine.py")
    assert quantizers.remove("test_mine").kind == "test_mine"


def test_a_plugin_file_that_fails_registers_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD + "raise RuntimeError('half way')\n")
    with pytest.raises(HotError, match=r"mine\.py failed to import: RuntimeError: half way"):
        load_plugin_file(path)
    assert "test_mine" not in quantizers
    path.write_text(GOOD)
    load_plugin_file(path)
    assert quantizers.remove("test_mine").kind == "test_mine"


def test_what_a_failing_plugin_imported_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_helper_of_plugin.py").write_text(GOOD)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "mine.py"
    path.write_text("import test_helper_of_plugin\nimport does_not_exist\n")
    with pytest.raises(HotError, match="does_not_exist"):
        load_plugin_file(path)
    assert quantizers.remove("test_mine").kind == "test_mine"


def test_a_plugin_must_be_python(tmp_path: Path) -> None:
    with pytest.raises(HotError, match="not a Python file"):
        load_plugin_file(tmp_path / "mine.txt")


def entry_point(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, module.ENTRY_POINT_GROUP)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[importlib.metadata.EntryPoint]:
    """The entry points that registries find, not loaded yet."""
    found: list[importlib.metadata.EntryPoint] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    monkeypatch.setattr(module, "_loaded", False)
    monkeypatch.setattr(module, "failed_plugins", {})
    return found


def test_a_broken_plugin_is_named_and_stops_nobody(
    installed: list[importlib.metadata.EntryPoint], fruits: Registry[str]
) -> None:
    installed.append(entry_point("broken", "does_not_exist_either"))
    assert fruits["pear"] == "PEAR"  # known already: nothing is loaded
    assert not module.failed_plugins
    assert fruits.names("a*") == ["apple", "apricot"]
    assert list(module.failed_plugins) == ["broken"]
    with pytest.raises(UnknownNameError, match="plug-in broken failed to import: ModuleNotFoundError"):
        fruits["plum"]


def run_with_example(folder: Path, code: str) -> str:
    """Run code in a process of its own that has the example plug-in installed."""
    command = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", *command, str(EXAMPLE)], check=True, capture_output=True, timeout=120)
    setup = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    result = subprocess.run(
        [sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_an_installed_package_adds_its_own(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    assert "ternary" not in quantizers and "haar" not in transforms
    code = """
import torch
import hot.policies.quantizers as q, hot.policies.transforms as t
from hot.backends import ops_for
from hot.checking import check
from hot.executor import linear
from hot.policies.plan import GradWeightPlan, LayerPlan

ternary, haar = q.quantizers["ternary"](), t.transforms["haar"](block=4)
exact = torch.eye(4, dtype=torch.float64)
assert torch.allclose(haar.matrix() @ haar.matrix().T, exact), "the rows are orthonormal"
x, w = torch.randn(8, 4), torch.randn(3, 4, requires_grad=True)
linear(x, w, None, LayerPlan(grad_weight=GradWeightPlan(haar, ternary, ternary))).sum().backward()
assert w.grad.isfinite().all()
rows = check(backend="example")
assert {row.op for row in rows} == {"pack4"} and all(row.ok and row.cases for row in rows), rows
assert torch.equal(ops_for("auto", "cpu").pack4(torch.tensor([[1, 2]], dtype=torch.int8)), torch.tensor([[33]]).byte())
print(ops_for("auto", "cpu").serving("pack4"))
"""
    assert run_with_example(tmp_path, code).split() == ["example"]
