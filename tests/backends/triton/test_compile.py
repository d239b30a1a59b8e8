"""Every kernel compiles to machine code for three generations of chips, without a GPU and without a driver."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import hot.backends.triton as package

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

CHIPS = (80, 90, 100)


def specimens() -> list[Any]:
    """The SPECIMENS of every module of the backend, by name."""
    found = []
    for module in pkgutil.iter_modules(package.__path__):
        made = getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "SPECIMENS", [])
        found += [pytest.param(*one, id=f"{one[0].__name__}-{number}") for number, one in enumerate(made)]
    return found


def kernels() -> set[Any]:
    """The functions that are launched: those that are called a kernel."""
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    found = [one for module in modules for name, one in vars(module).items() if name.endswith("_kernel")]
    return {one for one in found if isinstance(one, triton.JITFunction)}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], chip: int) -> Any:
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(kernel.arg_names) if signature[name][:1] == "*"}
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", chip, 32))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("kernel", "types", "constants"), specimens())
def test_compiles(kernel: Any, types: dict[str, str], constants: dict[str, Any], chip: int) -> None:
    if chip < 89 and any("fp8e4nv" in str(value) for value in (*types.values(), *constants.values())):
        pytest.skip(f"sm_{chip} has no float8 e4m3")
    made = compiled(kernel, types, constants, chip)
    assert made.asm["cubin"] and made.metadata.shared <= 99 * 1024
    assert not re.search(r"(add|sub|mul|fma|div\.\w+|min|max)\.ftz", made.asm["ptx"])  # denormals are kept


@pytest.mark.parametrize(("kernel", "types", "constants"), specimens())
def test_compiles_where_every_size_and_stride_is_one(
    kernel: Any, types: dict[str, str], constants: dict[str, Any]
) -> None:
    """Triton makes a constant of a 1, and a constant has not all that a number has."""
    ones = {name: 1 for name, kind in types.items() if kind == "i32"}
    assert compiled(kernel, types, {**constants, **ones}, 90).asm["cubin"]


def test_no_kernel_is_without_a_specimen() -> None:
    tried = {one.values[0] for one in specimens()}
    assert tried and {one.__name__ for one in kernels() - tried} == set()
