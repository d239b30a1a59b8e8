"""`hot list`: what is registered, under which name."""

from __future__ import annotations

import inspect
import re
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def listing(
    kind: Annotated[
        str | None, typer.Argument(help="transform, quantizer, kernel, preset, …; all if left out.")
    ] = None,
    pattern: Annotated[str, typer.Argument(help="Names that match a shell pattern: 'hadamard*'.")] = "*",
) -> None:
    """List what is registered: transforms, quantizers, buffers, backends, kernels, ops, presets, models, …"""
    from hot.errors import UnknownNameError, did_you_mean
    from hot.registry import failed_plugins

    kinds = _kinds()
    wanted = kinds
    if kind is not None:
        wanted = {name: entries for name, entries in kinds.items() if _bare(name) == _bare(kind)}
        if not wanted:
            raise UnknownNameError(
                f"unknown kind {kind!r}{did_you_mean(kind, kinds) or '.'} Known: {', '.join(sorted(kinds))}"
            )
    table = Table(show_header=False, box=None, pad_edge=False)
    for column in (True, True, False):
        table.add_column(no_wrap=column)
    for name, entries in sorted(wanted.items()):
        for entry in _matching(entries, pattern):
            table.add_row(name, f"[bold]{escape(entry)}[/]", escape(entries[entry]))
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)
    for plugin, reason in failed_plugins.items():
        Console(stderr=True, soft_wrap=True).print(
            f"plug-in {plugin} failed to import: {reason}", style="red", markup=False
        )


def _bare(kind: str) -> str:
    """A kind without case, spaces and plural: ``data sets`` and ``dataset`` are one."""
    return "".join(c for c in kind.lower() if c.isalpha()).removesuffix("s")


def _matching(entries: dict[str, str], pattern: str) -> list[str]:
    return sorted(name for name in entries if fnmatchcase(name, pattern))


def _kinds() -> dict[str, dict[str, str]]:
    """Every kind of thing with a name: what it holds and one line on each. A registry anywhere joins by existing."""
    import hot.checking
    import hot.train  # noqa: F401  both bring registries of their own
    from hot.backends import OPS
    from hot.policies.presets import preset_folder, preset_names
    from hot.registry import registries

    kinds = {registry.kind: {name: _first_line(registry[name]) for name in registry} for registry in registries}
    kinds["op"] = {name: _first_line(op) for name, op in OPS.items()}
    kinds["preset"] = {name: _first_comment((preset_folder() / f"{name}.yaml").read_text()) for name in preset_names()}
    return {kind: entries for kind, entries in kinds.items() if entries}


def _first_line(entry: Any) -> str:
    """One line on an entry: whether a backend runs here, what a kernel's op does, else its docstring's first line."""
    from hot.backends import OPS, Backend, Kernel, Op

    if isinstance(entry, Backend):
        available, reason = entry.availability()
        return reason if available else f"not available: {reason}"
    described = OPS[entry.op].fake if isinstance(entry, Kernel) else entry.fake if isinstance(entry, Op) else entry
    return (inspect.getdoc(described) or "").strip().split("\n", 1)[0]


def _first_comment(text: str) -> str:
    """The first sentence of the comment that a YAML file begins with."""
    comment = [line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), text.splitlines())]
    return re.split(r"(?<=[a-z0-9)])\. ", " ".join(comment), maxsplit=1)[0]
