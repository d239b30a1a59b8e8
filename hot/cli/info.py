"""`hot info`: what this machine has, and why a backend is missing."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from hot.errors import HotError
from hot.measured import Measured, cpuinfo, name_of

PACKAGES = ("hot-training", "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "numpy", "timm", "transformers", "peft")
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8", "asimddp", "i8mm")


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, CPU and GPUs, which backends run here and why others do not, what was measured, and the presets."""
    facts = machine()
    if as_json:
        Console(soft_wrap=True).print_json(json.dumps(facts))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in facts.items():
        lines = [f"{key}: {each}" for key, each in value.items()] if isinstance(value, dict) else value
        shown = "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)
        table.add_row(name, shown or "none")
    console = Console(markup=False, highlight=False)
    Console(width=None if console.is_terminal else 160, markup=False, highlight=False).print(table)


def machine() -> dict[str, Any]:
    """The facts, as plain data."""
    from hot.backends import backends
    from hot.backends.order import FILES as ORDER
    from hot.backends.reference.products import INT_MM_ON_CPU
    from hot.crossover import FILES as CROSSOVER
    from hot.policies.presets import preset_names

    def backend(name: str) -> str:
        available, reason = backends[name].availability()
        return f"{'available' if available else 'missing'} ({', '.join(backends[name].devices)}): {reason}"

    return {
        "versions": _versions(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {
            "model": name_of(torch.device("cpu")),
            "threads": torch.get_num_threads(),
            "instructions": ", ".join(
                flag for flag in CPU_FLAGS if flag in (cpuinfo("flags") or cpuinfo("Features")).split()
            ),
            "integer products": "torch._int_mm"
            if INT_MM_ON_CPU
            else "in float32: torch._int_mm is not exact on this CPU",
        },
        "gpus": _gpus(),
        "backends": {name: backend(name) for name in backends},
        "crossover": _files(CROSSOVER, "points"),
        "order": _files(ORDER, "times"),
        "presets": preset_names(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _files(of: Measured[Any], what: str) -> dict[str, str]:
    """The files of one kind, by the device's slug: how many lines, and whose; or what is wrong with the file."""
    found = {}
    for path in of.files():
        whose = "this user's" if path.parent == of.user_folder() else "packaged"
        try:
            found[path.stem] = f"{len(of.read(path))} {what}, {whose}"
        except HotError as error:
            found[path.stem] = str(error)
    return found


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    driver = _driver()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        f"{p.name}, capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} SMs, "
        f"CUDA {torch.version.cuda}, driver {driver}"
        for p in properties
    ]


def _driver() -> str:
    """The driver's version by nvidia-smi, or ``unknown``."""
    if not shutil.which("nvidia-smi"):
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return result.stdout.split("\n", 1)[0].strip() or "unknown"
