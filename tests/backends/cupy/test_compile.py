"""Every kernel compiles to machine code for three generations of chips, without a GPU and without a driver."""

from __future__ import annotations

import importlib
import pkgutil
import re
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
