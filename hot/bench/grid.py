"""Where HOT's backward overtakes torch's: a grid of layers, measured for the crossover table of a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from hot.bench.candidates import BACKWARD, plan_of
from hot.bench.layers import DTYPES, Bench
from hot.bench.shapes import Layer, linear
from hot.bench.timing import FEWEST
from hot.crossover import Point
from hot.policies.plan import LayerPlan, Skip

TOKENS = (196, 784, 3136, 12544, 50176)
FEATURES = (256, 768, 1536, 4096)
BATCHES = (1, 4, 16, 64, 256)
PIXELS = 14
CHANNELS = (64, 256, 512, 1024)
MOST_ON_CPU = 3e10
"""Multiply-adds of the backward that a layer of the grid may have on a CPU."""


def layers(device: str) -> list[list[Layer]]:
    """Linear layers, then 1×1 and 3×3 convolutions on maps of 14×14: lists of layers that differ in the tokens alone."""
    most = MOST_ON_CPU if device == "cpu" else math.inf
    found = [[linear(t, o, i) for t in TOKENS] for o, i in product(FEATURES, FEATURES)]
    for kernel, o, c in product((1, 3), CHANNELS, CHANNELS):
        found.append(
            [Layer(f"{kernel}x{kernel} {b}x{c}-{o}", (b, c, PIXELS, PIXELS), o, kernel=kernel) for b in BATCHES]
        )
    return [[layer for layer in row if 2 * layer.tokens * layer.outputs * layer.inputs <= most] for row in found]


def points(
    bench: Bench, seconds: float = 110.0, progress: Callable[[Point], None] = lambda point: None
) -> tuple[list[Point], bool]:
    """The points that a crossover table needs, for every policy, and whether the grid was finished before the time was up.

    The largest of a list comes first, then the others from the smallest on. Left out is a layer no smaller than one where HOT
    won, and one no larger than one where it lost: the verdict is taken to be the same. So is one that could not run. On CUDA
    graphs are replayed, so that it is the GPU's time: in a step the host runs ahead of it.
    """
    found: list[Point] = []
    graph = bench.device.type == "cuda"
    end = time.monotonic() + seconds
    for (name, policy), row in product(bench.policies.items(), layers(bench.device.type)):
        quick = replace(bench, policies={name: policy}, baselines=(), peers=False, repeats=FEWEST, seconds=0.0)
        for layer in [*row[-1:], *row[:-1]]:
            plan = plan_of(layer, policy)
            if isinstance(plan, Skip) or _is_decided(layer, plan, found):
                continue
            if time.monotonic() > end:
                return found, False
            own = next(each for each in quick.rows(layer, graph=graph, passes=(BACKWARD,)) if each.candidate == name)
            ratio = getattr(own, f"vs_{DTYPES[bench.dtype]}")
            if ratio is not None:
                found.append(Point(layer.kind, str(plan), bench.dtype, *_sizes(layer), ratio))
                progress(found[-1])
    return found, True


def _sizes(layer: Layer) -> tuple[int, int, int]:
    """(tokens, outputs, inputs) as a crossover table has them: a convolution's inputs are its channels."""
    return layer.tokens, layer.outputs, layer.weight[1]


def _is_decided(layer: Layer, plan: LayerPlan, points: Sequence[Point]) -> bool:
    """Whether HOT won on a layer that is no larger in any size, or lost on one that is no smaller."""
    sizes = _sizes(layer)
    for point in points:
        if (point.kind, point.plan) == (layer.kind, str(plan)):
            pairs = list(zip(point.sizes, sizes, strict=True))
            if all(a <= b for a, b in pairs) if point.ratio >= 1 else all(a >= b for a, b in pairs):
                return True
    return False
