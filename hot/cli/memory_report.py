"""What `hot memory` shows: tables, and a plot of time against memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hot.estimate import PASSES, Estimate

Sizes = Mapping[tuple[str, str], int]
"""Bytes by module and op."""


def show(name: str, batch: int, unit: str, device: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line a variant: what was measured, and what was estimated, as a multiple of that. Columns with nothing are left out."""
    gpu = device == "cuda"
    lines = []
    for row in rows:
        time = row["p50_ms"]
        lines.append(
            {
                "variant": row["variant"],
                "saved": _gib(row["saved"]),
                "by layers": _gib(row["saved_in_layers"]),
                "peak allocated" if gpu else "growth of the process": _gib(row["peak_allocated"]),
                "peak reserved": _gib(row["peak_reserved"]),
                "step, ms": f"{time:.1f}" if time else "",
                f"{unit}/s": f"{1e3 * batch / time:.0f}" if time else "",
                "estimated saved": _compared(row["estimated_saved"], row["saved"]),
                # A process grows by more than its tensors.
                "estimated peak": _compared(row["estimated_peak"], row["peak_allocated"] if gpu else None),
                "largest batch": "" if row["largest_batch"] is None else str(row["largest_batch"]),
                "estimated batch": "" if row["estimated_batch"] is None else str(row["estimated_batch"]),
            }
        )
    titles = [title for title in lines[0] if any(line[title] for line in lines)]
    table = _table(f"{name}, batch {batch}; GiB", titles)
    for line in lines:
        table.add_row(*(line[title] for title in titles))
    _print(table)
    for row in rows:
        if row["reason"]:
            Console().print(f"{row['variant']}: {escape(row['reason'])}", highlight=False)


def show_estimates(guesses: Mapping[str, Estimate]) -> None:
    """What the peak is made of, and bit operations."""
    parts = ["weights", "gradients", "moments", "inputs", "saved", "peak"]
    memory = _table("estimated memory, GiB", ["variant", *parts, "saved as papers count it"])
    operations = _table("bit operations of linear and conv layers, 10¹²", ["variant", *PASSES])
    for name, guess in guesses.items():
        memory.add_row(name, *(_gib(getattr(guess, part)) for part in parts), _gib(guess.published))
        operations.add_row(name, *(f"{guess.bops[path] / 1e12:.4g}" for path in PASSES))
    _print(memory)
    _print(operations)


def show_operations(name: str, guess: Estimate) -> None:
    """Bit operations by layer."""
    table = _table(f"bit operations under {name}, 10⁹", ["layer", *PASSES])
    for layer, of in guess.bops_by_layer.items():
        table.add_row(layer or "(the model itself)", *(f"{of[path] / 1e9:.3g}" for path in PASSES))
    _print(table)


def pattern(module: str) -> str:
    """A module's name with * for the numbers in it, as the `match` of a policy's rule has them."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def show_ops(name: str, sizes: Sizes, how: str) -> None:
    """What each module and op saves, the most first. Modules that differ in numbers alone, as blocks do, are one line, written
    as the `match` of a policy's rule. how: measured or estimated."""
    groups: dict[tuple[str, str], list[int]] = {}
    for (module, op), size in sizes.items():
        groups.setdefault((pattern(module), op), []).append(size)
    total = sum(sizes.values())
    table = _table(f"saved under {name}, {how}", ["module", "op", "modules", "MiB", "share"], words=2)
    for (module, op), found in sorted(groups.items(), key=lambda group: -sum(group[1])):
        share = f"{100 * sum(found) / total:.1f} %"
        table.add_row(module or "(the model itself)", op, str(len(found)), f"{sum(found) / 2**20:.2f}", share)
    _print(table)


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A PNG with a point a variant. Raises HotError without matplotlib, or where the file can't be written."""
    from hot.errors import HotError

    try:
        import matplotlib
    except ImportError as error:
        raise HotError("--plot needs matplotlib: pip install 'hot-training[train]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for row in rows:
        if row["peak_allocated"] is not None:
            at = row["peak_allocated"] / 2**30, row["p50_ms"]
            axes.scatter(*at, label=f"{row['variant']}: {at[0]:.1f} GiB, {at[1]:.0f} ms")
    axes.set(xlabel="peak allocated, GiB", ylabel="step, ms", xlim=(0, None), yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    axes.set_title(f"{rows[0]['workload']}, batch {rows[0]['batch']}, {rows[0]['device']}")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise HotError(f"{path} can't be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _table(title: str, columns: Sequence[str], words: int = 1) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[words:]:
        column.justify = "right"
    return table


def _print(table: Table) -> None:
    Console(width=None if Console().is_terminal else 180).print(table)


def _gib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**30:.2f}" if value >= 2**26 else f"{value / 2**30:.4f}"


def _compared(estimated: int, measured: int | None) -> str:
    return _gib(estimated) + (f" ×{estimated / measured:.2f}" if measured else "")
