"""Runs the table: every kernel × device × dtype × layout over the cases of its op."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hot.backends.table import OPS, REFERENCE, Kernel, Ops, backends, kernels, ops_for
from hot.checking import big, compare
from hot.checking.cases import Case, cases, generators
from hot.checking.compare import Verdict, Verdicts
from hot.checking.sources import DTYPES, LAYOUTS
from hot.errors import BackendError, UnknownNameError, did_you_mean

TRANSFORMS = ("hadamard", "project", "expand")
ONE_DTYPE = ("pack4", "unpack4")  # ops on codes alone
COMPARE: dict[str, Callable[[dict[str, Any], Any], Verdicts]] = {
    "quantize": compare.quantize,
    "quantize_pack4": compare.quantize_pack4,
    "dequantize": compare.dequantize,
    "pack4": compare.pack4,
    "unpack4": compare.unpack4,
    "matmul": compare.matmul,
    "transform_quantize": compare.transform_quantize,
    "grad_output_operands": compare.grad_output_operands,
    "activation": compare.activation,
    "activation_backward": compare.activation_backward,
    "norm_backward": compare.norm_backward,
    "batch_norm_backward": compare.batch_norm_backward,
    "batch_norm": compare.batch_norm,
    "pack1": compare.pack1,
    "pass1": compare.pass1,
}


@dataclass(frozen=True)
class Row:
    """What a kernel did on one dtype and layout. error and limit: of `worst`, the verdict nearest to its limit."""

    op: str
    backend: str
    device: str
    dtype: str
    layout: str
    cases: int
    skipped: int
    worst: str
    error: float
    limit: float
    ok: bool
    failure: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data; an infinite error as the string ``inf``, which JSON has no number for."""
        return {**asdict(self), "error": self.error if math.isfinite(self.error) else str(self.error)}


def check(
    backend: str | None = None,
    op: str | None = None,
    device: str | None = None,
    *,
    large: bool = False,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Compare kernels with the meaning of their ops; every argument narrows the table, which `hot check` prints.

    large: more than 2³¹ elements too, on a GPU with 60 GiB. A case that the kernel's `supports` refuses is counted as
    skipped. Runs with full float32 products and its own random state. Raises UnknownNameError for an unknown
    op or backend, BackendError for a backend that is missing or not made for the device, or where no kernel fits.
    """
    if op is not None and op not in OPS:
        raise UnknownNameError(f"unknown op {op!r}{did_you_mean(op, OPS) or '.'} Known: {', '.join(sorted(OPS))}")
    rows = []
    for place in _devices(device):
        with _settled(place):
            for kernel in _kernels(backend, op, place):
                for dtype in DTYPES[:1] if kernel.op in ONE_DTYPE else DTYPES:
                    for layout in LAYOUTS:
                        rows.append(_check(kernel, place, dtype, layout))
                        progress(rows[-1])
                if large and kernel.op in big.CASES and place.type == "cuda":
                    rows.append(_row(kernel, place, "bfloat16", "large", [], 0, big.check(kernel, place)))
                    progress(rows[-1])
    if not rows:
        raise BackendError(
            f"no kernel to check: backend {backend or 'auto'}, op {op or 'any'}, device {device or 'any'}"
        )
    return rows


def _devices(device: str | None) -> list[torch.device]:
    if device is not None:
        return [torch.device(device)]
    return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


@contextmanager
def _settled(device: torch.device) -> Iterator[None]:
    """Full float32 precision, no gradients, the same random numbers every time; all as it was afterwards."""
    precision = torch.get_float32_matmul_precision()
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


def _kernels(backend: str | None, op: str | None, device: torch.device) -> list[Kernel]:
    """The kernels of the backends that can run here. The reference's own include the compositions of the fused ops."""
    if backend is None:
        names = [n for n in backends if device.type in backends[n].devices and backends[n].availability()[0]]
    else:
        names = [backend]
    found = []
    for name in names:
        ops: Ops = ops_for(name, device.type)  # loads the backend, or says why it is missing
        for each in sorted(OPS) if op is None else [op]:
            if (key := f"{name}.{each}") in kernels:
                found.append(kernels[key])
            elif name == REFERENCE and OPS[each].composition is not None:
                found.append(Kernel(each, name, getattr(ops, each), lambda *args: True))
    return found


def _check(kernel: Kernel, device: torch.device, dtype: str, layout: str) -> Row:
    if kernel.op not in generators:
        return _row(
            kernel, device, dtype, layout, [], 0, Verdict(0.0, 0.0, "no cases: see hot.checking.register_cases")
        )
    tried = cases(kernel.op, dtype, layout, device)
    served = [case for case in tried if kernel.supports(*case.args.values())]
    judged = [(case, _judge(kernel, case, device)) for case in served]
    return _row(kernel, device, dtype, layout, judged, len(tried) - len(served), Verdict(0.0, 0.0, ""))


def _row(
    kernel: Kernel,
    device: torch.device,
    dtype: str,
    layout: str,
    judged: list[tuple[Case, Verdict]],
    skipped: int,
    worst: Verdict,
) -> Row:
    worst = max([worst, *(verdict for _, verdict in judged)], key=lambda verdict: verdict.ratio)
    failed = next(
        (f"{case}: {verdict.what}" for case, verdict in judged if not verdict.ok), "" if worst.ok else worst.what
    )
    return Row(
        kernel.op, kernel.backend, str(device), dtype, layout, len(judged), skipped,
        worst.what, worst.error, worst.limit, not failed, failed,
    )  # fmt: skip


def _judge(kernel: Kernel, case: Case, device: torch.device) -> Verdict:
    """The verdict nearest to its limit, or past it, of one case; a kernel that raises is infinitely far off."""
    try:
        got = kernel.call(*case.args.values())
        if difference := _unlike(got, OPS[kernel.op].fake(*case.args.values())):
            return Verdict(math.inf, 0.0, difference)
        if kernel.op in TRANSFORMS:
            return _judge_transform(kernel, case, device, got)
        return max(COMPARE[kernel.op](case.args, got), key=lambda verdict: verdict.ratio)
    except Exception as error:  # whatever a kernel raises is a failure of that kernel, to be shown beside the others
        return Verdict(math.inf, 0.0, f"raised {type(error).__name__}: {error}")


def _unlike(got: Any, fake: Any) -> str:
    """How a result differs in kind from what the op's fake promises, or ""."""

    def kinds(result: Any) -> list[str]:
        tensors = result if isinstance(result, (tuple, list)) else [result]
        return [f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in tensors]

    found, promised = kinds(got), kinds(fake)
    return "" if found == promised else f"returns {', '.join(found)}, expected {', '.join(promised)}"


def _judge_transform(kernel: Kernel, case: Case, device: torch.device, got: torch.Tensor) -> Verdict:
    """The reference by its own limit; another backend by twice the error that the reference makes, or one eps. In float64 the
    oracle's own sums are off by as much as the reference's, so the reference's limit holds for all."""
    error, verdict = compare.transform_error(kernel.op, case.args, got)
    if kernel.backend == REFERENCE:
        return verdict
    own = getattr(ops_for(REFERENCE, device.type), kernel.op)(*case.args.values())
    reference, _ = compare.transform_error(kernel.op, case.args, own)
    limit = 2 * max(reference, 0.5)
    if next(iter(case.args.values())).dtype == torch.float64:
        limit = max(limit, verdict.limit)
    return Verdict(error, limit, verdict.what)
