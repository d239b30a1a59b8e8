"""Training with a policy, resumable and side by side: the engine of `hot train`.

Models and data sets of your own: ``@register_model("mine")`` on a subclass of `Model`, ``@register_dataset("mine")`` on
one of `Dataset`; optimizers and schedules alike.
"""

import hot.train.text  # noqa: F401  registers its kinds
from hot.train.compare import run_experiment
from hot.train.config import Experiment
from hot.train.data import Data, Dataset, Examples, datasets, register_dataset
from hot.train.loading import experiment_names, load_experiment
from hot.train.loop import Interrupted
from hot.train.models import Model, register_model
from hot.train.optim import Optimizer, Schedule, optimizers, register_optimizer, register_schedule, schedules
from hot.train.report import comparison_table

__all__ = [
    "Data", "Dataset", "Examples", "Experiment", "Interrupted", "Model", "Optimizer", "Schedule", "comparison_table",
    "datasets", "experiment_names", "load_experiment", "optimizers", "register_dataset", "register_model",
    "register_optimizer", "register_schedule", "run_experiment", "schedules",
]  # fmt: skip
