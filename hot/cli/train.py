"""`hot train`: train with a policy, or with several side by side."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console


def train(
    config: Annotated[
        str, typer.Argument(help="An experiment: a name that comes with HOT (quickstart), or a YAML file.")
    ],
    compare: Annotated[Optional[str], typer.Option(help="Policies to run side by side: exact,lbp-wht,luq")] = None,  # noqa: UP045
    settings: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, dotted keys: optimizer.lr=1e-3. Repeatable."),
    ] = None,
    output: Annotated[Optional[Path], typer.Option(help="Folder of the results; runs/NAME if left out.")] = None,  # noqa: UP045
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoints.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace runs of the same name.")] = False,
    allow_plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="Let the experiment, and its policies, run code of yours.")
    ] = False,
) -> None:
    """Train a model with a policy: progress, metrics as JSON lines, checkpoints to resume from, a table and curves."""
    from hot.train import Interrupted, comparison_table, load_experiment, run_experiment

    changes = list(settings or [])
    if compare is not None:
        changes.append(f"compare=[{compare}]")
    experiment = load_experiment(config, changes, allow_plugins=allow_plugins)
    folder = output or Path(experiment.output or f"runs/{experiment.name}")
    errors = Console(stderr=True, soft_wrap=True)
    try:
        summaries = run_experiment(
            experiment, folder, resume=resume, overwrite=overwrite, allow_plugins=allow_plugins, console=errors
        )
    except Interrupted as interrupted:
        command = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
        errors.print(f"{interrupted}; continue with: hot {shlex.join(command)} --resume", markup=False, highlight=False)
        raise typer.Exit(128 + interrupted.signum) from None
    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(comparison_table(summaries, experiment.name))
    console.print(f"results, metrics and curves: {folder}", highlight=False)
