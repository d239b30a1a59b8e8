"""Files that are whole or not there at all, and where a user's own are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file through a temporary one beside it: whoever looks sees the old file or the whole new one.

    Raises what `write` or the file system raises; the temporary file is gone then and the old file untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def cache_folder() -> Path:
    """Where what was measured on this machine is kept: ``$HOT_CACHE``, else ``hot`` in the user's cache folder."""
    own = os.environ.get("HOT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hot"


def slug(name: str) -> str:
    """A device's name as that of a file: ``NVIDIA H200`` → ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder durable, where the platform has a way to."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
