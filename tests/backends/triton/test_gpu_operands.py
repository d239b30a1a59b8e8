"""Operands on a GPU: every way that tiles can be read and written gives the codes of every other, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from hot.backends import backends, ops_for
from hot.backends.triton import fused, tuning
from hot.hadamard import sequency_order

AVAILABLE, REASON = backends["triton"].availability()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not AVAILABLE, reason=REASON),
]
ROW, LOW = (16, tuple(range(16)), ()), (16, sequency_order(16)[:8], (), 0, "pad", None)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, Any]]]:
    """What the settings of a family are to have besides its default, by its name."""
    asked: dict[str, dict[str, Any]] = {}
    choices: dict[object, tuning.Config] = {}

    def config(of: tuning.Family, key: tuning.Key, device: torch.device) -> tuning.Config:
        wanted = of.default(key) | asked.get(of.name, {})
        return choices.setdefault((of.name, *sorted(wanted.items())), wanted)

    monkeypatch.setattr(tuning, "config", config)
    yield asked


def gradient(samples: int, length: int, outputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(samples + length)
    g = torch.randn(samples, length, outputs, device="cuda", dtype=dtype)
    return g * torch.logspace(-3, 3, outputs, device="cuda", dtype=dtype)


SHAPES = [(1, 1000, 768), (4, 512, 1024), (64, 197, 768), (8, 49, 1000), (2, 5000, 72)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copied_tiles_are_those_of_pointers(
    settings: dict[str, dict[str, Any]], shape: tuple[int, int, int], granularity: str, dtype: torch.dtype
) -> None:
    """Both kernels, each by pointers and by the copy engine, with one to three stages."""
    g, ops = gradient(*shape, dtype), ops_for("triton", "cuda")
    quantizer = granularity, 0, "hashed", ()
    made = []
    for read, written in ((0, 0), (1, 0), (0, 1), (1, 1)):
        for stages in (2, 3) if read else (3,):
            settings["operands_largest"] = {"copied": read, "num_stages": stages, "TILES": 4}
            settings["operands_quantized"] = {"copied": written}
            made.append(ops.grad_output_operands(g, *ROW, "int4.e4m3", *quantizer, *LOW, "int8", *quantizer, True))
    for other in made[1:]:
        for a, b in zip(other[:4], made[0][:4], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    wide = g.double()
    want, size = wide.sum((0, 1)), wide.abs().sum((0, 1))
    for each in made:  # tiles begin elsewhere, so that sums are not added in the same order
        assert ((each[4].double() - want).abs() <= 1e-6 * size + torch.finfo(dtype).eps * want.abs()).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_candidate_gives_the_same_scales_and_passes_no_limit(
    settings: dict[str, dict[str, Any]], shape: tuple[int, int, int]
) -> None:
    """Codes are not clamped, so whatever instructions the two kernels are made of must add up alike."""
    g, ops = gradient(*shape), ops_for("triton", "cuda")
    key = ("along+across", 16, 16, 17, 10, "bf16", int(fused.capability(g.device) >= (9, 0)))
    quantizer, seen = ("row", 0, "nearest", ()), []
    for read in fused.LARGEST.candidates(key):
        for written in fused.QUANTIZE.candidates(key):
            if read["TILES"] != 4 or written["maxnreg"] != 128:
                continue
            settings["operands_largest"], settings["operands_quantized"] = read, written
            i, i_scale, w, w_scale, _ = ops.grad_output_operands(
                g, *ROW, "int4.e4m3", *quantizer, *LOW, "int8", *quantizer, True
            )
            assert i.float().abs().max() == 7 and w.int().abs().max() == 127, (read, written)
            seen.append((i_scale, w_scale))
    assert all(torch.equal(a, b) for scales in seen[1:] for a, b in zip(scales, seen[0], strict=True))


def test_sums_and_scales_of_what_is_not_finite() -> None:
    g, ops = gradient(3, 300, 256), ops_for("triton", "cuda")
    g[0, 5, 7], g[2, 100, 9] = float("nan"), float("-inf")
    quantizer = "row", 0, "hashed", ()
    i, i_scale, w, w_scale, bias = ops.grad_output_operands(
        g, *ROW, "int4.e4m3", *quantizer, *LOW, "int8", *quantizer, True
    )
    rows, columns = i_scale[:, 0].isnan(), w_scale[:, 0].isnan()
    assert rows.nonzero().flatten().tolist() == [5, 700] and columns.nonzero().flatten().tolist() == [7, 9]
    assert not i[rows].float().any() and not w[columns].any()
    assert bias[7].isnan() and bias[9] == float("-inf") and bias.isfinite().sum() == 254
