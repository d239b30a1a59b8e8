"""quantize, dequantize, pack4, unpack4: exact values and laws. test_checking.py has dtypes and layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hot.backends import ops_for
from hot.checking.oracles import TINY

ops = ops_for("reference", "cpu")
NOISY = ("hashed", "stochastic")
FORMATS = ("int2", "int3", "int4", "int8", "log2", "log3", "log4", "e4m3", "e5m2")


def quantize(
    x: Tensor, format: str = "int8", granularity: str = "row", group: int = 0, rounding: str = "nearest",
    clip: tuple[float, ...] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return ops.quantize(x, format, granularity, group, rounding, clip)


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_are_symmetric_and_the_largest_magnitude_is_the_largest_code(bits: int) -> None:
    top = 2 ** (bits - 1) - 1
    x = torch.randn(50, 33)
    codes, scale = quantize(x, f"int{bits}")
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (50, 1)
    assert torch.equal(codes.abs().amax(1), torch.full((50,), top, dtype=torch.int8))
    assert torch.equal(quantize(-x, f"int{bits}")[0], -codes)
    assert ((codes * scale - x).abs() <= scale * 0.5001).all()


def test_nearest_takes_ties_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]])
    assert quantize(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, -126]]


@pytest.mark.parametrize(
    ("granularity", "group", "scale"),
    [
        ("tensor", 0, [[7.0]]),
        ("row", 0, [[5.0], [7.0]]),
        ("token", 0, [[4.0, 2.0, 6.0, 7.0, 5.0]]),
        ("block", 2, [[2.0, 3.0, 5.0], [4.0, 7.0, 1.0]]),
        ("block", 16, [[5.0], [7.0]]),
    ],
)
def test_what_one_scale_covers(granularity: str, group: int, scale: list[list[float]]) -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, 2.0, -5.0], [-4.0, 0.5, -6.0, 7.0, 1.0]])
    codes, got = quantize(x, "int8", granularity, group)
    assert torch.allclose(got * 127, torch.tensor(scale))
    restored = ops.dequantize(codes, got, group, torch.float32)
    assert torch.allclose(restored, x, atol=float(got.max()) * 0.51)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rounding", ["nearest", *NOISY, "pseudo_stochastic"])
def test_zeros_stay_zeros(format: str, rounding: str) -> None:
    codes, scale = quantize(torch.zeros(3, 8), format, rounding=rounding)
    assert (codes.float() == 0).all() and (scale == TINY).all()
    beside = torch.tensor([[0.0, 1.0, -0.0, 0.3]]).expand(500, 4)
    codes, _ = quantize(beside, format, rounding=rounding)
    assert (codes.float()[:, 0::2] == 0)[:, 0].all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("granularity", "group", "spoiled"), [("row", 0, 8), ("token", 0, 3), ("block", 4, 4), ("tensor", 0, 24)]
)
@pytest.mark.parametrize("clip", [(), (12.1, 12.2)])
def test_a_group_that_is_not_finite(
    value: float, granularity: str, group: int, spoiled: int, clip: tuple[float, ...]
) -> None:
    x = torch.randn(3, 8)
    x[1, 2] = value
    codes, scale = quantize(x, "int4", granularity, group, "hashed", clip)
    restored = ops.dequantize(codes, scale, group, torch.float32)
    assert int(scale.isnan().sum()) == 1 and int(restored.isnan().sum()) == spoiled
    assert (codes[restored.isnan()] == 0).all()


def test_denormal_and_huge_values() -> None:
    codes, scale = quantize(torch.tensor([[1e-40, -1e-41]]))
    assert scale.item() == pytest.approx(TINY) and codes.tolist() == [[0, 0]]
    codes, scale = quantize(torch.tensor([[3e38, -1e38]]))
    assert codes.tolist() == [[127, -42]] and scale.isfinite().all()
    codes, scale = quantize(torch.tensor([[1e300]], dtype=torch.float64))  # no float32 scale reaches it
    assert scale.isnan().all() and codes.tolist() == [[0]]


@pytest.mark.parametrize("shape", [(0, 40), (3, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize(("granularity", "group"), [("tensor", 0), ("row", 0), ("token", 0), ("block", 16)])
@pytest.mark.parametrize("clip", [(), (12.1, 12.2)])
def test_empty_and_single(shape: tuple[int, int], granularity: str, group: int, clip: tuple[float, ...]) -> None:
    codes, scale = quantize(torch.ones(shape), "int4", granularity, group, "hashed", clip)
    rows, k = shape
    expected = {"tensor": (1, 1), "row": (rows, 1), "token": (1, k), "block": (rows, -(-k // 16))}
    assert codes.shape == shape and scale.shape == expected[granularity] and (codes == 7).all()
    assert ops.dequantize(codes, scale, group, torch.float32).shape == shape


def unbiased(got: Tensor, want: float, spacing: float) -> bool:
    """Whether the mean of many draws is within 4 standard errors: each draw deviates by at most ½ spacing."""
    return abs(got.double().mean().item() - want) < 4 * spacing / 2 / got.numel() ** 0.5


@pytest.mark.parametrize("rounding", NOISY)
@pytest.mark.parametrize("value", [0.3, -0.3, 2.7, 0.01, 100.499])
def test_noise_is_unbiased_for_integers(rounding: str, value: float) -> None:
    x = torch.full((1, 100_001), value)
    x[0, 0] = 127.0
    codes, scale = quantize(x, rounding=rounding)
    assert scale.item() == 1.0
    assert set(codes[0, 1:].unique().tolist()) <= {int(value // 1), int(value // 1) + 1}
    assert unbiased(codes[0, 1:], value, 1.0)


@pytest.mark.parametrize("rounding", NOISY)
@pytest.mark.parametrize("apart", [1, 2, 3, 64, 384])
def test_neighbours_are_rounded_independently(rounding: str, apart: int) -> None:
    """Two elements share a hash; the errors of equal values at any distance, in a row and between rows, do not know each other."""
    x = torch.full((64, 2048), 0.3)
    x[:, 0] = 127.0
    up = quantize(x, rounding=rounding)[0][:, 1:].double() - 0.3
    for a, b in ((up[:, :-apart], up[:, apart:]), (up[: 64 - min(apart, 63)], up[min(apart, 63) :])):
        assert abs((a * b).mean().item()) < 5 * 0.21 / a.numel() ** 0.5


@pytest.mark.parametrize("rounding", NOISY)
@pytest.mark.parametrize(
    ("format", "top", "value", "spacing"),
    [
        ("e4m3", 448.0, 1.03, 2**-3), ("e4m3", 448.0, -300.0, 32.0), ("e4m3", 448.0, 0.0007, 2**-9),
        ("e5m2", 57344.0, 1.1, 2**-2), ("e5m2", 57344.0, 4e-5, 2**-16),
        ("log4", 64.0, 0.2, 1.0), ("log4", 64.0, -11.0, 8.0), ("log3", 4.0, 1.25, 1.0), ("log2", 1.0, -0.6, 1.0),
    ],
)  # fmt: skip
def test_noise_is_unbiased_between_unequal_levels(
    rounding: str, format: str, top: float, value: float, spacing: float
) -> None:
    x = torch.full((1, 100_001), value)
    x[0, 0] = top
    codes, scale = quantize(x, format, rounding=rounding)
    got = codes[0, 1:].double()
    assert scale.item() == 1.0 and len(got.unique()) == 2
    assert got.unique().diff().item() == spacing
    assert unbiased(got, value, spacing)


def test_hashed_noise_over_random_values_is_unbiased() -> None:
    x = torch.randn(100, 1000)
    codes, scale = quantize(x, "int4", rounding="hashed")
    off = (codes - (x / scale).clamp(-7, 7)).double()
    assert abs(off.sum().item()) < 4 * off.square().sum().sqrt().item()


def test_hashed_noise_has_no_state_and_differs_by_index() -> None:
    x = torch.full((40, 50), 0.5)
    x[:, 0] = 7.0
    codes, _ = quantize(x, "int4", rounding="hashed")
    torch.manual_seed(5)
    assert torch.equal(quantize(x, "int4", rounding="hashed")[0], codes)
    assert 0.4 < codes[:, 1:].float().mean() < 0.6
    assert not torch.equal(codes[0], codes[1]) and not torch.equal(codes[:, 1], codes[:, 2])
    assert not torch.equal(quantize(x.where(x != 0.5, 0.5001), "int4", rounding="hashed")[0], codes)


@pytest.mark.parametrize("rounding", ["hashed", "stochastic", "pseudo_stochastic"])
def test_integers_stay_themselves(rounding: str) -> None:
    x = torch.arange(-127, 128).float().repeat(200, 1)
    assert torch.equal(quantize(x, rounding=rounding)[0].float(), x)


def test_pseudo_stochastic_rounds_by_the_low_bits_of_the_mantissa() -> None:
    bits = torch.arange(2048, dtype=torch.int32)
    x = (torch.tensor(1.5).view(torch.int32) + bits).view(torch.float32)[None]  # 1.5 and a little, every low half
    x = torch.cat([torch.tensor([[127.0]]), x], 1)
    up = quantize(x, rounding="pseudo_stochastic")[0][0, 1:] == 2
    assert torch.equal(up, bits >= 1024)  # where u = (2m + 1) / 2¹² passes ½
    assert quantize(torch.tensor([[127.0, 1.9375]]), rounding="pseudo_stochastic")[0].tolist() == [[127, 1]]  # m = 0


def test_stochastic_follows_the_seed() -> None:
    x = torch.randn(20, 30)

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return quantize(x, "int4", rounding="stochastic")[0]

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize(("format", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_float8_nearest_is_the_cast_of_torch(format: str, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    x = torch.cat([torch.tensor([top]), torch.randn(5000) * 2.0 ** torch.randint(-20, 6, (5000,))]).clamp(-top, top)[
        None
    ]
    codes, scale = quantize(x, format)
    assert scale.item() == 1.0 and codes.dtype == dtype
    assert torch.equal(codes.view(torch.uint8), x.to(dtype).view(torch.uint8))


@pytest.mark.parametrize(
    ("format", "levels"), [("log2", [0, 1]), ("log3", [0, 1, 2, 4]), ("log4", [0, *(2**k for k in range(7))])]
)
@pytest.mark.parametrize("rounding", ["nearest", "hashed"])
def test_log_levels(format: str, levels: list[int], rounding: str) -> None:
    x = torch.linspace(-levels[-1], levels[-1], 20001)[None]
    codes, _ = quantize(x, format, rounding=rounding)
    assert codes.unique().tolist() == sorted({*levels, *(-level for level in levels)})


def test_log_nearest_by_hand() -> None:
    x = torch.tensor([[64.0, 0.49, 0.5, 1.4, 1.5, 2.9, 3.1, -11.9, -12.0, 47.9, -64.0]])
    assert quantize(x, "log4")[0].tolist() == [[64, 0, 1, 1, 2, 2, 4, -8, -16, 32, -64]]


@pytest.mark.parametrize("format", ["int4", "log4", "e4m3"])
@pytest.mark.parametrize("clip", [(), (12.1, 12.2)])
def test_all_negative_tensors(format: str, clip: tuple[float, ...]) -> None:
    x = -torch.rand(4, 64) - 0.1
    codes, scale = quantize(x, format, clip=clip)
    assert scale.isfinite().all() and (codes.float() <= 0).all() and (codes.float() < 0).any(1).all()


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])
def test_sawb_clips_by_the_two_statistics(size: float) -> None:
    x = torch.randn(1, 10_000)
    expected = 12.1 * x.square().mean().sqrt() - 12.2 * x.abs().mean()
    assert 0 < expected < x.abs().max()
    codes, scale = quantize(x * size, "int4", clip=(12.1, 12.2))
    assert scale.item() / size * 7 == pytest.approx(expected.item(), rel=1e-4)
    assert (codes.abs() == 7).sum() > 10


@pytest.mark.parametrize(
    "x",
    [torch.tensor([[1.0, -1.0, 1.0, 1.0]]), torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])],
    ids=["clip is negative", "clip is beyond the largest"],
)
def test_sawb_falls_back_to_the_largest_magnitude(x: Tensor) -> None:
    _, scale = quantize(x, "int4", clip=(12.1, 12.2))
    assert scale.item() == pytest.approx(1 / 7)


LARGE: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(700, 900),
    "columns outermost": lambda: torch.randn(900, 700).T,
    "wide": lambda: torch.randn(2, 300_000),
    "tall, transposed": lambda: torch.randn(4, 150_000).T,
    "sliced": lambda: torch.randn(1400, 900)[::2],
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize(("granularity", "group"), [("row", 0), ("block", 64), ("token", 0), ("tensor", 0)])
def test_tiles_and_strides_change_no_bit(
    name: str, granularity: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hot.backends.reference import quantization

    x = LARGE[name]()
    assert x.numel() > 2**19 and len(quantization._tiles(x)) > 1
    tiled = quantize(x, "int4", granularity, group, "hashed")
    monkeypatch.setattr(quantization, "_tiles", lambda x: [(slice(0, x.shape[0]), slice(0, x.shape[1]))])
    whole = quantize(x.contiguous(), "int4", granularity, group, "hashed")
    assert all(torch.equal(a, b) for a, b in zip(tiled, whole, strict=True))


@pytest.mark.parametrize("format", ["int8", "log4", "e4m3"])
@pytest.mark.parametrize("x", [torch.randn(41, 5).T, torch.randn(10, 82)[::2, 1::2], torch.randn(1, 41).expand(5, 41)])
def test_strides_change_no_bit(format: str, x: Tensor) -> None:
    for rounding in ("nearest", "hashed", "pseudo_stochastic"):
        strided, contiguous = (quantize(t, format, rounding=rounding) for t in (x, x.contiguous()))
        assert torch.equal(strided[0].view(torch.uint8), contiguous[0].view(torch.uint8))
        assert torch.equal(strided[1], contiguous[1])


def test_dequantize_in_the_dtype_asked_for() -> None:
    codes, scale = torch.tensor([[3, -7]], dtype=torch.int8), torch.tensor([[0.1]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        got = ops.dequantize(codes, scale, 0, dtype)
        assert got.dtype == dtype and torch.equal(got, (codes.double() * scale.double()).to(dtype))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(0, 9), st.integers(0, 2**31))
def test_packing_round_trip(rows: int, k: int, seed: int) -> None:
    codes = torch.randint(-8, 8, (rows, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    packed = ops.pack4(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (rows, (k + 1) // 2)
    assert torch.equal(ops.unpack4(packed, k), codes)
    assert torch.equal(ops.pack4(codes.T.contiguous().T), packed)


def test_packing_by_hand() -> None:
    assert ops.pack4(torch.tensor([[1, -1, -8]], dtype=torch.int8)).tolist() == [[0xF1, 0x08]]
    assert ops.unpack4(torch.tensor([[0xF1, 0x78]], dtype=torch.uint8), 4).tolist() == [[1, -1, -8, 7]]


def test_under_another_default_device() -> None:
    x = torch.randn(2, 8)
    expected = quantize(x, "e4m3", rounding="hashed")[0]
    with torch.device("meta"):
        assert torch.equal(quantize(x, "e4m3", rounding="hashed")[0].float(), expected.float())


def test_the_reference_compiles_as_one_graph() -> None:
    x = torch.randn(3, 64)
    for format, rounding in (("int4", "hashed"), ("e4m3", "hashed"), ("log4", "nearest")):
        compiled = torch.compile(
            lambda x, f=format, r=rounding: quantize(x, f, "block", 16, r), fullgraph=True, backend="eager"
        )
        assert all(
            torch.equal(a, b) for a, b in zip(compiled(x), quantize(x, format, "block", 16, rounding), strict=True)
        )
