"""Operands whose tiles come by the copy engine are those whose tiles come by pointers, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from hot.backends import ops_for
from hot.backends.triton import fused, tuning
from hot.hadamard import sequency_order

OPS = ops_for("triton", "cpu")
ROW, LOW = (16, tuple(range(16)), ()), (16, sequency_order(16)[:8], (), 0, "pad", None)


@contextmanager
def chip(*capability: int) -> Iterator[list[bool]]:
    """On such a chip, every operand with the first settings that fit it; gives whether each was copied."""
    copied: list[bool] = []

    def first(of: tuning.Family, key: tuning.Key, device: torch.device) -> tuning.Config:
        found = next(c for c in of.candidates(key) if of.name[:8] != "operands" or bool(c["copied"]) == bool(key[-1]))
        copied.append(bool(found.get("copied")))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "capability", lambda device: capability)
        patch.setattr(tuning, "config", first)
        fused._operand.cache_clear(), fused._gradient.cache_clear()
        yield copied
    fused._operand.cache_clear(), fused._gradient.cache_clear()


def assert_copied(call: str, x: Tensor, *how: object, copies: bool = True) -> None:
    with chip(8, 0) as copied:
        want = getattr(OPS, call)(x, *how)
        assert copied and not any(copied)
    with chip(9, 0) as copied:
        got = getattr(OPS, call)(x, *how)
        assert copied and all(one == copies for one in copied)
    for a, b in zip(got[:4], want[:4], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    for a, b in zip(got[4:], want[4:], strict=True):  # sums, of tiles that begin elsewhere
        torch.testing.assert_close(a, b)


GRADIENTS = {
    "samples of whole blocks": torch.randn(2, 96, 40),
    "ragged samples": torch.randn(3, 37, 40),
    "short samples": torch.randn(5, 35, 24),
    "one sample": torch.randn(1, 150, 72),
    "rows farther apart": torch.randn(2, 40, 96)[..., :60],
    "samples farther apart": torch.randn(2, 80, 32)[:, ::2],
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_fused_gradients(name: str, granularity: str) -> None:
    quantizer = granularity, 0, "hashed", ()
    assert_copied("grad_output_operands", GRADIENTS[name], *ROW, "int4", *quantizer, *LOW, "int8", *quantizer, True)


@pytest.mark.parametrize("granularity", ["row", "block", "tile"])
def test_fused_operands(granularity: str) -> None:
    quantizer = "int8", granularity, 0 if granularity == "row" else 32, "hashed", ()
    assert_copied("transform_quantize", torch.randn(1, 100, 40).permute(2, 0, 1), *LOW, *quantizer)
    if granularity != "tile":
        assert_copied("transform_quantize", torch.randn(40, 3, 64), *LOW, *quantizer)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 40, 33),
        torch.randn(5, 7, 24),
        torch.randn(1, 1, 48).expand(2, 40, 48),
        torch.randn(2 * 40 * 48 + 1)[1:].view(2, 40, 48),
    ],
)
def test_what_no_engine_copies_fused(x: Tensor) -> None:
    """Rows that are no units of 16 bytes apart, samples that would leave tiles empty, rows that lie on each other, or that begin
    between such units."""
    quantizer = "row", 0, "hashed", ()
    assert_copied("grad_output_operands", x, *ROW, "int4", *quantizer, *LOW, "int8", *quantizer, True, copies=False)
