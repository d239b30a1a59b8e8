"""`hot bench kernels`: every kernel has cases, and its figures follow from its time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hot.backends import OPS, Backend, backends, kernels, ops_for, register_backend, register_kernel, table
from hot.bench.cases import Inputs, cases
from hot.bench.kernels import bench, least_bytes
from hot.errors import HotError, UnknownNameError

CPU = torch.device("cpu")


@pytest.fixture
def half() -> Iterator[None]:
    """A throw-away backend whose pack4 takes only codes with as many columns as none of the cases has."""
    register_backend(Backend("half", devices=("cpu",), probe=lambda: (True, "a test")))

    @register_kernel("pack4", backend="half", supports=lambda codes: codes.shape[1] == 6)
    def pack4(codes: Tensor) -> Tensor:
        return ops_for("reference", "cpu").pack4(codes)

    yield
    kernels.remove("half.pack4")
    backends.remove("half")
    table._ready.clear()


def test_every_op_has_cases_that_the_reference_runs() -> None:
    inputs, ops = Inputs(0.02, CPU), ops_for("reference", "cpu")
    for op in OPS:
        made = cases(op, inputs)
        assert made and len({name for name, _ in made}) == len(made), op
        for _, make in made:
            args = make()
            found, promised = getattr(ops, op)(*args), OPS[op].fake(*args)
            for t, fake in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, promised)), strict=True):
                assert (t.shape, t.dtype) == (fake.shape, fake.dtype)


def test_figures_follow_from_the_time() -> None:
    for op in ("quantize", "matmul"):
        for row in bench(["reference"], op, CPU, 0.02, repeats=5, seconds=0.0):
            assert row.reason == "" and row.p20_ms <= row.p50_ms <= row.p80_ms
            if op == "matmul":
                assert row.tflops > 0 and row.vs_torch > 0 and row.gb_per_s is None
            else:
                assert row.gb_per_s == pytest.approx(row.megabytes / row.p50_ms) and 0 < row.vs_copy < 10
                assert row.tflops is None


def test_least_bytes_are_those_of_inputs_and_outputs() -> None:
    codes = torch.zeros(6, 40, dtype=torch.int8)
    assert least_bytes("pack4", [codes]) == 6 * 40 + 6 * 20
    assert least_bytes("quantize", [torch.zeros(6, 40), "int8", "row", 0, "nearest", ()]) == 6 * 40 * 5 + 6 * 4


@pytest.mark.usefixtures("half")
def test_backends_are_timed_side_by_side_and_what_one_refuses_has_a_reason() -> None:
    rows = {row.backend: row for row in bench(["reference", "half"], "pack4", CPU, 0.02, repeats=5, seconds=0.0)}
    assert rows["half"].reason == "the kernel does not take these arguments" and rows["half"].p50_ms is None
    assert rows["reference"].p50_ms > 0
    with pytest.raises(HotError, match="nothing to time: backend half has no kernel for op matmul"):
        bench(["half"], "matmul", CPU)


def test_wrong_names_and_sizes() -> None:
    with pytest.raises(UnknownNameError, match="unknown op 'pack5', did you mean 'pack4'"):
        bench([], "pack5", CPU)
    with pytest.raises(UnknownNameError, match="unknown backend 'abacus'"):
        bench(["abacus"], None, CPU)
    with pytest.raises(HotError, match="--size -1 must be above 0"):
        bench([], None, CPU, -1)
