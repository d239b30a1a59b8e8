"""The order of backends under ``auto``: by measured times, in the places of priority, and the files of these times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hot
from hot import measured
from hot.backends import Backend, backends, get_ops, kernels, ops_for, order, register_backend, register_kernel, table
from hot.backends.order import FILES, GUESS, Time, arrange, by_op, times_on, write
from hot.errors import HotError
from hot.files import slug
from hot.planning import serving

HERE, CPU = "Test CPU", torch.device("cpu")
CODES = torch.zeros(2, 4, dtype=torch.int8)


@pytest.fixture(autouse=True)
def _own_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No file but the packaged ones and those that a test writes, for devices with names of their own."""
    monkeypatch.setenv("HOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(order, "name_of", lambda device: HERE if device.type == "cpu" else "Test GPU")
    table._ready.clear()
    yield
    table._ready.clear()


@pytest.fixture
def quick() -> Iterator[str]:
    """A backend on the CPU with kernels for all that the reference has, asked before it by priority."""
    register_backend(Backend("quick", devices=("cpu",), probe=lambda: (True, "a test"), priority=9))
    reference = ops_for("reference", "cpu")
    for op in ("pack4", "quantize", "matmul"):
        register_kernel(op, backend="quick")(getattr(reference, op))
    yield "quick"
    for name in kernels.names("quick.*"):
        kernels.remove(name)
    backends.remove("quick")


def times(op: str = "pack4", **of: list[float | None]) -> list[Time]:
    """The times of some backends in cases "0", "1", …; None for a case that one does not take."""
    return [
        Time(op, str(case), name, time) for name, row in of.items() for case, time in enumerate(row) if time is not None
    ]


def test_the_least_geometric_mean_is_first() -> None:
    assert arrange(["a", "b"], times(a=[1.0, 9.0], b=[2.0, 4.0])) == ["b", "a"]  # the sum would say so too
    assert arrange(["a", "b"], times(a=[10.0, 0.1], b=[2.0, 2.0])) == ["a", "b"]  # and here it would not
    assert arrange(["a", "b", "c"], times(a=[3.0], b=[2.0], c=[1.0])) == ["c", "b", "a"]
    assert arrange(["b", "a"], times(a=[2.0], b=[2.0])) == ["b", "a"]
    assert arrange(["a"], times(a=[3.0], b=[2.0])) == ["a"]  # b is not here


def test_only_cases_that_all_have_count() -> None:
    assert arrange(["a", "b"], times(a=[1.0, 99.0], b=[2.0, None])) == ["a", "b"]
    assert arrange(["a", "b"], times(a=[2.0, None], b=[1.0, 99.0])) == ["b", "a"]
    assert arrange(["a", "b"], times(a=[2.0, None], b=[None, 1.0])) == ["a", "b"]
    assert arrange(["a", "b"], times(a=[2.0, None], b=[1.0, 99.0], gone=[None, 1.0])) == ["b", "a"]


def test_what_was_not_measured_keeps_its_place() -> None:
    assert arrange(["mine", "a", "b"], times(a=[2.0], b=[1.0])) == ["mine", "b", "a"]
    assert arrange(["a", "mine", "b"], times(a=[2.0], b=[1.0])) == ["b", "mine", "a"]
    assert arrange(["mine", "a"], times(a=[1.0])) == ["mine", "a"]
    assert arrange(["a", "b"], []) == ["a", "b"] and arrange([], times(a=[1.0])) == []


NAMES = ["a", "b", "c", "d", "e"]


@given(
    st.permutations(NAMES),
    st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from([0.5, 1.0, 3.0, 8.0]), min_size=2, max_size=2)),
)
def test_the_order_of_any_times(names: list[str], rows: dict[str, list[float]]) -> None:
    got = arrange(names, times(**rows))
    assert sorted(got) == sorted(names)
    assert all(here == there for here, there in zip(got, names, strict=True) if there not in rows)
    keys = [(math.prod(rows[name]), names.index(name)) for name in got if name in rows]
    assert keys == sorted(keys)
    assert arrange(got, times(**rows)) == got


def test_auto_asks_the_faster_one_first(quick: str) -> None:
    assert ops_for("auto", "cpu").serving("pack4") == quick  # by priority
    write([*times(quick=[3.0], reference=[1.0]), *times("quantize", quick=[1.0], reference=[3.0])], HERE)
    ops = ops_for("auto", "cpu")
    assert [kernel.backend for kernel in ops.kernels["pack4"]] == ["reference", quick]
    assert [ops.serving(op) for op in ("quantize", "matmul", "hadamard")] == [quick, quick, "reference"]
    assert ops_for(quick, "cpu").serving("pack4") == quick  # it was named


def test_plans_show_what_is_asked_first(quick: str) -> None:
    plan = hot.resolve(hot.load_policy("hot"), torch.nn.Sequential(torch.nn.Linear(32, 32)))["0"]
    assert serving(plan, "cpu")["grad_weight product"] == f"integer, {quick}"
    write(times("matmul", quick=[3.0], reference=[1.0]), HERE)
    table._ready.clear()
    assert serving(plan, "cpu")["grad_weight product"] == "integer, reference"


def test_another_backend_of_a_higher_priority_still_wins(quick: str) -> None:
    write(times(quick=[3.0], reference=[1.0]), HERE)
    register_backend(Backend("other", devices=("cpu",), probe=lambda: (True, "a test"), priority=20))
    try:
        register_kernel("pack4", backend="other")(ops_for("reference", "cpu").pack4)
        assert [kernel.backend for kernel in ops_for("auto", "cpu").kernels["pack4"]] == ["other", "reference", quick]
    finally:
        kernels.remove("other.pack4")
        backends.remove("other")


def test_times_are_read_once_and_only_where_there_is_a_choice(quick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[torch.device] = []
    monkeypatch.setattr(table, "times_on", lambda device: reads.append(device) or {})
    for _ in range(3):
        get_ops("auto", "cpu").pack4(CODES)
    assert reads == [CPU]
    get_ops("reference", "cpu")
    backends.remove(quick)
    table._ready.clear()
    get_ops("auto", "cpu")
    register_backend(Backend(quick, devices=("cpu",), probe=lambda: (True, "a test")))
    assert reads == [CPU]


def test_whose_times_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This user's, then those that are packaged for the device, then the guess, which is for GPUs; op by op."""
    monkeypatch.setattr(measured, "preset_folder", lambda: tmp_path / "configs" / "policies")
    gpu = torch.device("cuda")
    assert times_on(CPU) == times_on(gpu) == {}
    guess = [*times("pack4", a=[1.0]), *times("unpack4", a=[1.0]), *times("expand", a=[1.0])]
    packaged = [*times("pack4", a=[2.0]), *times("unpack4", a=[2.0])]
    write(guess, GUESS, FILES.packaged(GUESS))
    assert times_on(gpu) == by_op(guess) and times_on(CPU) == {}
    write(packaged, "Test GPU", FILES.packaged("Test GPU"))
    assert write(times("pack4", a=[3.0], b=[4.0]), "Test GPU") == tmp_path / "cache" / "order" / "test-gpu.csv"
    found = times_on(gpu)
    assert [[time.p50_ms for time in found[op]] for op in ("pack4", "unpack4", "expand")] == [[3.0, 4.0], [2.0], [1.0]]
    assert times_on(CPU) == {}


def test_a_device_without_a_name_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "name_of", lambda device: "")
    write(times(a=[1.0]), "")
    assert times_on(CPU) == {} and FILES.packaged(GUESS).exists() and "matmul" in times_on(torch.device("cuda"))


words = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1)
records = st.lists(st.builds(Time, st.sampled_from(["pack4", "matmul", "expand"]), words, words, st.floats(1e-6, 1e6)))


@given(records, records)
def test_what_is_written_is_read_and_replaces_an_op_whole(old: list[Time], new: list[Time]) -> None:
    path = FILES.own("property")
    path.unlink(missing_ok=True)
    write(old, HERE, path)
    write(new, HERE, path)
    expected = {time.op: {} for time in (*old, *new)}
    for op in expected:
        for time in [t for t in new if t.op == op] or [t for t in old if t.op == op]:
            expected[op][time.case, time.backend] = time
    found = by_op(FILES.read(path))
    assert {op: {(t.case, t.backend): t for t in of} for op, of in found.items()} == expected
    assert sum(map(len, found.values())) == len(FILES.read(path)) == sum(map(len, expected.values()))


HEADER = "op,case,backend,p50_ms\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r":1: the columns are op,case,backend,p50_ms, not ''"),
        (HEADER + "pack4,int4,quick,1.0\npack4,int4,1.0\n", r":3: 3 values, where 4 are needed"),
        (HEADER + ",int4,quick,1.0\n", r":2: op '' is not a name"),
        (HEADER + "pack4,int4,,1.0\n", r":2: backend '' is not a name"),
        (HEADER + "pack4,int4,quick,0\n", r":2: p50_ms '0' is not a number above 0"),
        (HEADER + "pack4,int4,quick,nan\n", r":2: p50_ms 'nan' is not a number above 0"),
        (HEADER + "pack4,int4,quick,fast\n", r":2: p50_ms 'fast' is not a number above 0"),
    ],
)  # fmt: skip
def test_broken_files(text: str, message: str, quick: str) -> None:
    path = FILES.own(HERE)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    for use in (lambda: get_ops("auto", "cpu"), lambda: write(times(a=[1.0]), HERE)):
        with pytest.raises(HotError, match=message) as caught:
            use()
        assert str(path) in str(caught.value) and "hot bench kernels --write-order" in str(caught.value)
    assert path.read_text() == text
    assert ops_for(quick, "cpu").serving("pack4") == quick  # one that is named needs no times


def test_a_time_that_could_not_be_read_again_is_refused() -> None:
    with pytest.raises(HotError, match="p50_ms 'inf' is not a number above 0"):
        write(times(a=[1.0, math.inf]), HERE)
    assert not FILES.user_folder().exists()


def test_the_packaged_times_choose_between_triton_and_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the H200 and, for want of better, on any other GPU: every op that both serve, as `auto` makes its ops."""
    path = FILES.packaged(GUESS)
    assert path.name == f"{slug(GUESS)}.csv" and FILES.files()[0].parent == path.parent
    found = times_on(torch.device("cuda"))
    both = {op: of for op, of in found.items() if {"triton", "cupy"} <= {time.backend for time in of}}
    first = {op: arrange(["triton", "cupy", "reference"], of) for op, of in both.items()}
    assert all(names[-1] == "reference" for names in first.values())
    assert {op for op, names in first.items() if names[0] == "cupy"} == {
        "project", "expand", "dequantize", "transform_quantize", "grad_output_operands",
    }  # fmt: skip
    assert {"hadamard", "quantize", "pack4", "unpack4", "matmul"} == {op for op in first if first[op][0] == "triton"}
