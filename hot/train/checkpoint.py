"""Checkpoints, whole or not there at all, and the metrics that a resumed run continues."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hot.errors import HotError
from hot.files import write_whole

KEEP = 2
"""Checkpoints kept per run: the latest, and the one before it."""


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """`write_whole`, the folder made first. Raises HotError if the file system fails, a full disk above all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_whole(path, write)
    except Exception as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch.save wraps it in a RuntimeError
        if isinstance(cause, OSError):
            raise HotError(f"can't write {path}: {cause.strerror}; what was saved before is untouched") from error
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as indented JSON, atomically; NaN and infinities as null."""
    write_atomic(path, lambda file: file.write((json.dumps(_finite(content), indent=2) + "\n").encode()))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("checkpoint-*.pt"))


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write ``checkpoint-STEP.pt`` (tensors, numbers and strings only) and drop all but the last `KEEP`."""
    path = folder / f"checkpoint-{step:08d}.pt"
    write_atomic(path, lambda file: torch.save(dict(state), file))
    for old in checkpoints(folder)[:-KEEP]:
        old.unlink()
    for torn in folder.glob(".*.tmp"):  # left by a killed process
        torn.unlink()
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU. Runs no code: weights_only. Raises HotError if the file is damaged."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise HotError(f"can't read the checkpoint {path}: {error}; delete it to go on from the one before") from error


class MetricsLog:
    """A file of JSON lines, each written by one system call, so that a killed process leaves whole lines."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Continue after the first `size` bytes: what lies behind belongs to steps that will be run again."""
        if size and (not path.exists() or path.stat().st_size < size):
            raise HotError(f"{path} is shorter than when the checkpoint was written: it can't be continued")
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        self._file.truncate(size)

    def write(self, **line: Any) -> None:
        """Append one object; NaN and infinities as null."""
        content = (json.dumps(_finite(line)) + "\n").encode()
        size = os.fstat(self._file.fileno()).st_size
        try:
            while content:  # a disk that fills up takes a part first, and then says why no more
                content = content[self._file.write(content) :]
        except OSError as error:
            self._file.truncate(size)
            raise HotError(
                f"can't write {self.path}: {error.strerror}; --resume goes on from the last checkpoint"
            ) from error

    def sync(self) -> int:
        """Make all lines durable; the size in bytes, which a checkpoint remembers."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file as objects."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _finite(value: Any) -> Any:
    """The value with null for every float that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
