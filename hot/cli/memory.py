"""`hot memory`: what a whole training step of a workload holds and takes, variant by variant."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console


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
        bool, typer.Option("--per-op", help="What every module and op saves; estimated with --estimate-only.")
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
    allow_plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="Let the configuration, and its policies, run code of yours.")
    ] = False,
) -> None:
    """Measure a whole training step, forward to optimizer: bytes saved, peak allocated, peak reserved, and time.

    In float32, TF32, bf16 autocast, bf16 with gradient checkpointing, and bf16 under policies, beside an analytic estimate.
    """
    from hot import crossover
    from hot.bench.budget import fits_budget, largest_batch
    from hot.bench.records import check_csv, environment, write_csv
    from hot.bench.steps import TORCH, Row, Variant, load_config, measure_ops, measure_step
    from hot.bench.timing import place
    from hot.cli.memory_report import plot as draw
    from hot.cli.memory_report import show, show_estimates, show_operations, show_ops
    from hot.errors import HotError
    from hot.estimate import PASSES, Estimate, estimate
    from hot.policies.schema import load_policy

    if plot is not None and estimate_only:
        raise HotError("--plot shows what was measured: leave --estimate-only out")
    found = load_config(config, allow_plugins=allow_plugins)
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
    guesses: dict[str, Estimate] = {}
    by_op: dict[str, dict[tuple[str, str], int]] = {}
    with Console(stderr=True).status("") as status:
        for each in variants:
            status.update(f"{found.name}, batch {size}: {each.name}")
            guess = guesses[each.name] = estimate(found.workload, each, size, points)
            row = Row(found.name, size, each.name)
            if not estimate_only:
                row = measure_step(found.workload, found.name, each, size, where, repeats)
            if per_op:
                by_op[each.name] = guess.by_op if estimate_only else measure_ops(found.workload, each, size, where)
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
        draw(rows, plot)
    if as_json:
        for row_ in rows if per_op else []:
            found_ops = by_op[row_["variant"]].items()
            row_["by_op"] = [{"module": module, "op": op, "bytes": size} for (module, op), size in found_ops]
        Console(soft_wrap=True).print_json(json.dumps(rows))
        return
    show(found.name, size, found.workload.unit, where.type, rows)
    if estimate_only:
        show_estimates(guesses)
    for name, sizes in by_op.items():
        if sizes:  # or memory ran out
            show_ops(name, sizes, "estimated" if estimate_only else "measured")
        if estimate_only:
            show_operations(name, guesses[name])


def _bytes(text: str) -> int:
    """``24GiB``, ``80GB``, ``500MiB`` in bytes."""
    from hot.errors import HotError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", text.strip())
    if match is None or not float(match[1]):
        raise HotError(f"--budget {text!r} is no size: write 24GiB, 80GB or 500MiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** (" KMGT".index(match[2])))
