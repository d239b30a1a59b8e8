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
    policy: Annotated[str | None, typer.Option(help="The policy to start from; the experiment's if left out.")] = None,
    batches: Annotated[int, typer.Option(min=1, help="How many batches of training data to look at.")] = 4,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights to calibrate with: a checkpoint of hot train.")
    ] = None,
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
    from hot.train.checkpoint import load_checkpoint
    from hot.train.loop import Run

    experiment = load_experiment(config, settings or [], allow_plugins=allow_plugins)
    start = load_policy(policy or experiment.policy, allow_plugins=allow_plugins)
    run = Run(experiment, load_policy("exact"), "calibrate", experiment.seeds[0], output.parent, experiment.data.load())
    if checkpoint is not None:
        run.model.load_state_dict(load_checkpoint(checkpoint)["model"])
    epochs = (divmod(step, run.steps_per_epoch) for step in range(batches))
    choices = measure(run.model, start, (run.batch(*at) for at in epochs), lambda _, batch: run.loss(*batch))
    chosen = with_choices(start, choices)
    first = len(chosen.rules) - len(choices)
    save_policy(chosen, output, comments={first + at: str(choice) for at, choice in enumerate(choices)})
    console = Console(soft_wrap=True)
    for choice in choices:
        console.print(f"{choice.layer}: {choice}", markup=False, highlight=False)
    console.print(f"written: {output}", markup=False, highlight=False)
