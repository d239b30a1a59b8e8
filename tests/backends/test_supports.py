"""What a kernel is asked before it is called: by the compiler too, whose tensors have a shape and no memory."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hot.backends import OPS, backends, devices, kernels
from hot.checking import cases
from hot.checking.runner import ONE_DTYPE
from hot.checking.sources import DTYPES, LAYOUTS

CPU = torch.device("cpu")


def without_memory(value: Any) -> Any:
    """A tensor of the same layout on a GPU that is not there."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return value


@pytest.mark.parametrize("backend", ["triton", "cupy"])
@pytest.mark.parametrize("op", OPS)
def test_kernels_are_asked_without_memory(backend: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    backends[backend].load()
    if f"{backend}.{op}" not in kernels:
        pytest.skip(f"{backend} has no kernel for {op}")
    monkeypatch.setattr(devices, "_capabilities", {0: (9, 0)})
    monkeypatch.setattr(devices, "_multiprocessors", lambda index: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("hot.backends.float8._rows_of_tiles", lambda device: "padded")
    answers = set()
    for dtype in DTYPES[:1] if op in ONE_DTYPE else DTYPES:
        for layout in LAYOUTS:
            for case in cases(op, dtype, layout, CPU):
                with FakeTensorMode(), warnings.catch_warnings():
                    warnings.simplefilter("error")  # reading an address is no more than warned of
                    answers.add(kernels[f"{backend}.{op}"].supports(*map(without_memory, case.args.values())))
    assert True in answers and answers <= {True, False}


def test_the_compiler_can_ask_for_a_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word: what it cannot see through it warns of, or leaves the graph for."""
    monkeypatch.setattr(devices, "_capabilities", {0: (9, 0), 1: (8, 0)})

    def f(x: Tensor, device: torch.device) -> Tensor:
        return x * 2 if devices.has_fp8(device) else x

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [compiled(torch.ones(()), torch.device("cuda", index)).item() for index in (0, 1)] == [2, 1]
