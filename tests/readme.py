"""README's examples, as the tests run them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from hot.backends import backends, kernels, table
from hot.registry import load_plugin_file

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
FILES = {
    "triton": {"mine.py": "example: triton kernel"},
    "cupy": {"mine.py": "example: cuda kernel", "mine.cu": "example: cuda source"},
}
"""What a kernel of one's own is made of, by the backend of HOT's whose machinery it takes."""


def block(marker: str) -> str:
    """The code block behind ``<!-- marker -->``."""
    found = re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)```", README, re.S)
    assert found, f"README has no {marker!r}"
    return found[1]


def write_kernel(like: str, folder: Path) -> Path:
    """The files of a kernel of one's own: its ``mine.py``."""
    for name, marker in FILES[like].items():
        (folder / name).write_text(block(marker), encoding="utf-8")
    return folder / "mine.py"


@contextmanager
def own_kernel(like: str, folder: Path) -> Iterator[ModuleType]:
    """A kernel of one's own, registered until the end of the block."""
    load_plugin_file(write_kernel(like, folder))
    try:
        function = kernels["mine.pack4"].function
        assert function is not None
        yield sys.modules[function.__module__]
    finally:
        kernels.remove("mine.pack4")
        backends.remove("mine")
        table._ready.clear()
