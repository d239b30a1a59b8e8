"""Every kernel under pytest-benchmark, on the cases of `hot bench kernels`: ``pytest benchmarks/``.

HOT_BENCH_MB: megabytes of input, 1 if unset. Times are the host's, the device's work included; `hot bench kernels` is what
compares them to a copy.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

from hot.backends import OPS, ops_for
from hot.bench.cases import Inputs, cases
from hot.bench.kernels import backends_on, has_kernel, serves
from hot.bench.timing import place

pytest.importorskip("pytest_benchmark")

DEVICE = place(None)
INPUTS = Inputs(float(os.environ.get("HOT_BENCH_MB", 1)), DEVICE)
CALLS = [
    pytest.param(ops, op, make, id=f"{name}-{op}-{case}")
    for name in backends_on(DEVICE.type)
    for ops in [ops_for(name, DEVICE.type)]
    for op in OPS
    if has_kernel(ops, op)
    for case, make in cases(op, INPUTS)
]


@pytest.mark.parametrize(("ops", "op", "make"), CALLS)
def test_kernel(benchmark, ops, op, make) -> None:
    args = make()
    if not serves(ops, op, args):
        pytest.skip("the kernel does not take these arguments")
    kernel = partial(getattr(ops, op), *args)

    def call() -> None:
        kernel()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.group = op
    benchmark(call)
