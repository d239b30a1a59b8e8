"""The crossover: which layers it leaves exact, that those are torch's bit for bit, and its files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import HOT, Grads, for_conv, grads, normal, saved_tensors
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from hot import crossover
from hot.convert import HotLinear
from hot.crossover import CrossoverWarning, Point, judge, off, read, read_file, slug, tables, user_folder, write
from hot.errors import HotError
from hot.executor import conv2d, linear
from hot.policies.plan import LayerPlan
from hot.views import LinearView, conv2d_view

HERE = "Test CPU (R) @ 2.0GHz"


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No table but those that a test writes, for a CPU with a name of its own."""
    monkeypatch.setenv("HOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(crossover, "_is_off", False)
    monkeypatch.setattr(crossover, "name_of", lambda device: HERE if device.type == "cpu" else "")
    crossover.forget()
    torch._dynamo.reset()
    yield
    crossover.forget()


def point(ratio: float, *sizes: int, plan: LayerPlan = HOT, kind: str = "linear", dtype: str = "float32") -> Point:
    return Point(kind, str(plan), dtype, *sizes, ratio)


def fate(points: list[Point], *sizes: int) -> bool | None:
    """Whether a linear layer of those (tokens, outputs, inputs) is left exact; None: nothing is known."""
    tokens, outputs, inputs = sizes
    shapes = torch.Size((tokens, inputs)), torch.float32, torch.Size((outputs, inputs))
    verdict = judge(points, *shapes, HOT, LinearView())
    return None if verdict is None else verdict.leaves_exact


def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, plan: LayerPlan = HOT) -> Grads:
    return grads(lambda *t: linear(*t, plan), x, weight, bias)


def is_torchs(got: Grads, torchs: Grads) -> bool:
    """All outputs and gradients bit for bit, in torch's dtypes."""
    return all(a is b is None or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(got, torchs, strict=True))


def test_the_rule_by_hand() -> None:
    points = [
        point(0.7, 64, 64, 64), point(1.0, 256, 64, 64), point(0.9, 4096, 64, 64), point(1.4, 64, 512, 64),
        point(2.0, 1, 1, 1, plan=LayerPlan()), point(2.0, 1, 1, 1, kind="conv1x1"), point(2.0, 1, 1, 1, dtype="bfloat16"),
    ]  # fmt: skip
    assert fate(points, 64, 64, 64) is fate(points, 1, 1, 1) is True
    assert fate(points, 256, 64, 64) is False  # as fast as dense is enough
    assert [fate(points, tokens, 64, 64) for tokens in (127, 129, 1023, 1025, 2**30)] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert [fate(points, 64, outputs, 64) for outputs in (181, 182, 4096)] == [True, False, False]
    assert fate([], 64, 64, 64) is fate(points[4:], 64, 64, 64) is None
    assert fate([point(0.9, 64, 64, 64)], 4096, 4096, 4096) is True  # the only one there is


def test_verdicts_name_the_nearest_layer() -> None:
    points = [point(0.7, 64, 64, 64), point(1.5, 256, 256, 256)]

    def verdict(*sizes: int) -> str:
        return str(judge(points, torch.Size(sizes[::2]), torch.float32, torch.Size(sizes[1:]), HOT, LinearView()))

    assert verdict(60, 64, 64) == "exact: crossover, 0.70× dense at T×O×I = 64×64×64"
    assert verdict(300, 256, 256) == "runs: crossover, 1.50× dense at T×O×I = 256×256×256"


sizes = st.tuples(*[st.integers(1, 200)] * 3)


@given(st.lists(st.builds(point, st.sampled_from([0.5, 2.0]), *[st.integers(1, 200)] * 3), min_size=1), sizes)
def test_no_layer_is_nearer_than_the_one_that_speaks(points: list[Point], sizes: tuple[int, ...]) -> None:
    def unlike(a: tuple[int, ...], b: tuple[int, ...]) -> float:
        return math.prod(max(m, n) / min(m, n) for m, n in zip(a, b, strict=True))

    shapes = torch.Size(sizes[::2]), torch.float32, torch.Size(sizes[1:])
    verdict = judge(points, *shapes, HOT, LinearView())
    assert verdict is not None
    alike = [p for p in points if p.sizes[1:] == verdict.nearest.sizes[1:]]
    features = min(unlike(p.sizes[1:], sizes[1:]) for p in points)
    assert unlike(verdict.nearest.sizes[1:], sizes[1:]) <= features * (1 + 1e-9)
    assert unlike(verdict.nearest.sizes[:1], sizes[:1]) <= min(unlike(p.sizes[:1], sizes[:1]) for p in alike) * (
        1 + 1e-9
    )


def test_sizes_of_convolutions_are_output_pixels_and_channels() -> None:
    view = conv2d_view((3, 5), 2, (1, 0), 1)
    assert crossover._kind(view) == "conv3x5"
    for shape in ((2, 4, 9, 11), (4, 9, 11)):
        x, weight = torch.empty(shape), torch.empty(6, 4, 3, 5)
        pixels = F.conv2d(x, weight, None, 2, (1, 0)).numel() // 6
        assert crossover._sizes(x.shape, weight.shape, view) == (pixels, 6, 4)
    assert crossover._sizes(torch.Size((2, 3, 5, 8)), torch.Size((7, 8)), LinearView()) == (30, 7, 8)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(40, 16), (2, 20, 16)], ids=str)
@pytest.mark.filterwarnings("ignore::hot.crossover.CrossoverWarning")
def test_left_exact_is_torchs(shape: tuple[int, ...], dtype: torch.dtype, autocast: bool) -> None:
    """Law 1 for a linear layer that the crossover leaves exact; autocast decides what its product runs in."""
    ran_in = "bfloat16" if autocast and dtype != torch.float64 else str(dtype).removeprefix("torch.")
    operands = normal(*shape, dtype=dtype), normal(12, 16, dtype=dtype, seed=1), normal(12, dtype=dtype, seed=2)
    theirs = grads(F.linear, *operands, autocast=autocast)
    for measured in ("float32", "bfloat16", "float64"):
        write([point(0.5, 40, 12, 16, dtype=measured)], HERE, user_folder() / f"{slug(HERE)}.csv")
        got = grads(lambda *t: linear(*t, HOT), *operands, autocast=autocast)
        assert is_torchs(got, theirs) is (measured == ran_in)
        (user_folder() / f"{slug(HERE)}.csv").unlink()


@pytest.mark.parametrize(("kind", "size"), [("conv1x1", 1), ("conv3x3", 3)])
@pytest.mark.filterwarnings("ignore::hot.crossover.CrossoverWarning")
def test_left_exact_convolutions_are_torchs(kind: str, size: int) -> None:
    """Law 1 for a convolution: so and so many output pixels, whatever the batch."""
    plan, weight = for_conv(HOT), normal(6, 4, size, size)
    write([point(0.5, 36, 6, 4, plan=plan, kind=kind), point(1.5, 2 * 36, 6, 4, plan=plan, kind=kind)], HERE)
    for batch in (1, 2):
        operands = normal(batch, 4, 6, 6), weight, normal(6)
        got = grads(lambda *t: conv2d(*t, plan, 1, size // 2), *operands)
        assert is_torchs(got, grads(lambda *t: F.conv2d(*t, 1, size // 2), *operands)) is (batch == 1)


@pytest.mark.filterwarnings("ignore::hot.crossover.CrossoverWarning")
def test_what_is_saved_is_x_and_only_what_is_needed() -> None:
    """Law 3 where the crossover decides: torch's own saving."""
    write([point(0.5, 40, 12, 16)], HERE)
    x, weight = normal(2, 20, 16), normal(12, 16).requires_grad_()
    with saved_tensors() as found:
        linear(x, weight, None, HOT)
    assert any(t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for t in found)
    with saved_tensors() as found:
        linear(x.requires_grad_(), weight.detach(), None, HOT)
    assert {t.untyped_storage().data_ptr() for t in found} == {weight.untyped_storage().data_ptr()}


@pytest.mark.filterwarnings("ignore::hot.crossover.CrossoverWarning")
def test_only_auto_asks_and_off_silences() -> None:
    write([point(0.5, 1, 1, 1)], HERE)
    operands = normal(2, 20, 16), normal(12, 16, seed=1)
    theirs, plain = grads(F.linear, *operands), ours(*operands, plan=replace(HOT, backend="reference"))
    assert is_torchs(ours(*operands), theirs) and not is_torchs(plain, theirs)
    with off():
        with off():
            pass
        assert is_torchs(ours(*operands), plain)
    assert is_torchs(ours(*operands), theirs)
    with pytest.raises(RuntimeError, match="out"), off():
        raise RuntimeError("out")
    assert is_torchs(ours(*operands), theirs)


@pytest.mark.parametrize("ratio", [1.0, 0.99])
@pytest.mark.filterwarnings("ignore::hot.crossover.CrossoverWarning")
def test_as_fast_as_torch_is_fast_enough(ratio: float) -> None:
    write([point(ratio, 1, 1, 1)], HERE)
    operands = normal(2, 20, 16), normal(12, 16, seed=1)
    assert (
        is_torchs(ours(*operands), grads(F.linear, *operands)) is (ratio < 1) is fate([point(ratio, 1, 1, 1)], 1, 1, 1)
    )


def test_says_so_once_a_weights_shape() -> None:
    write([point(0.5, 40, 12, 16)], HERE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for tokens in (40, 30, 40):
            for outputs in (8, 12):
                ours(normal(tokens, 16), normal(outputs, 16))
    assert [w.category for w in said] == [CrossoverWarning] * 2
    assert "linear layers of T×O×I = 40×8×16 in float32" in str(said[0].message)
    assert "0.50× dense at T×O×I = 40×12×16" in str(said[0].message) and "hot plan" in str(said[0].message)
    assert "\n" not in str(said[0].message)


@pytest.mark.filterwarnings("ignore::hot.crossover.CrossoverWarning")
def test_files_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    write([point(1.5, 40, 12, 16), point(0.5, 40, 20, 16)], HERE)
    reads: list[Path] = []
    monkeypatch.setattr(crossover, "read_file", lambda path: reads.append(path) or read_file(path))
    for _ in range(3):
        ours(normal(40, 16), normal(12, 16))
        ours(normal(30, 16), normal(20, 16))
    assert len(reads) == 1 + 1  # the second for the one warning


@pytest.mark.filterwarnings("ignore::hot.crossover.CrossoverWarning")
def test_checkpointing() -> None:
    """Law 2: both forwards of a checkpoint decide the same."""
    model = mlp()
    write([point(1.5, 40, 32, 16), point(0.5, 40, 16, 32)], HERE)
    x = normal(2, 20, 16)
    again = step(lambda t: checkpoint(model, t, use_reentrant=False), model, x)
    assert all(torch.equal(a, b) for a, b in zip(step(model, model, x), again, strict=True))


def mlp() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    for layer in (model[0], model[2]):
        layer.__class__, layer.hot_plan = HotLinear, replace(HOT)  # equal, and not the same
    return model


def step(f: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = f(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("first", ["eager", "compiled"])
@pytest.mark.filterwarnings("error::hot.crossover.CrossoverWarning")
def test_one_graph(first: str) -> None:
    """Compiled in one graph, whoever read the table first: the layers that eager leaves exact, and no warning."""
    model = mlp()
    write([point(1.5, 40, 32, 16), point(0.5, 40, 16, 32)], HERE)
    x = normal(2, 20, 16)
    if first == "eager":
        crossover._said.add(("linear", torch.float32, (16, 32)))
        eager = step(model, model, x)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=False)
    results = [step(compiled, model, x) for _ in range(2)]
    assert counter.frame_count == 1
    crossover._said.add(("linear", torch.float32, (16, 32)))
    eager = step(model, model, x)
    with off():
        assert not torch.equal(step(compiled, model, x)[-2], eager[-2])  # the second layer's weight runs HOT's way
    assert all(torch.equal(a, b) for got in results for a, b in zip(got, eager, strict=True))


def test_a_graph_for_sizes_on_either_side() -> None:
    """dynamic=True: one graph each side of the crossover."""
    layer = nn.Linear(16, 32)
    layer.__class__, layer.hot_plan = HotLinear, HOT
    write([point(0.5, 40, 16, 16), point(1.5, 60, 16, 16)], HERE)
    counter = CompileCounterWithBackend("aot_eager")
    compiled, graphs = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True), []
    crossover._said.add(("linear", torch.float32, (32, 16)))
    for batch in (2, 5, 3, 7, 2):
        x = normal(batch, 20, 16)
        assert all(torch.equal(a, b) for a, b in zip(step(compiled, layer, x), step(layer, layer, x), strict=True))
        theirs = grads(F.linear, x, layer.weight, layer.bias)
        assert is_torchs(ours(x, layer.weight, layer.bias), theirs) is (batch == 2)
        graphs.append(counter.frame_count)
    assert graphs[0] < graphs[1] == graphs[-1]


points = st.builds(
    Point,
    st.sampled_from(["linear", "conv1x1", "conv3x3", "conv16x16"]),
    st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1),
    st.sampled_from(["float32", "bfloat16"]),
    *[st.integers(1, 2**40)] * 3,
    st.floats(1e-3, 1e3),
)


@given(st.lists(points), st.lists(points))
def test_what_is_written_is_read_and_the_newer_replaces(old: list[Point], new: list[Point]) -> None:
    path = user_folder() / "property.csv"
    path.unlink(missing_ok=True)
    write(old, HERE, path)
    write(new, HERE, path)
    expected = {(p.key, p.sizes): p for p in (*old, *new)}
    found = read_file(path)
    assert {(p.key, p.sizes): p for p in found} == expected and len(found) == len(expected)


def test_a_table_is_found_by_the_devices_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's first, then the packaged one, and neither folder need be there."""
    assert slug("NVIDIA H200") == "nvidia-h200" and read("NVIDIA H200")
    configs = tmp_path / "configs"
    monkeypatch.setattr("hot.measured.preset_folder", lambda: configs / "policies")
    assert read(HERE) == () and tables() == {}
    packaged = write([point(1.5, 4, 4, 4)], HERE, configs / "crossover" / f"{slug(HERE)}.csv")
    other = write([point(1.5, 4, 4, 4)], "Other", configs / "crossover" / "other.csv")
    assert tables() == {slug(HERE): packaged, "other": other} and read(HERE)[0].ratio == 1.5
    mine = write([point(0.5, 8, 8, 8)], HERE)
    assert mine.parent == user_folder() and tables() == {slug(HERE): mine, "other": other}
    assert [p.sizes for p in read(HERE)] == [(8, 8, 8)]
    monkeypatch.delenv("HOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_folder() == tmp_path / "xdg" / "hot" / "crossover"


HEADER = "kind,plan,dtype,tokens,outputs,inputs,ratio\n"
GOOD = "linear,p,float32,8,8,8,1.5\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r":1: the columns are kind,plan,dtype,tokens,outputs,inputs,ratio, not ''"),
        ("kind,plan\n", r":1: the columns are .*, not 'kind,plan'"),
        (HEADER + GOOD + "linear,p,float32,8,8,1.5\n", r":3: 6 values, where 7 are needed"),
        (HEADER + "conv3,p,float32,8,8,8,1.5\n", r":2: kind 'conv3' is not linear, conv1x1"),
        (HEADER + "linear,,float32,8,8,8,1.5\n", r":2: plan '' is not the text of a plan"),
        (HEADER + "linear,p,float99,8,8,8,1.5\n", r":2: dtype 'float99' is not a dtype"),
        (HEADER + "linear,p,nn,8,8,8,1.5\n", r":2: dtype 'nn' is not a dtype"),
        (HEADER + "linear,p,float32,8,0,8,1.5\n", r":2: outputs '0' is not a whole number above 0"),
        (HEADER + "linear,p,float32,8.5,8,8,1.5\n", r":2: tokens '8.5' is not a whole number"),
        (HEADER + GOOD + "linear,p,float32,8,8,8,nan\n", r":3: ratio 'nan' is not a number above 0"),
        (HEADER + "linear,p,float32,8,8,8,fast\n", r":2: ratio 'fast' is not a number above 0"),
    ],
)  # fmt: skip
def test_broken_files(text: str, message: str) -> None:
    path = user_folder() / f"{slug(HERE)}.csv"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    for use in (
        lambda: read(HERE),
        lambda: write([point(1.0, 1, 1, 1)], HERE),
        lambda: ours(normal(4, 16), normal(8, 16)),
    ):
        with pytest.raises(HotError, match=message) as caught:
            use()
        assert str(path) in str(caught.value) and "hot bench layers --write-crossover" in str(caught.value)
    assert path.read_text() == text


def test_a_file_that_is_no_text() -> None:
    path = user_folder() / f"{slug(HERE)}.csv"
    path.parent.mkdir(parents=True)
    path.write_bytes(HEADER.encode() + b"\xff\xfe\n")
    with pytest.raises(HotError, match=f"{path}: .*remove it and measure again"):
        read(HERE)


def test_a_point_that_could_not_be_read_again_is_refused() -> None:
    with pytest.raises(HotError, match="ratio 'inf' is not a number above 0"):
        write([point(1.0, 1, 1, 1), point(float("inf"), 1, 1, 1)], HERE)
    assert not user_folder().exists()
