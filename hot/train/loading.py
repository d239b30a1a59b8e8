"""Experiment files to experiments: read strictly, ``--set key=value`` on top, every problem reported with its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hot.errors import HotError
from hot.policies.blocks import NESTED
from hot.policies.configs import find_config, load_plugins, named, names_in, read_config
from hot.policies.presets import preset_folder
from hot.policies.yaml_source import Mark, Node, Problems, from_python, join, read_text, show
from hot.train.config import Experiment
from hot.train.data import Dataset, datasets
from hot.train.models import FromFile, Model, model_spec, models
from hot.train.optim import Optimizer, Schedule, optimizers, schedules

NESTED.update({Model: models, Dataset: datasets, Optimizer: optimizers, Schedule: schedules})  # for `validate`

BLOCKS = ("model", "data", "optimizer", "schedule")
"""The fields of an experiment that are ``{kind: …, **params}``."""

EXPERIMENTS = preset_folder().parent / "experiments"
"""The experiments that come with HOT."""


PATHS = "policy", "compare", "plugins", "model"
"""The keys under which there may be paths."""


def experiment_names() -> list[str]:
    """The names of the experiments that come with HOT."""
    return names_in(EXPERIMENTS)


def load_experiment(name: str, settings: Sequence[str] = (), *, allow_plugins: bool = False) -> Experiment:
    """The experiment of that name, or in that file, with ``key=value`` settings on top (dotted keys, YAML values).

    Relative paths in the file (policies, plug-ins, a model's file) start at its folder, those in settings at the
    current one. Raises PolicyError with every problem, HotError for an unknown name or code that may not run.
    """
    path, problems = find_config(name, EXPERIMENTS, "experiment"), Problems()
    root = read_config(path, PATHS)
    for setting in settings:
        root = _with_setting(root, setting, problems)
    problems.raise_any()
    root = _expanded(root)
    load_plugins(root, allow_plugins)
    experiment = named(Experiment, root, path, "an experiment")
    if isinstance(experiment.model, FromFile) and not allow_plugins:
        raise HotError(f"model: {experiment.model.path} is code that would run; allow it with --allow-plugins")
    return experiment


def _with_setting(root: Node, setting: str, problems: Problems) -> Node:
    """The tree with one ``key=value`` in it. Another `kind` replaces its block whole."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        problems.add(Mark(file=f"--set {setting}"), "must be key=value")
        return root
    value = read_text(text, f"--set {key}", problems)
    if value is None:
        return root
    return _put(_expanded(root), key.split("."), from_python(value.plain(), problems, key), problems)


def _put(node: Node, keys: list[str], leaf: Node, problems: Problems, path: str = "") -> Node:
    if not isinstance(node.value, dict):
        problems.add(leaf.mark, f"{path} is {show(node.value)}, which has no {keys[0]!r}")
        return node
    if not keys[1:]:
        old = node.value.get("kind")
        others = {} if keys == ["kind"] and old is not None and old.value != leaf.value else node.value
        return replace(node, value={**others, keys[0]: leaf})
    inside = Mark(join(path, keys[0]))
    child = node.value.get(keys[0], Node({}, inside, inside))
    return replace(node, value={**node.value, keys[0]: _put(child, keys[1:], leaf, problems, inside.path)})


def _expanded(root: Node) -> Node:
    """The tree with its short forms (``vit``, ``timm:NAME``, ``file.py:build``, ``sgd`` …) and defaults as blocks."""
    blocks = {}
    for key in BLOCKS:
        field = Experiment.model_fields[key]
        node = root.value.get(key) or Node("" if field.is_required() else field.default.kind, Mark(key), Mark(key))
        if isinstance(node.value, str) and node.value:
            block = model_spec(node.value) if key == "model" else {"kind": node.value}
            blocks[key] = replace(node, value={name: replace(node, value=value) for name, value in block.items()})
    return replace(root, value={**root.value, **blocks})
