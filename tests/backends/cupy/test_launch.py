"""`Kernel`: what the driver is handed, by a stub of it."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hot.backends.cupy import launch
from hot.backends.cupy.compile import Code, size_of
from hot.backends.cupy.launch import Kernel
from hot.errors import BackendError

LAYOUT = "@QiQf"


class Driver(ModuleType):
    """A stub of cupy_backends.cuda.api.driver that notes what it is asked for."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self) -> None:
        super().__init__("driver")
        self.loads: list[bytes] = []
        self.launches: list[tuple[Any, ...]] = []
        self.attributes: list[tuple[int, ...]] = []
        self.context, self.refuses = 7, False

    def ctxGetCurrent(self) -> int:
        return self.context

    def ctxSetCurrent(self, context: int) -> None:
        self.context = context

    def moduleLoadData(self, image: bytes) -> int:
        self.loads.append(image)
        return 1

    def moduleGetFunction(self, module: int, name: str) -> int:
        return 100 + len(self.loads)

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.attributes.append((function, attribute, value))

    def launchKernel(self, function: int, *rest: int) -> None:
        *numbers, stream, table, extra = rest
        if self.refuses or not self.context:
            raise RuntimeError("the driver says no")
        assert extra == 0
        address = ctypes.c_void_p.from_address(table).value
        assert address is not None and address % 8 == 0
        values = struct.unpack(f"{LAYOUT}0Q", ctypes.string_at(address, size_of(LAYOUT)))
        self.launches.append((function, tuple(numbers), stream, values))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    api = ModuleType("api")
    api.driver = made  # type: ignore[attr-defined]
    for name, module in (
        ("cupy_backends", ModuleType("c")),
        ("cupy_backends.cuda", ModuleType("c")),
        ("cupy_backends.cuda.api", api),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    monkeypatch.setattr(launch, "_current_stream", lambda device: 50 + device)
    monkeypatch.setattr(launch, "_harmless_to_captures", nullcontext)
    monkeypatch.setattr(launch, "compiled", lambda source, name, size, capability: Code("mangled", b"code"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return made


def test_a_struct_by_value_on_the_current_stream(driver: Driver) -> None:
    kernel = Kernel("some.cu", "some_kernel", ("float", "3"), LAYOUT)
    kernel(5, (32, 4), 2**40, -1, 2**63, 0.5, shared=0)
    kernel((1, 2, 3), 64, 1, 2, 3, 4.0)
    assert driver.launches == [
        (101, (5, 1, 1, 32, 4, 1, 0), 50, (2**40, -1, 2**63, 0.5)),
        (101, (1, 2, 3, 64, 1, 1, 0), 50, (1, 2, 3, 4.0)),
    ]
    assert driver.loads == [b"code"] and repr(kernel) == "some.cu: some_kernel<float, 3>"


def test_a_file_of_ones_own_is_where_it_was(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is that of the folder in which it was said, whatever the folder of the first launch."""
    asked: list[object] = []
    monkeypatch.setattr(launch, "compiled", lambda source, *rest: asked.append(source) or Code("mangled", b"code"))
    monkeypatch.chdir(tmp_path)
    kernel = Kernel(Path("mine.cu"), "some_kernel", (), LAYOUT)
    monkeypatch.chdir("/")
    kernel(1, 1, 1, 2, 3, 4.0)
    assert asked == [tmp_path / "mine.cu"] and repr(kernel) == f"{tmp_path / 'mine.cu'}: some_kernel"


def test_every_device_has_its_own(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("some.cu", "some_kernel", (), LAYOUT)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(launch, "_current_device", lambda device=device: device)
        kernel(1, 1, 1, 2, 3, 4.0)
    assert [(function, stream) for function, _, stream, _ in driver.launches] == [(101, 50), (102, 51)] * 2


def test_shared_memory_is_asked_for_once(driver: Driver) -> None:
    kernel = Kernel("some.cu", "some_kernel", (), LAYOUT)
    for shared in (0, 1000, 500, 70_000, 1000):
        kernel(1, 1, 1, 2, 3, 4.0, shared=shared)
    assert driver.attributes == [(101, 8, 1000), (101, 8, 70_000)]
    assert [numbers[-1] for _, numbers, _, _ in driver.launches] == [0, 1000, 500, 70_000, 1000]


def test_a_thread_that_has_no_context_yet(driver: Driver) -> None:
    kernel = Kernel("some.cu", "some_kernel", (), LAYOUT)
    kernel.load()
    driver.context = 0
    kernel(1, 1, 1, 2, 3, 4.0)
    assert driver.context == 7 and len(driver.launches) == 1


def test_what_the_driver_refuses_is_said(driver: Driver) -> None:
    kernel, driver.refuses = Kernel("some.cu", "some_kernel", (), LAYOUT), True
    with pytest.raises(
        BackendError, match=r"some\.cu: some_kernel was not launched with grid 3, block 2048.*the driver says no"
    ):
        kernel(3, 2048, 1, 2, 3, 4.0)


def test_threads_do_not_share_parameters(driver: Driver) -> None:
    kernel = Kernel("some.cu", "some_kernel", (), LAYOUT)

    def many(thread: int) -> None:
        for number in range(500):
            kernel(thread + 1, 32, number, thread, number, 1.0)

    threads = [threading.Thread(target=many, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.loads) == 1 and len(driver.launches) == 2000
    assert all(values == (values[0], numbers[0] - 1, values[0], 1.0) for _, numbers, _, values in driver.launches)
