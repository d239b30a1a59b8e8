"""The measured crossover: the layers for which torch's own backward is faster than a plan's, per device, as data.

A layer does as the nearest measured layer of the same kind, plan and dtype did: it runs under its plan if that was at least as
fast as dense, and is left exact if not. The nearest has the most similar outputs and inputs, by the product of their ratios,
and of those the most similar tokens. (Larger is not always better: a plan may win where its kernels fill the chip once, and
lose above.) Where nothing was measured, nothing is known, and a layer runs under its plan. Only the backend ``auto`` asks.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

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
    """What a table says of one layer: what the nearest measured one did."""

    nearest: Point

    @property
    def leaves_exact(self) -> bool:
        return self.nearest.ratio < 1

    @property
    def figure(self) -> str:
        """``0.80× dense at T×O×I = 2048×768×768``."""
        return f"{self.nearest.ratio:.2f}× dense at T×O×I = {'×'.join(map(str, self.nearest.sizes))}"

    def to_dict(self) -> dict[str, Any]:
        return {"leaves_exact": self.leaves_exact, "nearest": asdict(self.nearest)}

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
    key = _kind(view), str(plan), _name(dtype)
    tokens, *features = _sizes(x_shape, weight_shape, view)
    groups = _groups(points).get(key)
    if groups is None:
        return None
    spans = _most_similar(groups, *features)
    return next(Verdict(point) for low, high, point in spans if low <= tokens < high)


def leaves_exact(x: Tensor, weight: Tensor, plan: LayerPlan, view: View) -> bool:
    """Whether the crossover of x's device leaves a layer exact. Says so once a weight's shape, but in no compiled graph."""
    if _is_off:
        return False
    table = _table(x.device)
    if not table:
        return False
    kind, dtype, sizes = _kind(view), _product_dtype(x), _sizes(x.shape, weight.shape, view)
    groups = table.get((kind, plan.text, _name(dtype)))
    if groups is None:
        return False
    losing = (_most_similar if torch.compiler.is_compiling() else _found_once)(groups, sizes[1], sizes[2])
    if not any(low <= sizes[0] < high for low, high in losing):
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

_Key = tuple[str, str, str]
T = TypeVar("T")
_Groups = tuple[tuple[int, int, T], ...]
"""By outputs and inputs: what is known of such layers."""
_Losing = _Groups[tuple[tuple[float, float], ...]]
_tables: dict[torch.device, dict[_Key, _Losing]] = {}
_said: set[tuple[str, torch.dtype, tuple[int, ...]]] = set()
_is_off = False


def _newest(points: Iterable[Point]) -> tuple[Point, ...]:
    """One point for each layer, the last, in order."""
    newest = {(point.key, point.sizes): point for point in points}
    return tuple(newest[key] for key in sorted(newest))


_Spans = tuple[tuple[float, float, Point], ...]
"""From how many tokens on, and up to how many, which point is the nearest: points change half way, by ratio."""


def _groups(points: Iterable[Point]) -> dict[_Key, _Groups[_Spans]]:
    """The points by key, then by outputs and inputs, with the tokens that each speaks for."""
    found: dict[_Key, dict[tuple[int, int], list[Point]]] = {}
    for point in sorted(points, key=lambda point: point.tokens):
        found.setdefault(point.key, {}).setdefault((point.outputs, point.inputs), []).append(point)

    def spans(group: list[Point]) -> _Spans:
        bounds = [0.0, *(math.sqrt(a.tokens * b.tokens) for a, b in pairwise(group)), math.inf]
        return tuple(zip(bounds[:-1], bounds[1:], group, strict=True))

    return {
        key: tuple((*features, spans(group)) for features, group in groups.items()) for key, groups in found.items()
    }


def _most_similar(groups: _Groups[T], outputs: int, inputs: int) -> T:
    """What is known of the measured layers with the most similar outputs and inputs."""
    least, found = math.inf, groups[0][2]
    for o, i, known in groups:
        unlike = max(o, outputs) / min(o, outputs) * (max(i, inputs) / min(i, inputs))
        if unlike < least:
            least, found = unlike, known
    return found


_found_once = lru_cache(maxsize=4096)(_most_similar)


def _load(device: torch.device) -> dict[_Key, _Losing]:
    name = name_of(device)
    return {
        key: tuple((o, i, tuple(span[:2] for span in spans if span[2].ratio < 1)) for o, i, spans in groups)
        for key, groups in _groups(read(name) if name else ()).items()
    }


def _table(device: torch.device) -> dict[_Key, _Losing]:
    """The tokens with which layers lose, read when a device is first met: a step, compiled or not, only looks them up."""
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
