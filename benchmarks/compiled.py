"""A training step's forward and backward, eager and compiled, plain and under `hot`: an MLP and a block of ViT-B/16.

python benchmarks/compiled.py benchmarks/results/compiled_h200.csv
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hot
from hot import crossover
from hot.bench.records import environment, write_csv
from hot.bench.timing import Call, Failed, measure, place
from hot.train.models import Block

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 1024-4096-1024, 16384 tokens": (
        lambda: nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)),
        (16384, 1024),
    ),
    "ViT-B/16 block, batch 256": (lambda: Block(768, 12, 4, True, 0.0), (256, 197, 768)),
}


def step(model: nn.Module, x: torch.Tensor) -> Call:
    """Forward and backward of one batch; gradients take the place of the last ones."""
    gradient = torch.randn_like(x)

    def run() -> object:
        x.grad = None
        model.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16):
            y = model(x)
        y.backward(gradient.to(y.dtype))
        return y

    return run


def main() -> None:
    device = place(None)
    rows = []
    for name, (build, shape) in MODELS.items():
        torch.manual_seed(0)
        plain, x = build().to(device), torch.randn(shape, device=device).requires_grad_()
        models = {"exact": plain, "hot": copy.deepcopy(plain)}
        hot.convert(models["hot"], hot.load_policy("hot"))
        steps = {}
        for policy, model in models.items():
            steps[f"{policy}, eager"] = step(model, x)
            steps[f"{policy}, compiled"] = step(torch.compile(model, fullgraph=True), x)
        with crossover.off():
            found = measure({key: lambda _, run=run: run for key, run in steps.items()}, device)
        for key, timing in found.items():
            if isinstance(timing, Failed):
                raise SystemExit(f"{name}, {key}: {timing.reason}")
            milliseconds = {f"{part}_ms": value for part, value in dataclasses.asdict(timing).items()}
            rows.append({**environment(device), "model": name, "candidate": key, **milliseconds})
            print(f"{name}: {key}: {timing.p50:.3f} ms")
    write_csv(Path(sys.argv[1]), rows)


if __name__ == "__main__":
    main()
