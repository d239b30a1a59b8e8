"""Every kernel compiles to machine code for three generations of chips, without a GPU and without a driver."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy_backends", reason="cupy is not installed")

import hot.backends.cupy as package
from hot.backends.cupy import compile
from hot.backends.cupy.launch import Kernel
from hot.errors import BackendError

try:
    from cupy_backends.cuda.libs import nvrtc

    nvrtc.getVersion()
except Exception as error:  # whatever CuPy raises where the library is not to be found
    pytest.skip(f"no NVRTC: {error}", allow_module_level=True)

CHIPS = (80, 90, 100)
SPILLED = 128
"""So many bytes of a thread's numbers may have no register."""
FUSED = ("operands.cu", "transforms.cu")
"""They say where a product and a sum are one operation."""


def specimens() -> list[Any]:
    """The SPECIMENS of every module of the backend, by name."""
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    found = [one for module in modules for one in getattr(module, "SPECIMENS", [])]
    return [pytest.param(one, id=f"{one.source}-{number}") for number, one in enumerate(found)]


def built(kernel: Kernel, *options: str) -> tuple[compile.Code, str]:
    return compile.build(kernel.source, kernel.name, compile.size_of(kernel.layout), (*compile.OPTIONS, *options))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kernel", specimens())
def test_compiles(kernel: Kernel, chip: int) -> None:
    """To code that keeps nearly everything in registers."""
    if chip < 89 and "E4M3" in kernel.name:
        pytest.skip(f"sm_{chip} has no float8 e4m3")
    code, log = built(kernel, compile._architecture(divmod(chip, 10)), "--ptxas-options=-v")
    assert code.image and code.name
    assert "warning" not in log
    assert max(int(bytes) for bytes in re.findall(r"(\d+) bytes spill", log)) <= SPILLED, log


@pytest.mark.parametrize("kernel", specimens())
def test_rounds_every_operation_by_itself(kernel: Kernel) -> None:
    """Denormals are kept, divisions are IEEE's, and no product is contracted with a sum, but where the source says so."""
    code, _ = built(kernel, "-arch=compute_80")
    assert not re.search(rb"\.ftz|div\.(approx|full)|rcp\.approx", code.image)
    assert kernel.source in FUSED or not re.search(rb"fma\.rn\.f(32|64)", code.image)


def test_no_kernel_is_without_a_specimen() -> None:
    tried = {(one.values[0].source, one.values[0].name.split("<")[0]) for one in specimens()}
    written = {
        (path.name, name)
        for path in compile.FOLDER.glob("*.cu")
        for name in re.findall(r"__global__[^;{]*?(\w+_kernel)\(", path.read_text())
    }
    assert tried == written


def test_what_does_not_compile_is_shown() -> None:
    """File, line and what stands there, of an error in a header that a kernel includes too."""
    with pytest.raises(
        BackendError, match=r"numbers\.cuh:\d+: invalid type conversion\n    return static_cast<T>\(x\);"
    ):
        compile.build("products.cu", "rescale_kernel<decltype(nullptr)>", 72, (*compile.OPTIONS, "-arch=sm_90"))
    with pytest.raises(BackendError, match='identifier "flot" is undefined'):
        compile.build("products.cu", "rescale_kernel<flot>", 72, (*compile.OPTIONS, "-arch=sm_90"))
    with pytest.raises(BackendError, match="the layout is not that of the struct"):
        compile.build("products.cu", "rescale_kernel<float>", 64, (*compile.OPTIONS, "-arch=sm_90"))


OWN = """#include "memory.cuh"
#include "parts/one.cuh"
struct Params { long long* out; };
__global__ void own_kernel(Params p) { *p.out = ceil_div(ONE + TWO, 2); }
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A source of one's own, with a header of HOT's, one beside it and one in a folder, which includes the other."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/one.cuh").write_text('#include "two.cuh"\n#define ONE 1\n')
    (tmp_path / "two.cuh").write_text("#define TWO 2\n")
    (tmp_path / "numbers.cuh").write_text("#error not for HOT's memory.cuh\n")
    (tmp_path / "own.cu").write_text(OWN)
    return tmp_path / "own.cu"


def compiled(path: Path) -> compile.Code:
    return compile.compiled(path, "own_kernel", 8, (9, 0))


def test_a_source_of_ones_own(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once, and again when it or anything that it includes has changed."""
    monkeypatch.setenv("HOT_CACHE", str(own.parent / "cache"))
    built: list[Path] = []
    real = compile.build
    monkeypatch.setattr(compile, "build", lambda source, *rest: built.append(source) or real(source, *rest))
    first = compiled(own)
    assert first.image and compiled(own) == first and len(built) == 1
    (own.parent / "unrelated.cuh").write_text("#define TWO 9\n")
    assert compiled(own) == first and len(built) == 1
    for number, name in enumerate(("own.cu", "parts/one.cuh", "two.cuh"), start=2):
        path = own.parent / name
        path.write_text(path.read_text() + f"// {name}\n")
        assert compiled(own).name == first.name and len(built) == number
    (own.parent / "two.cuh").write_text("#define TWO 9\n")
    assert compiled(own).image != first.image


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("own.cu", "*p.out", "*p.in", r'own\.cu:4: class "Params" has no member "in"\n    __global__ void own_kernel'),
        (
            "two.cuh",
            "#define TWO",
            "flot two;\n#define TWO",
            r'two\.cuh:1: identifier "flot" is undefined\n    flot two;',
        ),
        (
            "own.cu",
            "memory.cuh",
            "memories.cuh",
            r'own\.cu:1: cannot open source file "memories\.cuh"\n    #include "mem',
        ),
        ("own.cu", "own_kernel", "other", r'the launcher of own\.cu:2: identifier "own_kernel" is undefined'),
        ("own.cu", "out;", "out, *in;", r"the launcher of own\.cu:2: .*the layout is not that of the struct"),
    ],
)
def test_a_mistake_of_ones_own_is_shown(own: Path, name: str, old: str, new: str, message: str) -> None:
    path = own.parent / name
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BackendError, match=f"own_kernel does not compile: {message}"):
        compiled(own)


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"own_kernel does not compile: .*nowhere\.cu: No such file"):
        compiled(tmp_path / "nowhere.cu")
