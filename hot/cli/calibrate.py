"""`hot calibrate`: choose each layer's scale granularity from a few batches of an experiment's data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console


def calibrate(
    config: Annotated[
        str, typer.Argument(help="An experiment: a name that comes with HOT (quickstart), or a YAML file.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The policy file to write.")],
    policy: Annotated[
        Optional[str], typer.Option(help="The policy to start from; the experiment's if left out.")
    ] = None,  # noqa: UP045
    batches: Annotated[int, typer.Option(min=1, help="How many batches of training data to look at.")] = 4,
    checkpoint: Annotated[
        Optional[Path], typer.Option(help="Weights to calibrate with: a checkpoint of hot train.")
    ] = None,  # noqa: UP045
    settings: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the experiment. Repeatable."),
    ] = None,
    allow_plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="Let experiment and policy run code of yours.")
    ] = False,
) -> None:
    """Write a policy with one rule a layer: the granularity of grad_weight's gradient, and the figures that decided it."""
    from hot.calibrate import measure, with_choices
    from hot.policies.save import save_policy
    from hot.policies.schema import load_policy
    from hot.train import load_experiment
    from hot.train.loop import Task

    experiment = load_experiment(config, settings or [], allow_plugins=allow_plugins)
    start = load_policy(policy or experiment.policy, allow_plugins=allow_plugins)
    task = Task(experiment, experiment.seeds[0], experiment.data.load())
    if checkpoint is not None:
        task.load_weights(checkpoint)
    choices = measure(task.model, start, task.first_batches(batches), lambda model, batch: task.loss(model, *batch))
    chosen = with_choices(start, choices)
    first = len(chosen.rules) - len(choices)
    save_policy(chosen, output, comments={first + at: str(choice) for at, choice in enumerate(choices)})
    console = Console(soft_wrap=True)
    for choice in choices:
        console.print(f"{choice.layer}: {choice}", markup=False, highlight=False)
    console.print(f"written: {output}", markup=False, highlight=False)
