"""`hot check`: every registered kernel against the meaning of its op in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from hot.checking import Row


def check(
    backend: Annotated[str | None, typer.Option(help="One backend; all that run here if left out.")] = None,
    op: Annotated[str | None, typer.Option(help="One op.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; all there are if left out.")] = None,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Run a Python file of yours that registers kernels; repeatable."),
    ] = None,
    big: Annotated[bool, typer.Option("--big", help="Tensors of more than 2³¹ elements too (GPU, 60 GiB).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every dtype and layout by itself.")] = False,
) -> None:
    """Compare every kernel with its op in float64, over dtypes, layouts and edge values; exit code 1 if one fails."""
    from hot.checking import check as run
    from hot.registry import load_plugin_file

    for path in plugin or []:
        load_plugin_file(path)
    with Console(stderr=True).status("checking") as status:
        rows = run(
            backend,
            op,
            device,
            large=big,
            progress=lambda row: status.update(f"{row.backend} {row.op} {row.dtype} {row.layout}"),
        )
    failed = [row for row in rows if not row.ok]
    if as_json:
        Console(soft_wrap=True).print_json(json.dumps([row.to_dict() for row in rows]))
    else:
        _print_table(rows)
        _print_failure(failed)
    if failed:
        raise typer.Exit(1)


def _print_table(rows: list[Row]) -> None:
    """One line for each op, backend and device; error and limit are those of its worst row."""
    table = Table()
    for column in ("op", "backend", "device", "dtypes", "layouts"):
        table.add_column(column)
    for column in ("cases", "skipped", "error", "limit"):
        table.add_column(column, justify="right")
    table.add_column("")
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.backend, row.device), []).append(row)
    for name, members in groups.items():
        worst = max(members, key=lambda row: (not row.ok, row.error / (row.limit or 1.0)))
        failed = sum(not row.ok for row in members)
        verdict = "[green]ok[/]" if any(row.cases for row in members) else "[yellow]serves no case[/]"
        table.add_row(
            *name,
            str(len({row.dtype for row in members})),
            str(len({row.layout for row in members})),
            str(sum(row.cases for row in members)),
            str(sum(row.skipped for row in members)),
            f"{worst.error:.3g}",
            f"{worst.limit:.3g}",
            f"[red]{failed} of {len(members)} failed[/]" if failed else verdict,
        )
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)


def _print_failure(failed: list[Row]) -> None:
    """The first failing case, and how to get its arguments."""
    if not failed:
        return
    first = failed[0]
    console = Console(soft_wrap=True)
    console.print(f"{first.backend} on {first.device}: {first.failure}", markup=False, highlight=False)
    if first.cases:
        name = first.failure.split(" ", 1)[0]
        console.print(
            f"its arguments: hot.checking.find_case({name!r}, {first.device!r}).args", markup=False, highlight=False
        )
