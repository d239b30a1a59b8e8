"""Where HOT's backward overtakes torch's: a grid of layers, measured for the crossover table of a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product

from hot.bench.candidates import BACKWARD, plan_of
from hot.bench.layers import DTYPES, Bench
from hot.bench.shapes import Layer, linear
from hot.bench.timing import FEWEST
from hot.crossover import Point
from hot.policies.plan import Skip

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
    bench: Bench, seconds: float = 300.0, progress: Callable[[Point], None] = lambda point: None
) -> tuple[list[Point], bool]:
    """The points of a crossover table, for every policy, and whether the grid was finished before the time was up.

    Left out is a layer that could not run. On CUDA graphs are replayed, so that it is the GPU's time: in a step the host runs
    ahead of it.
    """
    found: list[Point] = []
    graph = bench.device.type == "cuda"
    end = time.monotonic() + seconds
    for (name, policy), row in product(bench.policies.items(), layers(bench.device.type)):
        quick = replace(bench, policies={name: policy}, baselines=(), peers=False, repeats=FEWEST, seconds=0.0)
        for layer in row:
            plan = plan_of(layer, policy)
            if isinstance(plan, Skip):
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
