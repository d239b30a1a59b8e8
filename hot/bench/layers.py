"""Forward and backward of one layer under policies, against torch's dense layer and other libraries in the same run."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any

import torch

from hot.bench.candidates import BACKWARD, BASELINES, FORWARD, RESERVED, candidates, settled
from hot.bench.shapes import Layer
from hot.bench.timing import Failed, Timing, measure, sets_for
from hot.errors import HotError
from hot.policies.schema import Policy

DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
"""The dtypes that policies run in, and the baseline that has the same."""


@dataclass(frozen=True)
class Row:
    """One candidate in one pass of one layer. vs_…: that baseline's p50 over this one's, so that more is faster.

    packing_share: what part of a policy's forward torch's own, in the same dtype, does not have: saving the codes.
    published_…: µs on an RTX 3090, as the HOT paper has them. reason: why there is no number.
    """

    set: str
    layer: str
    kind: str
    tokens: int | None
    outputs: int | None
    inputs: int | None
    count: int
    dtype: str
    mode: str
    candidate: str
    what: str
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    vs_bf16: float | None = None
    vs_tf32: float | None = None
    vs_fp32: float | None = None
    packing_share: float | None = None
    published_fp_us: float | None = None
    published_hot_us: float | None = None
    reason: str = ""


Timings = Mapping[str, Timing | Failed]


@dataclass(frozen=True)
class Bench:
    """What is measured of every layer, and how. dtype: the policies'; baselines: of BASELINES, that dtype's own comes along;
    as_in_training: a policy leaves a layer to torch where the crossover table of the device says so.

    Raises HotError for another dtype than those of DTYPES, and for a policy that is called as something else is.
    """

    policies: Mapping[str, Policy]
    device: torch.device
    dtype: str
    baselines: tuple[str, ...] = ()
    peers: bool = True
    repeats: int = 25
    seconds: float = 10.0
    as_in_training: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise HotError(f"--dtype {self.dtype!r} can't be measured: use {' or '.join(DTYPES)}")
        if taken := sorted(RESERVED & {*self.policies}):
            raise HotError(f"policy {taken[0]!r} has the name of a baseline or peer: call its file something else")

    @property
    def own(self) -> str:
        """The baseline in the policies' dtype."""
        return DTYPES[self.dtype]

    def rows(
        self, layer: Layer, of: str = "", graph: bool = False, passes: Sequence[str] = (FORWARD, BACKWARD)
    ) -> list[Row]:
        """Every candidate in every pass of a layer of the set `of`. Raises HotError for a graph on the CPU."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        rows: list[Row] = []
        with settled(self.device, self.as_in_training):
            baselines = tuple(dict.fromkeys((self.own, *self.baselines)))
            found = candidates(layer, self.policies, baselines, dtype, self.device, self.peers)
            sets = sets_for(layer.numel * dtype.itemsize, self.device)
            for what in passes:  # forward first: what backward holds would be shared with it, and not be packed
                timings = measure(
                    {name: each[what] for name, each in found.items() if what in each},
                    self.device, sets=sets, repeats=self.repeats, seconds=self.seconds, graph=graph,
                )  # fmt: skip
                rows += self._judge(timings, self._blank(layer, of, "graph" if graph else "eager", what))
        return rows

    def summary(self, rows: Sequence[Row], how: str) -> list[Row]:
        """The layers of some rows as one. how: ``sum``, each as often as its count, or ``geometric mean``."""
        found = []
        for mode, what in dict.fromkeys((row.mode, row.what) for row in rows):
            here = [row for row in rows if (row.mode, row.what) == (mode, what)]
            groups: dict[str, list[Row]] = {}
            for row in here:
                groups.setdefault(row.candidate, []).append(row)
            first = next(iter(groups.values()))
            published: dict[str, Any] = {
                name: geometric_mean(values)
                for name in ("published_fp_us", "published_hot_us")
                if None not in (values := [getattr(row, name) for row in first])
            }
            blank = replace(
                first[0], layer=how, kind="", tokens=None, outputs=None, inputs=None,
                count=sum(row.count for row in first), **published,
            )  # fmt: skip
            found += self._judge({name: _together(own, how) for name, own in groups.items()}, blank)
        return found

    def _blank(self, layer: Layer, of: str, mode: str, what: str) -> Row:
        """The row of a layer before anything was measured."""
        sizes = (layer.tokens, layer.outputs, layer.inputs)
        blank = Row(of, layer.name, layer.kind, *sizes, layer.count, self.dtype, mode, "", what)
        if layer.published is None or what != BACKWARD:
            return blank
        return replace(blank, published_fp_us=layer.published[0], published_hot_us=layer.published[1])

    def _judge(self, timings: Timings, blank: Row) -> list[Row]:
        """The rows of what was measured together."""

        def over(base: str, timing: Timing) -> float | None:
            dense = timings.get(base)
            return dense.p50 / timing.p50 if isinstance(dense, Timing) else None

        rows = []
        for name, timing in timings.items():
            dtype = str(BASELINES[name][0]).removeprefix("torch.") if name in BASELINES else self.dtype
            row = replace(blank, candidate=name, dtype=dtype)
            if isinstance(timing, Failed):
                rows.append(replace(row, reason=timing.reason))
                continue
            own = over(self.own, timing) if row.what == FORWARD and name in self.policies else None
            rows.append(
                replace(
                    row, p20_ms=timing.p20, p50_ms=timing.p50, p80_ms=timing.p80,
                    vs_bf16=over("bf16", timing), vs_tf32=over("tf32", timing), vs_fp32=over("fp32", timing),
                    packing_share=None if own is None else 1 - own,
                )
            )  # fmt: skip
        return rows


def _together(rows: Sequence[Row], how: str) -> Timing | Failed:
    """The times of one candidate on several layers as one."""
    columns = [[getattr(row, name) for row in rows] for name in ("p20_ms", "p50_ms", "p80_ms")]
    if any(None in column for column in columns):
        return Failed("not every layer has a number")
    if how == "sum":
        counts = [row.count for row in rows]
        return Timing(*(sum(map(operator.mul, counts, column)) for column in columns))
    return Timing(*map(geometric_mean, columns))
