"""What a comparison came to: a table for people, curves as a picture, and figures over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from hot.errors import HotError
from hot.train.checkpoint import read_metrics, write_atomic

Summary = Mapping[str, Any]

FIGURES: dict[str, Callable[[Summary], float | None]] = {
    "accuracy, %": lambda s: 100 * s["accuracy"],
    "test loss": lambda s: s["loss"],
    "training loss": lambda s: s["train_loss"],
    "step, ms": lambda s: s["step_ms"]["total"],
    "  forward, ms": lambda s: s["step_ms"]["forward"],
    "  backward, ms": lambda s: s["step_ms"]["backward"],
    "saved for backward, MiB": lambda s: _mib(s["saved_bytes"]["total"]),
    "  by linear and conv layers, MiB": lambda s: _mib(s["saved_bytes"]["in_layers"]),
    "peak allocated, MiB": lambda s: _mib(s["peak_bytes"].get("allocated")),
    "peak reserved, MiB": lambda s: _mib(s["peak_bytes"].get("reserved")),
    "peak growth of the process, MiB": lambda s: _mib(s["peak_bytes"].get("rss_growth")),
}
"""The rows of the table: heading to value; one that has no value in any run is left out."""


def _mib(value: int | None) -> float | None:
    return None if value is None else value / 2**20


def by_policy(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The runs of each policy, in the order in which the policies came."""
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary["policy"], []).append(summary)
    return groups


def comparison_table(summaries: Sequence[Summary], title: str) -> Table:
    """One column a policy: the mean over its seeds, ± the standard deviation where there are several."""
    groups = by_policy(summaries)
    table = Table("", *(Column(policy, justify="right") for policy in groups), title=title, title_justify="left")
    for name, figure in FIGURES.items():
        if any(figure(summary) is not None for summary in summaries):
            digits = 3 if "loss" in name else 1
            table.add_row(name, *(_cell([figure(run) for run in runs], digits) for runs in groups.values()))
    return table


def _cell(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = f"{statistics.fmean(known):.{digits}f}"
    return mean if len(known) == 1 else f"{mean} ± {statistics.stdev(known):.{digits}f}"


def figure_class() -> type[Any]:
    """matplotlib's Figure, without pyplot: no display, no global state. Raises HotError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HotError(f"the curves need matplotlib ({error}): pip install 'hot-training[train]'") from error
    return Figure


def plot_curves(runs: Mapping[str, Path], path: Path, title: str) -> None:
    """Training loss and test accuracy over the steps, one line a run: name to its metrics file. Writes a PNG."""
    figure = figure_class()(figsize=(11, 4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for name, metrics in runs.items():
        lines = read_metrics(metrics)
        for axes, kind, key in ((loss, "train", "loss"), (accuracy, "eval", "accuracy")):
            points = [(line["step"], line[key]) for line in lines if line["kind"] == kind and line[key] is not None]
            axes.plot(*zip(*points, strict=True), label=name, marker="." if kind == "eval" else None)
    loss.set(xlabel="step", ylabel="training loss", yscale="log", title=title)
    accuracy.set(xlabel="step", ylabel="test accuracy")
    accuracy.legend()
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=120))
