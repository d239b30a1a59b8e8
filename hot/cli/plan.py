"""`hot plan`: what a policy makes of every layer of a model."""

from __future__ import annotations

import json
from dataclasses import asdict
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
    dtype: Annotated[Optional[str], typer.Option(help="Cast the model to it: bfloat16, …")] = None,  # noqa: UP045
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="Whose crossover counts, such as nvidia-h200; this machine's if left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    allow_plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="Let the policy and the model's file run code.")
    ] = False,
) -> None:
    """Show each layer's plan, the rule that decided it, what serves its products and the bytes of its input that are saved; or
    why it is left exact: by the policy, or by the measured crossover."""
    from hot.planning import op_rows, plan_rows
    from hot.policies.resolve import resolve_layer
    from hot.policies.schema import load_policy
    from hot.train.models import build_model

    sample = parse_input(input)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    measured_on, points = _crossover(device, here)
    chosen = load_policy(policy, allow_plugins=allow_plugins)
    built = build_model(model, tuple(sample.shape[1:]), classes, allow_code=allow_plugins)
    if dtype is not None:
        built, sample = _cast(built, sample, dtype)
    console = Console(soft_wrap=True)
    if explain is not None:
        found = resolve_layer(chosen, built, explain)
        texts = [*map(str, found.steps), _served(found.plan, here)]
        if points:  # else the model need not run
            rows = plan_rows(chosen, built, sample, device=here, points=points)
            verdict = next(row.verdict for row in rows if row.name == explain)
            texts.append(f"on {measured_on}: {verdict or 'no point of the crossover is for this layer'}")
        for text in texts:
            console.print(text, markup=False, highlight=False)
        return
    rows = plan_rows(chosen, built, sample, device=here, points=points)
    ops = op_rows(chosen, built, sample, points)
    if as_json:
        everything = {"layers": [row.to_dict() for row in rows], "ops": [asdict(row) for row in ops]}
        console.print_json(json.dumps(everything))
        return
    crossover = f"{len(points)} points" if points else "none measured"
    title = f"{policy} on {model}, input {tuple(sample.shape)} {sample.dtype}; crossover of {measured_on}: {crossover}"
    _print_table(rows, title)
    _print_ops(ops)


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


def _cast(model: torch.nn.Module, sample: torch.Tensor, name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Both in a floating dtype; a sample of integers stays. Raises HotError for any other name."""
    from hot.errors import HotError

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise HotError(f"--dtype {name!r} is not a floating dtype, such as float32 or bfloat16")
    return model.to(dtype), sample.to(dtype) if sample.is_floating_point() else sample


def _crossover(name: str | None, here: str) -> tuple[str, Any]:
    """The device whose crossover counts and its points, none if nobody asked for it by name and it has no table."""
    from hot.crossover import read, tables
    from hot.errors import HotError, did_you_mean
    from hot.files import slug
    from hot.measured import name_of

    if name is None:
        name = name_of(torch.device(here))
    elif slug(name) not in (known := tables()):
        have = f"there are {', '.join(known)}" if known else "there is none yet: hot bench layers --write-crossover"
        raise HotError(f"--device: no crossover table of {name!r}{did_you_mean(slug(name), known)}; {have}")
    return name, read(name)


def _served(found: Any, device: str) -> str:
    """A plan, or a Skip, in words, and the kernels that serve it here."""
    from hot.planning import serving
    from hot.policies.plan import LayerPlan

    if not isinstance(found, LayerPlan):
        return f"plan: {found}"
    kernels = "\n".join(f"  {stage}: {kernel}" for stage, kernel in serving(found, device).items())
    return f"plan: {found}\nkernels on {device}:\n{kernels}"


def _print_table(rows: list[Any], title: str) -> None:
    from hot.policies.plan import LayerPlan

    table = Table(title=title, title_justify="left")
    for column in ("layer", "grad_input", "grad_weight", "buffer", "products", "decided by"):
        table.add_column(column, overflow="fold")
    table.add_column("saved, after", justify="right", no_wrap=True)
    for row in rows:
        found = row.resolution.plan
        if row.verdict and row.verdict.leaves_exact:
            cells = [str(row.verdict), "", ""]
        elif isinstance(found, LayerPlan):
            cells = [str(found.grad_input), str(found.grad_weight), str(found.buffer)]
        else:
            cells = [str(found), "", ""]
        cells += ["\n".join(dict.fromkeys(row.products.values())), row.resolution.decided_by]
        table.add_row(f"{row.name}\n{row.kind} {row.shape}", *cells, f"{_size(row.before)}\n{_size(row.after)}")
    table.add_section()
    totals = [sum(getattr(row, which) or 0 for row in rows) for which in ("before", "after")]
    table.add_row("all layers", *[""] * 5, "\n".join(map(_size, totals)))
    _print(table)


def _print_ops(rows: list[Any]) -> None:
    """What other ops save; modules that differ in numbers alone, as blocks do, are one line."""
    from hot.cli.memory_report import pattern

    groups: dict[tuple[str, str, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((pattern(row.module), row.op, row.buffer), []).append(row)
    table = Table(
        title="what other ops save beside these inputs, each tensor with the first that keeps it", title_justify="left"
    )
    for column in ("module", "op", "kept as"):
        table.add_column(column, overflow="fold")
    for column in ("modules", "saved", "after"):
        table.add_column(column, justify="right", no_wrap=True)
    for (module, op, buffer), found in groups.items():
        sizes = [_size(sum(getattr(row, which) for row in found)) for which in ("before", "after")]
        table.add_row(module or "(the model itself)", op, buffer, str(len(found)), *sizes)
    table.add_section()
    totals = [_size(sum(getattr(row, which) for row in rows)) for which in ("before", "after")]
    table.add_row("all other ops", "", "", str(len(rows)), *totals)
    _print(table)


def _print(table: Table) -> None:
    """As wide as the terminal, and in files wide enough for every column."""
    Console(width=None if Console().is_terminal else 200).print(table)


def _size(count: int | None) -> str:
    """Bytes in KiB or MiB."""
    if count is None:
        return "–"
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
