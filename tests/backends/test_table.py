"""The op table: declaring, registering, choosing kernels, falling back, and kernels as custom ops."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hot.backends import table
from hot.backends.table import (
    OPS,
    Backend,
    backends,
    declare_op,
    get_ops,
    kernels,
    ops_for,
    register_backend,
    register_kernel,
)
from hot.errors import BackendError, HotError, UnknownNameError


@pytest.fixture
def tiny() -> Iterator[str]:
    """A throw-away backend on the CPU, preferred by ``auto``; gone after the test with its kernels."""
    register_backend(Backend("tiny", devices=("cpu",), probe=lambda: (True, "a test"), priority=9))
    yield "tiny"
    for name in kernels.names("tiny.*"):
        kernels.remove(name)
    backends.remove("tiny")
    table._ready.clear()


def add_pack4(backend: str, **options: object) -> None:
    @register_kernel("pack4", backend=backend, **options)  # type: ignore[arg-type]
    def pack4(codes: Tensor) -> Tensor:
        codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        return (codes[:, 0::2] % 16 + codes[:, 1::2] % 16 * 16).to(torch.uint8)


CODES = torch.arange(-8, 7, dtype=torch.int8).view(3, 5)


def test_every_op_says_what_it_equals() -> None:
    assert OPS["pack4"].equals == "(codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).view(torch.uint8)"
    assert all(op.equals and op.name == name for name, op in OPS.items())
    with pytest.raises(HotError, match="'unsaid' must end its docstring with 'Equals"):

        @declare_op
        def unsaid(x: Tensor) -> Tensor:
            """No line."""
            return x


def test_every_op_has_a_reference_kernel_or_a_composition() -> None:
    assert [op for op in OPS if f"reference.{op}" not in kernels and OPS[op].composition is None] == []


def test_an_unknown_op_or_backend_is_named() -> None:
    with pytest.raises(HotError, match=r"unknown op 'packs'.*pack4"):
        register_kernel("packs", backend="reference")
    with pytest.raises(UnknownNameError, match="unknown backend 'referense', did you mean 'reference'"):
        ops_for("referense", "cpu")
    with pytest.raises(AttributeError, match=r"no op 'packs'; the ops are .*pack4"):
        ops_for("reference", "cpu").packs  # noqa: B018


def test_auto_prefers_by_priority_and_supports(tiny: str) -> None:
    add_pack4(tiny, supports=lambda codes: codes.shape[0] == 3)
    ops = ops_for("auto", "cpu")
    assert ops.serving("pack4") == "tiny" and ops.serving("quantize") == "reference"
    assert ops.serving("transform_quantize") == "composition"
    assert torch.equal(ops.pack4(CODES), ops_for("reference", "cpu").pack4(CODES))
    assert torch.equal(ops.pack4(CODES[:2]), ops_for("reference", "cpu").pack4(CODES[:2]))


def test_an_explicit_backend_does_not_fall_back(tiny: str) -> None:
    add_pack4(tiny, supports=lambda codes: codes.shape[0] == 3)
    ops = ops_for(tiny, "cpu")
    with pytest.raises(BackendError, match="backend 'tiny' has no kernel for op 'pack4' with these arguments"):
        ops.pack4(CODES[:2])
    with pytest.raises(BackendError, match="no kernel for op 'unpack4'"):
        ops.unpack4(torch.zeros(1, 1, dtype=torch.uint8), 2)
    with pytest.raises(BackendError, match="no kernel for op 'project'"):  # the composition runs on tiny's own ops
        args = (16, (0,), (), 0, "pad", None, "int8", "row", 0, "nearest", ())
        ops.transform_quantize(torch.zeros(1, 1, 16), *args)


def test_a_missing_backend_says_why(tiny: str) -> None:
    def broken() -> tuple[bool, str]:
        raise OSError("no driver")

    backends.remove(tiny)
    register_backend(Backend(tiny, devices=("cpu",), probe=broken, priority=9))
    assert backends[tiny].availability() == (False, "OSError: no driver")
    with pytest.raises(BackendError, match="backend 'tiny' is not available: OSError: no driver"):
        ops_for(tiny, "cpu")
    with pytest.raises(BackendError, match="'tiny' is not available"):
        get_ops(tiny, "cpu")


def test_a_backend_is_asked_only_for_its_devices(tiny: str) -> None:
    with pytest.raises(BackendError, match="backend 'tiny' runs on cpu, not on cuda"):
        ops_for(tiny, "cuda")
    assert ops_for("auto", "cuda").serving("pack4") != tiny


def test_auto_says_once_what_it_leaves_out(tiny: str) -> None:
    backends.remove(tiny)
    register_backend(Backend(tiny, devices=("cpu",), probe=lambda: (False, "needs a test"), priority=9))
    with pytest.warns(UserWarning, match="backend auto: tiny is left out on cpu: needs a test"):
        first = get_ops("auto", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_ops("auto", "cpu") is first


def test_kernels_are_loaded_when_first_used(tiny: str) -> None:
    backends.remove(tiny)
    loaded: list[int] = []

    def load() -> None:
        if not loaded:
            add_pack4(tiny)
        loaded.append(1)

    register_backend(Backend(tiny, devices=("cpu",), probe=lambda: (True, ""), load=load, priority=9))
    assert not loaded
    assert get_ops(tiny, "cpu").serving("pack4") == tiny
    get_ops(tiny, "cpu")
    assert len(loaded) == 1


def test_a_kernel_is_called_past_the_dispatcher_where_nobody_watches(tiny: str) -> None:
    add_pack4(tiny)
    pack4, seen = ops_for(tiny, "cpu").pack4, []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def ops_of(call: Callable[[], object]) -> list[str]:
        """The hot ops that the profiler sees."""
        with torch.profiler.profile() as profile:
            call()
        return [event.key for event in profile.key_averages() if event.key.startswith("hot::")]

    with torch.no_grad():
        assert ops_of(lambda: pack4(CODES)) == []
        assert ops_of(lambda: pack4(codes=CODES)) == ["hot::pack4_tiny"]
        with Watch():
            pack4(CODES)
        with FakeTensorMode() as mode:
            assert pack4(mode.from_tensor(CODES)).shape == (3, 3)
        assert pack4(mode.from_tensor(CODES)).shape == (3, 3)  # no mode is on, but the tensor is of its kind
    assert seen == ["hot.pack4_tiny.default"]
    assert ops_of(lambda: pack4(CODES)) == ["hot::pack4_tiny"]


def test_a_kernel_is_a_custom_op_with_the_declared_fake(tiny: str) -> None:
    add_pack4(tiny)
    torch.library.opcheck(kernels["tiny.pack4"].call, (CODES,))
    packed = ops_for(tiny, "cpu").pack4
    compiled = torch.compile(lambda codes: packed(codes), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(CODES), packed(CODES))


def test_every_signature_can_be_a_custom_op(tiny: str) -> None:
    reference = ops_for("reference", "cpu")
    for op in OPS:
        register_kernel(op, backend=tiny)(getattr(reference, op))
    x = torch.randn(2, 3, 20)
    args = (16, (0, 1), (), 1, "keep", torch.tensor([1]), "int4", "block", 16, "nearest", (12.1, 12.2))
    for got, want in zip(
        ops_for(tiny, "cpu").transform_quantize(x, *args), reference.transform_quantize(x, *args), strict=True
    ):
        assert torch.equal(got, want)


def test_a_second_kernel_is_refused_and_the_first_still_runs(tiny: str) -> None:
    add_pack4(tiny)
    before = ops_for(tiny, "cpu").pack4(CODES)
    with pytest.raises(HotError, match="has a kernel for op 'pack4' already"):
        register_kernel("pack4", backend=tiny)(lambda codes: codes.new_zeros(1, dtype=torch.uint8))
    assert torch.equal(ops_for(tiny, "cpu").pack4(CODES), before)
    with pytest.raises(HotError, match="backend 'tiny' is registered already"):
        register_backend(Backend("tiny", devices=("cpu",), probe=lambda: (True, "")))


def test_an_op_is_declared_once() -> None:
    with pytest.raises(HotError, match="declared already"):
        declare_op(OPS["pack4"].fake)
