"""`hot memory`: what a whole training step of a workload holds and takes, variant by variant."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def memory(
    config: Annotated[
        str, typer.Argument(help="A configuration: vit-b16, resnet50, bert-base, llama-1b, … or a file.")
    ],
    policy: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A policy beside torch's own ways, instead of the configuration's. Repeatable."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Instead of the configuration's.")] = None,
    variant: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Only that one: fp32, tf32, bf16, 'bf16 + checkpointing' or a policy. Repeatable."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; the GPU if there is one.")] = None,
    budget: Annotated[str | None, typer.Option(metavar="24GiB", help="Find the largest batch that fits, too.")] = None,
    estimate_only: Annotated[
        bool, typer.Option("--estimate-only", help="Run nothing: only the analytic estimate.")
    ] = False,
    per_op: Annotated[
        bool, typer.Option("--per-op", help="What every module and op of the model saves, estimated.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=3, help="Steps that are timed.")] = 8,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A PNG: time against memory."),
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", help="A CSV file to append to."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    allow_plugins: Annotated[bool, typer.Option("--allow-plugins", help="Let a policy run code of yours.")] = False,
) -> None:
    """Measure a whole training step, forward to optimizer: bytes saved, peak allocated, peak reserved, and time.

    In float32, TF32, bf16 autocast, bf16 with gradient checkpointing, and bf16 under policies, beside an analytic estimate.
    """
    from hot import crossover
    from hot.bench.records import check_csv, environment, write_csv
    from hot.bench.steps import TORCH, Row, Variant, fits_budget, largest_batch, load_config, measure_step
    from hot.bench.timing import place
    from hot.errors import HotError
    from hot.estimate import PASSES, estimate
    from hot.policies.schema import load_policy

    found = load_config(config)
    size, where = batch or found.batch, place(device)
    limit = None if budget is None else _bytes(budget)
    policies = {name: load_policy(name, allow_plugins=allow_plugins) for name in policy or found.policies}
    variants = [*TORCH, *(Variant(name, low=True, policy=each) for name, each in policies.items())]
    if where.type == "cpu":
        variants = [each for each in variants if not each.tf32]
    names = [each.name for each in variants]
    if unknown := [name for name in variant or [] if name not in names]:
        raise HotError(f"--variant {unknown[0]!r}: choose from {', '.join(names)}")
    variants = [each for each in variants if variant is None or each.name in variant]
    about = environment(where)
    points = crossover.read(str(about["device"]))
    estimates = ["estimated_saved", "estimated_peak", "published_saved", *(f"bops_{path}" for path in PASSES)]
    columns = [*about, *Row.__dataclass_fields__, *estimates, "largest_batch", "estimated_batch"]
    if output is not None:
        check_csv(output, columns)
    rows: list[dict[str, Any]] = []
    with Console(stderr=True).status("") as status:
        for each in variants:
            status.update(f"{found.name}, batch {size}: {each.name}")
            guess = estimate(found.workload, each, size, points)
            row = Row(found.name, size, each.name)
            if not estimate_only:
                row = measure_step(found.workload, found.name, each, size, where, repeats)
            largest = guessed = None
            if limit is not None:

                def is_estimated_to_fit(b: int, each: Variant = each, limit: int = limit) -> bool:
                    return estimate(found.workload, each, b, points).peak <= limit

                guessed = largest_batch(is_estimated_to_fit)
                if not estimate_only:
                    largest = largest_batch(fits_budget(found.workload, each, limit, where), max(guessed, 1))
            estimated = {
                "estimated_saved": guess.saved,
                "estimated_peak": guess.peak,
                "published_saved": guess.published,
            }
            operations = {f"bops_{path}": guess.bops[path] for path in PASSES}
            batches = {"largest_batch": largest, "estimated_batch": guessed}
            rows.append({**about, **asdict(row), **estimated, **operations, **batches})
            if output is not None:
                write_csv(output, rows[-1:])
    if plot is not None:
        if estimate_only:
            raise HotError("--plot shows what was measured: leave --estimate-only out")
        _plot(rows, plot)
    if as_json:
        Console(soft_wrap=True).print_json(json.dumps(rows))
        return
    _show(found.name, size, where.type, rows, limit)
    if estimate_only:
        _show_operations(rows)
    if per_op:
        for each in variants:
            _show_ops(each.name, estimate(found.workload, each, size, points).by_op)


def _bytes(text: str) -> int:
    """``24GiB``, ``80GB``, ``500MiB`` in bytes."""
    from hot.errors import HotError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", text.strip())
    if match is None or not float(match[1]):
        raise HotError(f"--budget {text!r} is no size: write 24GiB, 80GB or 500MiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** (" KMGT".index(match[2])))


def _show(name: str, batch: int, device: str, rows: list[dict[str, Any]], limit: int | None) -> None:
    titles = ["variant", "saved", "by layers", "peak allocated", "peak reserved", "step, ms", "estimated saved", "peak"]
    if device == "cpu":
        titles[3] = "growth of the process"
    if limit is not None:
        titles += ["largest batch", "estimated"]
    table = Table(*titles, title=f"{name}, batch {batch}; GiB", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        keys = ["saved", "saved_in_layers", "peak_allocated", "peak_reserved"]
        cells = [row["variant"], *(_gib(row[key]) for key in keys)]
        cells += [
            f"{row['p50_ms']:.1f}" if row["p50_ms"] else "",
            _gib(row["estimated_saved"]),
            _gib(row["estimated_peak"]),
        ]
        if limit is not None:
            cells += ["" if row[key] is None else str(row[key]) for key in ("largest_batch", "estimated_batch")]
        table.add_row(*cells)
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)
    for row in rows:
        if row["reason"]:
            console.print(f"{row['variant']}: {escape(row['reason'])}", highlight=False)


def _show_operations(rows: list[dict[str, Any]]) -> None:
    titles = ["variant", "forward", "grad_input", "grad_weight", "saved as papers count it, GiB"]
    table = Table(*titles, title="bit operations of linear and conv layers, 10¹²", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        operations = [v for name, v in row.items() if name.startswith("bops_")]
        table.add_row(row["variant"], *(f"{value / 1e12:.3g}" for value in operations), _gib(row["published_saved"]))
    Console().print(table)


def _gib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**30:.2f}" if value >= 2**26 else f"{value / 2**30:.4f}"


def _show_ops(name: str, by_op: dict[tuple[str, str], int]) -> None:
    table = Table("module", "op", "MiB", title=f"saved under {name}", title_justify="left")
    table.columns[2].justify = "right"
    for (module, op), size in by_op.items():
        table.add_row(module or "(the model itself)", op, f"{size / 2**20:.2f}")
    Console().print(table)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from hot.errors import HotError

    try:
        import matplotlib
    except ImportError as error:
        raise HotError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for row in rows:
        if row["peak_allocated"] is not None:
            at = row["peak_allocated"] / 2**30, row["p50_ms"]
            axes.scatter(*at)
            axes.annotate(row["variant"], at, textcoords="offset points", xytext=(6, 4))
    axes.set(xlabel="peak allocated, GiB", ylabel="step, ms", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"{rows[0]['workload']}, batch {rows[0]['batch']}, {rows[0]['device']}")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise HotError(f"{path} can't be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)
