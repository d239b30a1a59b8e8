"""The check table: it passes for what is right, on every device, and catches kernels that are broken on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hot.backends import OPS, ops_for, table
from hot.backends.table import Backend, backends, kernels, register_backend, register_kernel
from hot.checking import check, find_case, oracles, register_cases
from hot.checking.cases import generators
from hot.errors import BackendError, HotError, UnknownNameError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
reference = ops_for("reference", "cpu")


@pytest.fixture(autouse=True)
def _needs_cuda(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def broken() -> Iterator[str]:
    """A throw-away backend on the CPU; gone after the test with its kernels."""
    register_backend(Backend("broken", devices=("cpu",), probe=lambda: (True, "a test")))
    yield "broken"
    for name in kernels.names("broken.*"):
        kernels.remove(name)
    backends.remove("broken")
    table._ready.clear()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", sorted(OPS))
def test_every_kernel_means_its_op(op: str, device: str) -> None:
    for backend in backends:
        if device not in backends[backend].devices or not backends[backend].availability()[0]:
            continue
        ops_for(backend, device)
        if backend != "reference" and f"{backend}.{op}" not in kernels:
            continue
        rows = check(backend, op, device)
        assert [row.failure for row in rows if not row.ok] == []
        assert {row.layout for row in rows} == {"contiguous", "transposed", "sliced", "expanded"}
        if backend == "reference":
            assert min(row.cases for row in rows) > 5 and not any(row.skipped for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["hadamard", "quantize", "pack4", "transform_quantize", "matmul"])
def test_more_than_2_to_the_31_elements(op: str) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    for row in check(None, op, "cuda", large=True):
        assert row.layout != "large" or row.ok, row.failure


Patch = Callable[..., Any]


def truncating(x: Tensor, format: str, granularity: str, group: int, *how: Any) -> tuple[Tensor, Tensor]:
    codes, scale = reference.quantize(x, format, granularity, group, *how)
    spread = scale.repeat_interleave(group, 1)[:, : x.shape[1]] if group else scale
    return ((x / spread).nan_to_num(0.0).trunc().to(codes.dtype) if format.startswith("int") else codes), scale


def wrong_scale(*args: Any) -> tuple[Tensor, Tensor]:
    codes, scale = reference.quantize(*args)
    return codes, scale * 1.001


def one_scale_too_fine(*args: Any) -> tuple[Tensor, Tensor]:
    codes, scale = reference.quantize(*args)
    return codes, scale.nextafter(torch.tensor(torch.inf))


def nan_dropped(x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return reference.quantize(x.nan_to_num(0.0), *how)


def noise_of_another_row(x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    if how[3] != "hashed" or not x.numel():
        return reference.quantize(x, *how)
    return reference.quantize(x.flip(0), *how)[0].flip(0), reference.quantize(x, *how)[1]


def ignoring_strides(x: Tensor, *how: Any) -> Tensor:
    return reference.hadamard(x.as_strided(x.shape, torch.empty(x.shape).stride()).clone(), *how)


def unnormalized(x: Tensor, block: int) -> Tensor:
    return reference.hadamard(x, block) * block**0.5


def in_bfloat16(x: Tensor, block: int) -> Tensor:
    return reference.hadamard(x.bfloat16(), block).to(x.dtype if x.dtype == torch.float64 else torch.float32)


def ignoring_the_tail(x: Tensor, *how: Any) -> Tensor:
    got = reference.project(x, *how).clone()
    block, prefix = how[0], how[3]
    if (x.shape[-1] - prefix) % block and got.shape[-1]:
        got[..., -1] = 0
    return got


def ignoring_the_signs(x: Tensor, block: int, rows: Any, signs: Any, *how: Any) -> Tensor:
    return reference.project(x, block, rows, (), *how)


def natural_order(c: Tensor, length: int, block: int, rows: Any, *how: Any) -> Tensor:
    return reference.expand(c, length, block, range(len(rows)), *how)


def halves_swapped(codes: Tensor) -> Tensor:
    packed = reference.pack4(codes)
    return packed << 4 | packed >> 4


def without_sign(packed: Tensor, length: int) -> Tensor:
    return reference.unpack4(packed, length) & 15


def group_off_by_one(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    return reference.dequantize(codes, scale.flip(1), group, dtype)


def saturating(a: Tensor, a_scale: Tensor, a_group: int, b: Tensor, *rest: Any) -> Tensor:
    return reference.matmul(a.clamp(-126, 126) if a.dtype == torch.int8 else a, a_scale, a_group, b, *rest)


def last_bit_lost(*args: Any) -> Tensor:
    return reference.matmul(*args[:-1], torch.float32).bfloat16().to(args[-1])


def truncating_behind_a_transform(x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    y = reference.project(x, *how[:6]).flatten(1) if how[0] > 1 else x.flatten(1).float()
    return truncating(y, *how[6:])


def bias_always(*args: Any) -> tuple[Tensor, ...]:
    return reference.grad_output_operands(*args[:-1], True)


def rounded_bias(*args: Any) -> tuple[Tensor, ...]:
    *operands, bias = reference.grad_output_operands(*args)
    return (*operands, (bias * 1.01).to(bias.dtype))


BROKEN: list[tuple[str, Patch, str]] = [
    ("quantize", truncating, "codes"),
    ("quantize", wrong_scale, "scale"),
    ("quantize", one_scale_too_fine, "scale"),
    ("quantize", nan_dropped, "scale"),
    ("quantize", noise_of_another_row, "codes"),
    ("hadamard", ignoring_strides, "hadamard"),
    ("hadamard", unnormalized, "hadamard"),
    ("hadamard", in_bfloat16, "hadamard"),
    ("project", ignoring_the_tail, "project"),
    ("project", ignoring_the_signs, "project"),
    ("expand", natural_order, "expand"),
    ("pack4", halves_swapped, "bytes"),
    ("unpack4", without_sign, "codes"),
    ("dequantize", group_off_by_one, "dequantize"),
    ("matmul", saturating, "product"),
    ("matmul", last_bit_lost, "product"),
    ("transform_quantize", truncating_behind_a_transform, "codes"),
    ("grad_output_operands", bias_always, "returns"),
    ("grad_output_operands", rounded_bias, "grad_bias"),
]


@pytest.mark.parametrize(("op", "kernel", "what"), BROKEN, ids=[kernel.__name__ for _, kernel, _ in BROKEN])
def test_a_broken_kernel_is_caught(broken: str, op: str, kernel: Patch, what: str) -> None:
    def fresh(*args: Any) -> Any:  # a custom op must not return its arguments
        got = kernel(*args)
        return got.clone() if isinstance(got, Tensor) else tuple(t.clone() for t in got)

    register_kernel(op, backend=broken)(fresh)
    failed = [row for row in check(broken, op, "cpu") if not row.ok]
    assert failed
    case = find_case(failed[0].failure.split(" ", 1)[0])
    assert str(case) in failed[0].failure
    assert what in failed[0].failure.removeprefix(str(case))


def test_a_kernel_may_refuse_and_may_raise(broken: str) -> None:
    register_kernel("pack4", backend=broken, supports=lambda codes: codes.shape[1] % 2 == 0)(
        lambda codes: reference.pack4(codes) if codes.shape[0] != 4 else 1 / 0
    )
    rows = check(broken, "pack4")
    assert all(row.cases and row.skipped and not row.ok for row in rows)
    assert all("raised ZeroDivisionError" in row.failure and math.isinf(row.error) for row in rows)


def test_the_random_state_and_the_precision_are_left_as_they_were() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    torch.set_float32_matmul_precision("high")
    try:
        assert all(row.ok for row in check("reference", "hadamard", "cpu"))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(torch.rand(3), expected)


def test_what_cannot_be_checked_is_an_error(broken: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown op 'quantise', did you mean 'quantize'"):
        check(op="quantise")
    with pytest.raises(UnknownNameError, match="unknown backend 'reverence'"):
        check("reverence")
    with pytest.raises(BackendError, match="no kernel to check: backend broken, op pack4"):
        check(broken, "pack4")
    for name in ("pack4/float32/contiguous/999", "pack4/float32", "pack4/float32/diagonal/0", "pack4/float31/sliced/0"):
        with pytest.raises(HotError):
            find_case(name)


def test_a_case_is_found_again_as_it_was() -> None:
    first, again = (find_case("project/bfloat16/sliced/15").args for _ in range(2))
    assert first["x"].dtype == torch.bfloat16 and not first["x"].is_contiguous()
    assert torch.equal(first["x"].nan_to_num(), again["x"].nan_to_num())


def test_an_op_from_outside_brings_its_cases() -> None:
    register_cases("test_op")(lambda source: iter([("normal", {"x": source.values((2, 3))})]))
    try:
        assert find_case("test_op/float16/expanded/0").args["x"].stride() == (0, 1)
    finally:
        generators.remove("test_op")


def test_the_oracles_by_hand() -> None:
    assert oracles.levels("log3").tolist() == [-4, -2, -1, 0, 1, 2, 4]
    for format, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        assert torch.equal(values[values.isfinite()].unique(), oracles.levels(format))
    v = torch.tensor([0.5, 1.5, -2.5, 2.6, 9.0], dtype=torch.float64)
    assert oracles.nearest(v, "int4").tolist() == [0, 2, -2, 3, 7]
    assert oracles.nearest(v, "log4").tolist() == [1, 2, -2, 2, 8]
    assert oracles.with_noise(v, torch.full((5,), 0.5), "int4").tolist() == [1, 2, -2, 3, 7]
    assert oracles.project(torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0]), 4, (0, 2), (), 0, "keep", None).tolist() == [
        5,
        -2,
        9,
    ]
    assert oracles.pack4(torch.tensor([[1, -1, -8]], dtype=torch.int8)).tolist() == [[0xF1, 0x08]]
