"""`hot plan`: what a policy makes of every layer of a model."""

from __future__ import annotations

import json
from typing import Annotated, Any, Optional

import torch
import typer
from rich.console import Console
from rich.table import Table


def plan(
    policy: Annotated[str, typer.Argument(help="A preset (hot) or a YAML file.")],
    model: Annotated[str, typer.Option(help="vit, resnet18, timm:NAME, or file.py:build (with --allow-plugins).")],
    input: Annotated[
        str,
        typer.Option(metavar="SHAPE[:DTYPE]", help="The input that bytes are counted for: 8,3,224,224 or 8,128:int64."),
    ] = "1,3,224,224",
    classes: Annotated[int, typer.Option(help="Classes of a model that is built by name.")] = 1000,
    explain: Annotated[Optional[str], typer.Option(metavar="LAYER", help="Show the way to one layer's plan.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    allow_plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="Let the policy and the model's file run code.")
    ] = False,
) -> None:
    """Show each layer's plan, the rule that decided it, the bytes of its input that are saved, or why it is left exact."""
    from hot.planning import plan_rows
    from hot.policies.resolve import resolve_layer
    from hot.policies.schema import load_policy
    from hot.train.models import build_model

    sample = parse_input(input)
    chosen = load_policy(policy, allow_plugins=allow_plugins)
    built = build_model(model, tuple(sample.shape[1:]), classes, allow_code=allow_plugins)
    console = Console(soft_wrap=True)
    if explain is not None:
        found = resolve_layer(chosen, built, explain)
        for text in (*map(str, found.steps), _served(found.plan)):
            console.print(text, markup=False, highlight=False)
        return
    rows = plan_rows(chosen, built, sample)
    if as_json:
        console.print_json(json.dumps([row.to_dict() for row in rows]))
        return
    _print_table(rows, f"{policy} on {model}, input {tuple(sample.shape)}")


def parse_input(text: str) -> torch.Tensor:
    """``8,3,224,224`` or ``8,128:int64`` as an empty meta tensor. Raises HotError for anything else."""
    from hot.errors import HotError

    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or not isinstance(dtype, torch.dtype):
        raise HotError(f"--input {text!r} is not SHAPE[:DTYPE], such as 8,3,224,224 or 8,128:int64")
    return torch.empty(sizes, dtype=dtype, device="meta")


def _served(found: Any) -> str:
    """A plan, or a Skip, in words, and the kernels that serve it here."""
    from hot.planning import serving
    from hot.policies.plan import LayerPlan

    if not isinstance(found, LayerPlan):
        return f"plan: {found}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = "\n".join(f"  {stage}: {kernel}" for stage, kernel in serving(found, device).items())
    return f"plan: {found}\nkernels on {device}:\n{kernels}"


def _print_table(rows: list[Any], title: str) -> None:
    from hot.policies.plan import LayerPlan

    table = Table(title=title, title_justify="left")
    for column in ("layer", "type", "shape", "grad_input", "grad_weight", "buffer", "decided by"):
        table.add_column(column, overflow="fold")
    for column in ("saved before", "after"):
        table.add_column(column, justify="right")
    for row in rows:
        found = row.resolution.plan
        if isinstance(found, LayerPlan):
            cells = [str(found.grad_input), str(found.grad_weight), str(found.buffer)]
        else:
            cells = [str(found), "", ""]
        table.add_row(
            row.name, row.kind, row.shape, *cells, row.resolution.decided_by, _size(row.before), _size(row.after)
        )
    table.add_section()
    totals = [sum(getattr(row, which) or 0 for row in rows) for which in ("before", "after")]
    table.add_row("all layers", "", "", "", "", "", "", *map(_size, totals))
    console = Console()
    Console(width=None if console.is_terminal else 200).print(table)


def _size(count: int | None) -> str:
    """Bytes in KiB or MiB."""
    if count is None:
        return "–"
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
