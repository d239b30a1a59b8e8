"""The measured crossover: the sizes below which torch's own backward is faster than a plan's, per device, as data.

A layer runs under its plan if some measured layer of the same kind, plan and dtype that is no larger in any of tokens, outputs
and inputs was at least as fast as dense. It is left exact if there are such measurements and none was. Where nothing was
measured, nothing is known, and it runs under its plan. Only the backend ``auto`` asks.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hot.files import slug
from hot.measured import Measured, name_of
from hot.policies.plan import LayerPlan
from hot.views import LinearView, View

Sizes = tuple[int, int, int]
"""(tokens, outputs, inputs) of a layer; of a convolution (output pixels, O, C)."""


class CrossoverWarning(UserWarning):
    """A layer was left exact because dense was measured to be faster at its size."""


@dataclass(frozen=True)
class Point:
    """One measured layer. ratio: milliseconds of the dense backward over those of the plan's; 1 and more, the plan wins.

    kind: ``linear``, ``conv1x1``, ``conv3x3``, …; plan: ``str(LayerPlan)``; dtype: that of the product, ``bfloat16``.
    """

    kind: str
    plan: str
    dtype: str
    tokens: int
    outputs: int
    inputs: int
    ratio: float

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.plan, self.dtype

    @property
    def sizes(self) -> Sizes:
        return self.tokens, self.outputs, self.inputs


@dataclass(frozen=True)
class Verdict:
    """What a table says of one layer, and the nearest measured one: of those that make it run, if it runs."""

    leaves_exact: bool
    nearest: Point

    @property
    def figure(self) -> str:
        """``0.80× dense at T×O×I = 2048×768×768``; a faster one that is larger than the layer says ``only at``."""
        only = "only " if self.leaves_exact and self.nearest.ratio >= 1 else ""
        return f"{self.nearest.ratio:.2f}× dense {only}at T×O×I = {'×'.join(map(str, self.nearest.sizes))}"

    def __str__(self) -> str:
        return f"{'exact' if self.leaves_exact else 'runs'}: crossover, {self.figure}"


def judge(
    points: Iterable[Point],
    x_shape: torch.Size,
    dtype: torch.dtype,
    weight_shape: torch.Size,
    plan: LayerPlan,
    view: View,
) -> Verdict | None:
    """The verdict on a layer that gets an x of that shape and multiplies in dtype; None where nothing is known."""
    key, sizes = (_kind(view), str(plan), _name(dtype)), _sizes(x_shape, weight_shape, view)
    known = [point for point in points if point.key == key]
    if not known:
        return None
    reasons = [point for point in known if point.ratio >= 1 and _fits(point.sizes, sizes)]

    def distance(point: Point) -> float:
        return sum(abs(math.log(a / max(b, 1))) for a, b in zip(point.sizes, sizes, strict=True))

    return Verdict(not reasons, min(reasons or known, key=distance))


def leaves_exact(x: Tensor, weight: Tensor, plan: LayerPlan, view: View) -> bool:
    """Whether the crossover of x's device leaves a layer exact. Says so once a weight's shape, but in no compiled graph."""
    if _is_off:
        return False
    table = _table(x.device)
    if not table:
        return False
    kind, dtype, sizes = _kind(view), _product_dtype(x), _sizes(x.shape, weight.shape, view)
    winners = table.get((kind, plan.text, _name(dtype)))
    if winners is None or any(_fits(winner, sizes) for winner in winners):
        return False
    if not torch.compiler.is_compiling() and (kind, dtype, sizes[1:]) not in _said:
        _said.add((kind, dtype, sizes[1:]))
        verdict = judge(read(name_of(x.device)), x.shape, dtype, weight.shape, plan, view)
        warnings.warn(
            f"backend auto leaves {kind} layers of T×O×I = {'×'.join(map(str, sizes))} in {_name(dtype)} to torch: measured on "
            f"this device, {verdict.figure if verdict else ''}; hot plan lists all, and naming a backend runs the plan",
            CrossoverWarning,
            stacklevel=2,
        )
    return True


@contextmanager
def off() -> Iterator[None]:
    """Inside, no layer is left exact by a crossover, on any thread. What checkpoints needs its backward inside as well."""
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


def user_folder() -> Path:
    """Where this user's tables are."""
    return FILES.user_folder()


def tables() -> dict[str, Path]:
    """The file of every device that has one, by the device's slug. A user's own takes the place of the packaged one."""
    return {path.stem: path for path in FILES.files()}


def read(device_name: str) -> tuple[Point, ...]:
    """The table of a device, none if it has no file. Raises HotError, with the line and the fix, for a broken file."""
    path = tables().get(slug(device_name))
    return () if path is None else read_file(path)


def read_file(path: Path) -> tuple[Point, ...]:
    """The points of one file. Of two lines for the same layer the later counts. Raises HotError as `read`."""
    return _newest(FILES.read(path))


def write(points: Iterable[Point], device_name: str, path: Path | None = None) -> Path:
    """Add measured points to the table of a device: the user's, or the file at `path`. Returns the file.

    A point for a layer that the file has already replaces the old one. Raises HotError for a point that could not be read
    again, and if the file to add to is broken; nothing is written then.
    """
    path = path or FILES.own(device_name)
    new = FILES.check(points)
    FILES.write(_newest((*(read_file(path) if path.exists() else ()), *new)), path)
    forget()
    return path


def forget() -> None:
    """Let the next step look for tables again, and say again what it leaves exact."""
    _tables.clear()
    _said.clear()


FILES = Measured(
    "crossover",
    Point,
    {
        "kind": (str, re.compile(r"linear|conv[1-9]\d*x[1-9]\d*").fullmatch, "linear, conv1x1, conv3x3, …"),
        "plan": (str, len, "the text of a plan"),
        "dtype": (str, lambda name: isinstance(getattr(torch, name, None), torch.dtype), "a dtype, such as bfloat16"),
        **dict.fromkeys(("tokens", "outputs", "inputs"), (int, lambda size: size > 0, "a whole number above 0")),
        "ratio": (float, lambda ratio: 0 < ratio < math.inf, "a number above 0"),
    },
    "hot bench layers --write-crossover",
)
assert list(FILES.columns) == [field.name for field in fields(Point)]

_tables: dict[torch.device, dict[tuple[str, str, str], tuple[Sizes, ...]]] = {}
_said: set[tuple[str, torch.dtype, tuple[int, ...]]] = set()
_is_off = False


def _newest(points: Iterable[Point]) -> tuple[Point, ...]:
    """One point for each layer, the last, in order."""
    newest = {(point.key, point.sizes): point for point in points}
    return tuple(newest[key] for key in sorted(newest))


def _fits(measured: Sizes, sizes: Sizes) -> bool:
    """Whether a measured layer is no larger in any size."""
    return measured[0] <= sizes[0] and measured[1] <= sizes[1] and measured[2] <= sizes[2]


def _winners(points: Iterable[Point]) -> tuple[Sizes, ...]:
    """The smallest layers that were at least as fast as dense: whatever any of these fits runs, and nothing else."""
    found = sorted(point.sizes for point in points if point.ratio >= 1)
    return tuple(sizes for sizes in found if not any(_fits(other, sizes) for other in found if other != sizes))


def _load(device: torch.device) -> dict[tuple[str, str, str], tuple[Sizes, ...]]:
    name = name_of(device)
    groups: dict[tuple[str, str, str], list[Point]] = {}
    for point in read(name) if name else ():
        groups.setdefault(point.key, []).append(point)
    return {key: _winners(points) for key, points in groups.items()}


def _table(device: torch.device) -> dict[tuple[str, str, str], tuple[Sizes, ...]]:
    """The winners by kind, plan and dtype, read when a device is first met: a step, compiled or not, only looks them up."""
    if torch.compiler.is_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_load_while_tracing)
    if device not in _tables:
        _tables[device] = _load(device)
    return _tables[device]


def _load_while_tracing(context: Any) -> None:
    """What `_table` does where its frame is traced before it ever ran: the tracer can't read files."""
    device = context.get_local("device").as_python_constant()
    if device not in _tables:
        _tables[device] = _load(device)


def _kind(view: View) -> str:
    return "linear" if isinstance(view, LinearView) else f"conv{view.kernel[0]}x{view.kernel[1]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(x_shape: torch.Size, weight_shape: torch.Size, view: View) -> Sizes:
    if isinstance(view, LinearView):
        return x_shape[:-1].numel(), weight_shape[0], weight_shape[-1]
    left, right, top, bottom = view.pads
    height, width = view.output_size((x_shape[-2] + top + bottom, x_shape[-1] + left + right))
    return x_shape[:-3].numel() * height * width, weight_shape[0], weight_shape[1]


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that the product of x runs in: autocast's where it casts x."""
    device = x.device.type
    casts = x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if casts else x.dtype
