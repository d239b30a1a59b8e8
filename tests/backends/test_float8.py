"""What the library's float8 product of blocks by tiles is handed, by a stub of it that reads memory as it does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hot.backends import float8

CPU = torch.device("cpu")


def library(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, strides: str) -> Tensor:
    """a (m, K) by b (K, n). It refuses other strides than it is to ask for, then reads the scales of tiles in rows of fours."""
    (m, k), n = a.shape, b.shape[1]
    width, fours = k // 128, -(-k // 512) * 4
    wanted = {"padded": fours, "dense": width}.get(strides)
    assert a_scale.shape == (m, width) and b_scale.shape == (width, n // 128)
    right = a_scale.stride(0) == b_scale.stride(0) == 1 and (width == 1 or a_scale.stride(1) == m)
    if wanted is None or not right or (n > 128 and b_scale.stride(1) != wanted):
        raise RuntimeError("Invalid scaling configuration.")
    tiles = torch.as_strided(b_scale, (n // 128, width), (fours, 1))
    wide = (
        a.float() * a_scale.repeat_interleave(128, 1),
        b.T.float() * tiles.repeat_interleave(128, 0).repeat_interleave(128, 1),
    )
    return (wide[0] @ wide[1].T).to(torch.bfloat16)


@pytest.fixture(params=["padded", "dense", ""])
def strides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What torch's check asks for: the strides in memory, or, as 2.11 does, those of rows without a gap; "": no such product."""
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, s, t, **_: library(a, b, s, t, request.param))
    float8._rows_of_tiles.cache_clear()
    yield request.param
    float8._rows_of_tiles.cache_clear()


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in (128, 256, 384) for k in (128, 256, 384, 512, 768, 2304)])
def test_rows_of_tiles_by_fours(strides: str, n: int, k: int) -> None:
    assert float8._rows_of_tiles(CPU) == strides
    a, b = (torch.randint(-7, 8, (rows, k)).to(torch.float8_e4m3fn) for rows in (8, n))
    a_scale, b_scale = torch.rand(8, k // 128) + 0.1, torch.rand(n // 128, k // 128) + 0.1
    if strides:
        got = float8.blocks_product(a, a_scale, b, b_scale)
        wide = a.float() * a_scale.repeat_interleave(128, 1)
        want = wide @ (b.float() * b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)).T
        torch.testing.assert_close(got.float(), want, rtol=0.01, atol=0.01 * k)


@pytest.mark.parametrize(("m", "k", "fits"), [(512, 384, True), (197, 384, False), (512, 192, False), (4, 128, True)])
def test_who_goes_to_the_library(strides: str, m: int, k: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by fours and whole tiles, where torch has such a product; everything else is ours."""
    monkeypatch.setattr(float8, "capability", lambda device: (9, 0))
    a, b = (torch.zeros(rows, k).to(torch.float8_e4m3fn) for rows in (m, 256))
    a_scale, b_scale = torch.ones(m, -(-k // 128)), torch.ones(2, -(-k // 128))
    served = float8.fits_blocks(a, a_scale, 128, b, b_scale, 128, torch.bfloat16)
    assert served == (fits and strides != "")
