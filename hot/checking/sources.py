"""Where the values of the cases come from: one seed, every layout, values that hurt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hot.backends.ops import code_dtype
from hot.checking.oracles import levels
from hot.hadamard import random_signs, sequency_order

DTYPES = ("float32", "float64", "bfloat16", "float16")
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")
EDGES = ("zeros", "zero row", "nan", "inf", "-inf", "denormal", "huge", "constant")
Args = dict[str, Any]


def lay_out(t: Tensor, layout: str) -> Tensor:
    """t with other strides; ``expanded`` repeats its first row, the others keep every value. Gaps hold NaN or 77."""
    if layout == "transposed":
        return t.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "sliced":
        wide = t.new_empty([2 * n + 1 for n in t.shape])
        wide.fill_(float("nan") if t.is_floating_point() else 77)
        view = wide[tuple(slice(1, 2 * n + 1, 2) for n in t.shape)]
        return view.copy_(t)
    return t[:1].expand(t.shape) if layout == "expanded" and t.shape[0] else t


class Source:
    """Tensors of one dtype and layout on one device, from a generator with a fixed seed."""

    def __init__(self, dtype: str, layout: str, device: torch.device) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.layout, self.device = layout, device
        self.generator = torch.Generator("cpu").manual_seed(DTYPES.index(dtype) * 100 + LAYOUTS.index(layout))

    def place(self, t: Tensor) -> Tensor:
        """t on the device, in the layout."""
        return lay_out(t.to(self.device), self.layout)

    def values(self, shape: tuple[int, ...], edge: str = "normal") -> Tensor:
        """Floats: normal ones whose rows differ in size, and what the edge does to them, in the first row."""
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        info = torch.finfo(self.dtype)
        if x.numel():
            x *= torch.logspace(-1, 1, shape[0], dtype=torch.float64, device="cpu").view(-1, *[1] * (len(shape) - 1))
            middle = (0, *(n // 2 for n in shape[1:]))
            if edge == "zeros":
                x.zero_()
            elif edge == "zero row":
                x[-1] = 0.0
            elif edge in ("nan", "inf", "-inf"):
                x[middle] = float(edge)
            elif edge == "denormal":
                x *= info.smallest_normal / 64
            elif edge == "huge":
                x = x.clamp(-1, 1) * min(info.max, 1e36)
            elif edge == "constant":
                x.fill_(1.375)
        return self.place(x.to(self.dtype))

    def ties(self, shape: tuple[int, int], limit: float, group: int) -> Tensor:
        """Odd halves of a step of 2⁻³ in every group, for integer codes up to limit: every v is an integer or a tie."""
        x = (
            torch.randint(-2 * int(limit), 2 * int(limit) + 1, shape, generator=self.generator, device="cpu").double()
            / 16
        )
        x[:, :: group or shape[1]] = limit / 8
        x[0] = limit / 8
        return self.place(x.to(self.dtype))

    def codes(self, shape: tuple[int, int], format: str, extreme: bool = False) -> Tensor:
        """Codes of a format, drawn from all of them; extreme: the largest, one sign a row."""
        table = levels(format)
        pick = torch.randint(0, len(table), shape, generator=self.generator, device="cpu")
        if extreme:
            pick = (torch.arange(shape[0], device="cpu") % 2 * (len(table) - 1))[:, None].expand(shape)
        return self.place(table[pick].to(code_dtype(format)))

    def scales(self, shape: tuple[int, int]) -> Tensor:
        """Positive float32 scales."""
        return (torch.rand(shape, generator=self.generator, device="cpu") + 0.01).to(self.device)

    def columns(self, count: int) -> Tensor:
        """A float32 number of every column; float64 where the values are."""
        x = torch.randn(count, generator=self.generator, dtype=torch.float64, device="cpu")
        return x.to(self.device, torch.float64 if self.dtype == torch.float64 else torch.float32)

    def transform(
        self, block: int, rank: int = 0, *, signs: bool = False, prefix: int = 0, tail: str = "pad", drawn: bool = False
    ) -> Args:
        """The arguments of a block transform; rank 0 keeps every row, drawn picks `rank` of them at random."""
        rows = tuple(range(block)) if drawn or not rank else sequency_order(block)[:rank]
        draw = torch.randperm(block, generator=self.generator, device="cpu")[:rank].to(self.device) if drawn else None
        return {
            "block": block, "rows": rows, "signs": random_signs(block, 3) if signs else (),
            "prefix": prefix, "tail": tail, "draw": draw,
        }  # fmt: skip


def quantizer(
    format: str, granularity: str = "row", group: int = 0, rounding: str = "nearest", clip: tuple[float, ...] = ()
) -> Args:
    """The arguments of a quantizer."""
    return {"format": format, "granularity": granularity, "group": group, "rounding": rounding, "clip": clip}
