"""An experiment run: every policy under every seed, from the same weights, over the same order of examples."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hot.errors import HotError
from hot.policies.schema import Policy, load_policy
from hot.train.checkpoint import write_json
from hot.train.config import Experiment
from hot.train.loop import Run, stop_on_signal
from hot.train.report import figure_class, plot_curves


def run_experiment(
    experiment: Experiment,
    output: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_plugins: bool = False,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Train every run of the experiment under `output` and return their summaries; also write summary.json, curves.png.

    A run is a policy and a seed, in the folder ``LABEL-seedN``. resume: what was begun goes on, what is finished stays.
    Raises HotError before any training if a policy is wrong, data is missing, or a folder is taken and neither `resume`
    nor `overwrite` is given; Interrupted after a checkpoint on SIGINT or SIGTERM.
    """
    console = console or Console(stderr=True)
    figure_class()  # what is missing is said before the training, not after
    if resume and overwrite:
        raise HotError("--resume and --overwrite exclude each other")
    policies = {_label(name): load_policy(name, allow_plugins=allow_plugins) for name in experiment.policies}
    if experiment.backend is not None:
        policies = {
            label: Policy(extends=own, backend=experiment.backend, description=own.description)
            for label, own in policies.items()
        }
    if len(policies) < len(experiment.policies):
        raise HotError(f"compare: two of {', '.join(experiment.policies)} have the same file name; rename one")
    runs = {f"{label}-seed{seed}": (label, seed) for label in policies for seed in experiment.seeds}
    taken = [name for name in runs if (output / name).exists()]
    if taken and not (resume or overwrite):
        raise HotError(
            f"{output} holds {', '.join(taken)}: --resume continues, --overwrite starts anew, --output writes elsewhere"
        )
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    data = experiment.data.load()
    summaries = []
    with stop_on_signal() as stop, _progress(console) as bar:
        for name, (label, seed) in runs.items():
            if overwrite:
                shutil.rmtree(output / name, ignore_errors=True)
            run = Run(experiment, policies[label], label, seed, output / name, data)
            run.resume()
            console.print(f"{name}: {str(run.report).splitlines()[0]}", highlight=False)
            task = bar.add_task(name, total=run.steps, completed=run.step, note="")
            summaries.append(run.train(stop, partial(_update, bar, task)))
    write_json(output / "summary.json", {"experiment": experiment.to_dict(), "runs": summaries})
    plot_curves({name: output / name / "metrics.jsonl" for name in runs}, output / "curves.png", experiment.name)
    return summaries


def _update(bar: Progress, task: TaskID, step: int, note: str) -> None:
    bar.update(task, completed=step, note=note)


def _label(policy: str) -> str:
    """What a policy is called in folders and tables: a preset's name, or a file's without its ending."""
    return Path(policy).stem if policy.endswith((".yaml", ".yml")) else policy


def _progress(console: Console) -> Progress:
    """A bar a run; nothing at all where the console is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
