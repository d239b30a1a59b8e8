"""What goes with every result: the environment that it was measured in, and the CSV file that keeps it."""

from __future__ import annotations

import csv
import datetime
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hot.errors import HotError
from hot.measured import name_of


def environment(device: torch.device) -> dict[str, str | int]:
    """Date, device, driver (empty on the CPU), torch, triton (empty without it) and threads."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": name_of(device),
        "driver": _driver() if device.type == "cuda" else "",
        "torch": torch.__version__,
        "triton": _triton_version(),
        "threads": torch.get_num_threads(),
    }


def _driver() -> str:
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.split("\n", 1)[0]


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def check_csv(path: Path, columns: Sequence[str]) -> bool:
    """Whether rows with these columns begin a new file. Raises HotError if the file has others, or its folder is missing."""
    if not path.parent.is_dir():
        raise HotError(f"{path}: there is no folder {path.parent}; make it first")
    try:
        if not path.exists() or not path.stat().st_size:
            return True
        with path.open(newline="") as file:
            found = next(csv.reader(file))
    except OSError as error:
        raise HotError(f"{path} can't be read: {error.strerror}") from error
    if found != list(columns):
        raise HotError(f"{path} has the columns {','.join(found)}, not {','.join(columns)}: name another file")
    return False


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Append rows to a CSV file, which is created if need be. None is an empty cell; floats have five digits.

    Raises HotError as `check_csv`, or if the file can't be written.
    """
    if not rows:
        return
    new = check_csv(path, list(rows[0]))
    try:
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    except OSError as error:
        raise HotError(f"{path} can't be written: {error.strerror}") from error


def _cell(value: object) -> object:
    return f"{value:.5g}" if isinstance(value, float) else value
