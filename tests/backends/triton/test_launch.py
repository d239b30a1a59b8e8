"""`Launch`: what a compiled kernel is given the second time is what Triton bound the first time."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hot.backends.layouts import cdiv, power_of_2
from hot.backends.triton import launch
from hot.backends.triton.launch import Launch, by_settings


class Kernel:
    """A stub of a Triton kernel: it binds its arguments as Python does, and counts how often it compiled."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.signature = inspect.signature(function)
        self.arg_names = list(self.signature.parameters)
        self.bound: list[tuple[Any, ...]] = []
        self.relaunched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def compile(*args: Any, **kwargs: Any) -> Compiled:
            own = {name: value for name, value in kwargs.items() if name in self.arg_names}
            self.bound.append((grid, *self.signature.bind(*args, **own).args))
            return Compiled(self)

        return compile


class Compiled:
    """What Triton compiled: it is run on a stream, without hooks, with what the kernel was bound to."""

    function, packed_metadata = "a function", "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def run(self, x: int, y: int, z: int, stream: int, function: str, metadata: str, *given: Any) -> None:
        assert (stream, function, metadata, given[:3]) == (7, "a function", "metadata", (None, None, None))
        self.kernel.relaunched.append(((x, y, z), *given[3:]))


def function(x: Any, out: Any, rows: int, columns: int, SECOND: int, FIRST: int) -> None:
    """A kernel's parameters in their order: tensors, numbers, constexprs."""


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)


def test_the_second_launch_gets_what_the_first_was_bound_to() -> None:
    kernel = Kernel(function)
    run = Launch(kernel, 7, (3, 4), FIRST=1, SECOND=2, num_warps=4)
    x, out = torch.zeros(4), torch.zeros(4)
    run(x, out)
    run(x, out)
    assert kernel.bound == [((7, 1, 1), x, out, 3, 4, 2, 1)]
    assert kernel.relaunched == [((7, 1, 1), x.data_ptr(), out.data_ptr(), 3, 4, 2, 1)]


def test_descriptors_go_as_they_are() -> None:
    kernel, descriptor, out = Kernel(function), object(), torch.zeros(4)
    run = Launch(kernel, 7, (3, 4), FIRST=1, SECOND=2)
    run(descriptor, out)
    run(descriptor, out)
    assert kernel.relaunched == [((7, 1, 1), descriptor, out.data_ptr(), 3, 4, 2, 1)]


def test_another_alignment_or_device_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(function)
    run, x = Launch(kernel, 1, (3, 4), FIRST=1, SECOND=2), torch.zeros(8)
    run(x, x)
    run(x[1:], x)
    run(x, x[1:])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    run(x, x)
    assert len(kernel.bound) == 4 and not kernel.relaunched


@pytest.mark.parametrize("module", ["fused", "products", "packing", "quantization", "transforms"])
def test_kernels_take_tensors_then_numbers_then_constants(module: str) -> None:
    for kernel, types, _ in importlib.import_module(f"hot.backends.triton.{module}").SPECIMENS:
        kinds = [
            2 if name.isupper() else int(name not in types or not types[name].startswith(("*", "tensordesc")))
            for name in kernel.arg_names
        ]
        assert kinds == sorted(kinds), kernel.__name__


def test_what_settings_make_is_made_once() -> None:
    made: list[dict[str, int]] = []
    get = by_settings(lambda settings: made.append(settings) or len(made))  # type: ignore[func-returns-value]
    one, same = {"C": 1}, {"C": 1}
    assert [get(one), get(same), get(one), get(same)] == [1, 2, 1, 2] and made == [one, same]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 4095, 4096, 4097])
def test_whole_numbers(n: int) -> None:
    assert power_of_2(n) >= n > power_of_2(n) // 2 and power_of_2(n).bit_count() == 1
    assert all((cdiv(n, by) - 1) * by < n <= cdiv(n, by) * by for by in (1, 2, 3, 16))
