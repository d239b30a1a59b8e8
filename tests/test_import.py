"""`import hot` needs torch alone, is quick, and works anywhere."""

from __future__ import annotations

import os
import subprocess
import sys


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert not found.stderr.strip(), found.stderr
    return found.stdout.strip()


HEAVY = [
    "triton", "cupy", "typer", "rich", "transformers", "peft", "matplotlib", "sklearn", "mlxtend", "timm", "torchvision", "pandas",
    "safetensors", "hypothesis", "pytest",
]  # fmt: skip


def test_imports_nothing_heavy_and_changes_nothing() -> None:
    """Only what torch itself imports comes along, whatever else is installed; no CUDA context, no global state changed."""
    code = f"""
import sys, torch
torch.manual_seed(3)
state = lambda: (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed(),
                 torch.get_rng_state().sum().item(), torch.backends.cuda.matmul.allow_tf32)
modules, before = set(sys.modules), state()
import hot
new = {{name.split('.')[0] for name in set(sys.modules) - modules}}
assert not new & set({HEAVY!r}), new & set({HEAVY!r})
assert state() == before and not torch.cuda.is_initialized()
print(hot.__version__)
"""
    assert run(code)


def test_is_quick() -> None:
    """Less than a second on top of torch's own import, in one of three tries."""
    code = "import time, torch; start = time.perf_counter(); import hot; print(time.perf_counter() - start)"
    assert any(float(run(code)) < 1.0 for _ in range(3))


def test_works_without_the_extras_and_without_cuda() -> None:
    """Conversion and a step where no optional package can be imported and every GPU is hidden."""
    code = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None
import torch, hot
model = torch.nn.Sequential(torch.nn.Linear(32, 32))
hot.convert(model, hot.load_policy("hot"))
model(torch.randn(4, 20, 32)).sum().backward()
print(model[0].weight.grad.isfinite().all().item(), torch.cuda.is_available())
"""
    assert run(code, CUDA_VISIBLE_DEVICES="-1") == "True False"
