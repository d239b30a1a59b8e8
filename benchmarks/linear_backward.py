"""Backward of one linear layer under several policies, against torch's dense backward, in one run.

    python benchmarks/linear_backward.py          # (2048, 3072, 768) on the CPU, as in README
    python benchmarks/linear_backward.py --shape 16384 4096 4096 --device cuda --dtype bfloat16 --output results.csv

The policies take turns in every round, so that a machine that slows down slows down all of them. Times are those of
torch.autograd.grad from the output to input, weight and bias; packing the input in forward is timed apart.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hot

COLUMNS = [
    "date",
    "device",
    "driver",
    "torch",
    "threads",
    "T",
    "O",
    "I",
    "dtype",
    "policy",
    "what",
    "p20_ms",
    "p50_ms",
    "p80_ms",
    "vs_dense",
]


def timed(run: Callable[[], object], device: str) -> float:
    """Milliseconds of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def device_name(device: str) -> tuple[str, str]:
    """(name, driver)."""
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return torch.cuda.get_device_name(), subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return (model or [platform.processor()])[0], ""


def measure(
    shape: tuple[int, int, int], policies: list[str], device: str, dtype: torch.dtype, rounds: int
) -> list[dict]:
    """One row a policy and pass; ``dense`` is torch's own layer."""
    tokens, outputs, inputs = shape
    torch.manual_seed(0)
    x = torch.randn(tokens, inputs, device=device, dtype=dtype).requires_grad_()
    g = torch.randn(tokens, outputs, device=device, dtype=dtype)
    layers = {}
    for policy in ["dense", *policies]:
        layers[policy] = nn.Linear(inputs, outputs, device=device, dtype=dtype)
        if policy != "dense":
            hot.convert(layers[policy], hot.load_policy(policy))
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 2):
        for policy, layer in layers.items():
            holder: list[torch.Tensor] = []
            forward = timed(lambda layer=layer, holder=holder: holder.append(layer(x)), device)
            wanted = [x, *layer.parameters()]
            backward = timed(lambda y=holder[0], wanted=wanted: torch.autograd.grad(y, wanted, g), device)
            if turn >= 2:  # the first two warm up
                times.setdefault((policy, "forward"), []).append(forward)
                times.setdefault((policy, "backward"), []).append(backward)
    name, driver = device_name(device)
    rows = []
    for (policy, what), samples in times.items():
        p20, p50, p80 = (statistics.quantiles(samples, n=10)[at] for at in (1, 4, 7))
        dense = statistics.median(times["dense", what])
        figures = [f"{value:.3f}" for value in (p20, p50, p80)]
        where = [datetime.date.today().isoformat(), name, driver, torch.__version__, torch.get_num_threads(), *shape]
        row = [*where, str(dtype).removeprefix("torch."), policy, what, *figures, f"{dense / p50:.2f}"]
        rows.append(dict(zip(COLUMNS, row, strict=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=[2048, 3072, 768], metavar=("T", "O", "I"))
    parser.add_argument("--policies", nargs="+", default=["int8", "hot", "hot-paper"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help="a CSV file to append to")
    args = parser.parse_args()
    rows = measure(tuple(args.shape), args.policies, args.device, getattr(torch, args.dtype), args.rounds)
    for row in rows:
        print(f"{row['policy']:>10} {row['what']:>8}  p50 {row['p50_ms']:>9} ms  {row['vs_dense']:>5}× dense")
    if args.output:
        new = not args.output.exists()
        with args.output.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
