"""Every kernel on inputs of a chosen size, against copy bandwidth, or torch's product, in the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hot.backends import OPS, REFERENCE, Ops, backends, ops_for
from hot.bench.cases import Inputs, cases
from hot.bench.timing import Call, Candidate, Failed, copy_candidate, measure, sets_for
from hot.errors import HotError, UnknownNameError, did_you_mean

MEGABYTES = {"cuda": 256.0, "cpu": 4.0}
"""The size of the input, unless another is chosen."""


@dataclass(frozen=True)
class Row:
    """One kernel on one case. megabytes: the least that must be moved, each input read once and each output written once.

    gb_per_s, vs_copy: those bytes over the time, and over the bandwidth of a copy; a product has instead tflops, which counts
    2·M·N·K, and vs_torch, how much faster it is than torch's product of that shape in `dtype`. reason: why there is no number.
    """

    op: str
    case: str
    backend: str
    dtype: str
    megabytes: float
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    gb_per_s: float | None = None
    vs_copy: float | None = None
    tflops: float | None = None
    vs_torch: float | None = None
    reason: str = ""


def bench(
    names: Sequence[str],
    op: str | None,
    device: torch.device,
    megabytes: float | None = None,
    progress: Callable[[Row], None] = lambda row: None,
    repeats: int = 25,
    seconds: float = 5.0,
) -> list[Row]:
    """Time the kernels of some backends (none: all that run on the device) for one op, or for all; on CUDA by graph replays.

    The reference's own include the compositions of the fused ops. Raises UnknownNameError for an unknown name, BackendError for
    a backend that is missing here, HotError for a size that is not above 0 or where there is nothing to time.
    """
    if op is not None and op not in OPS:
        raise UnknownNameError(f"unknown op {op!r}{did_you_mean(op, OPS) or '.'} Known: {', '.join(sorted(OPS))}")
    if megabytes is not None and not 0 < megabytes < math.inf:
        raise HotError(f"--size {megabytes:g} must be above 0: megabytes of input")
    served = {name: ops_for(name, device.type) for name in names or backends_on(device.type)}
    inputs = Inputs(megabytes or MEGABYTES[device.type], device)
    copy, copied = copy_candidate(device)
    rows = []
    for each in [op] if op else OPS:
        able = {name: ops for name, ops in served.items() if has_kernel(ops, each)}
        for case, make in cases(each, inputs) if able else []:
            for row in _measure(each, case, make, able, inputs, copy, copied, repeats, seconds):
                rows.append(row)
                progress(row)
    if not rows:
        raise HotError(f"nothing to time: backend {', '.join(served)} has no kernel for op {op}; leave --op out")
    return rows


def backends_on(device: str) -> list[str]:
    """The names of the backends that can run on a device type."""
    return [name for name in backends if device in backends[name].devices and backends[name].availability()[0]]


def has_kernel(ops: Ops, op: str) -> bool:
    """Whether a backend has a kernel for an op; the reference's own are the compositions too."""
    return bool(ops.kernels[op]) or (ops.backend == REFERENCE and OPS[op].composition is not None)


def serves(ops: Ops, op: str, args: Sequence[Any]) -> bool:
    """Whether a backend's own kernel takes these arguments, or the reference's composition."""
    return any(kernel.supports(*args) for kernel in ops.kernels[op]) or (
        ops.backend == REFERENCE and has_kernel(ops, op)
    )


def _measure(
    op: str,
    case: str,
    make: Callable[[], tuple[Any, ...]],
    able: Mapping[str, Ops],
    inputs: Inputs,
    copy: Candidate,
    copied: int,
    repeats: int,
    seconds: float,
) -> Iterator[Row]:
    """One case on every backend, the yardstick beside them."""
    first = make()
    moved = least_bytes(op, first)
    sets = [first, *(make() for _ in range(sets_for(moved, inputs.device) - 1))]

    def kernel(ops: Ops) -> Candidate:
        return lambda number: partial(getattr(ops, op), *sets[number])

    def product(number: int) -> Call:
        (m, k), n = sets[number][0].shape, sets[number][3].shape[0]
        return partial(torch.mm, inputs.values(m, k), inputs.values(n, k).T)

    yardstick = {"": product if op == "matmul" else copy}
    candidates = {name: kernel(ops) for name, ops in able.items() if serves(ops, op, first)}
    on_gpu = inputs.device.type == "cuda"  # replays: the device's time, not what a host takes to launch
    timings = measure(
        yardstick | candidates, inputs.device, sets=len(sets), repeats=repeats, seconds=seconds, graph=on_gpu
    )
    limit = timings[""]
    for name in able:
        found = timings.get(name, Failed("the kernel does not take these arguments"))
        where = (op, case, name, str(inputs.dtype).removeprefix("torch."), moved / 1e6)
        if isinstance(found, Failed) or isinstance(limit, Failed):
            yield Row(*where, reason=found.reason if isinstance(found, Failed) else "no yardstick")
            continue
        row = Row(*where, found.p20, found.p50, found.p80)
        if op == "matmul":
            flop = 2 * first[0].numel() * first[3].shape[0]
            yield replace(row, tflops=flop / found.p50 / 1e9, vs_torch=limit.p50 / found.p50)
        else:
            speed = moved / found.p50 / 1e6
            yield replace(row, gb_per_s=speed, vs_copy=speed / (copied / limit.p50 / 1e6))


def least_bytes(op: str, args: Sequence[Any]) -> int:
    """The bytes of every tensor that an op is given, and of those that its fake promises."""
    result = OPS[op].fake(*args)
    outputs = result if isinstance(result, tuple) else (result,)
    return sum(t.numel() * t.element_size() for t in (*args, *outputs) if isinstance(t, Tensor))
