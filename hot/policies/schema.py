"""Policies: what a person writes, in Python or in YAML, checked as a whole and flattened with its parents."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hot.policies.blocks import build_plan, plain
from hot.policies.plan import LayerPlan
from hot.policies.reading import Document, Flat, Reading, Rule
from hot.policies.yaml_source import Mark, Node, Problems, from_python


@dataclass(frozen=True, init=False)
class Policy:
    """What each layer does in backward: defaults, and rules by layer. Flattened: no parent is left to look up.

    Policies with the same effect are equal; where they were written and how they are described does not count.
    """

    backend: str
    defaults: LayerPlan
    rules: tuple[Rule, ...]
    activations: tuple[Rule, ...]
    plugins: tuple[str, ...]
    description: str = field(compare=False)
    tree: Node = field(compare=False, repr=False)

    def __init__(
        self,
        *,
        version: int = 1,
        description: str = "",
        extends: str | os.PathLike[str] | Policy | None = None,
        backend: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        rules: Sequence[Mapping[str, Any]] = (),
        activations: Sequence[Mapping[str, Any]] = (),
        plugins: Sequence[str | os.PathLike[str]] = (),
        allow_plugins: bool = False,
    ) -> None:
        """The keys and checks of a policy file; paths start at the working directory, and `extends` may be a Policy.

        Raises PolicyError with every problem.
        """
        written = {
            "version": version, "description": description, "backend": backend, "defaults": defaults, "rules": rules,
            "activations": activations, "plugins": plugins, "extends": None if isinstance(extends, Policy) else extends,
        }  # fmt: skip
        reading = Reading(allow_plugins)
        root = from_python({key: value for key, value in written.items() if value is not None}, reading.problems)
        parent = None
        if isinstance(extends, Policy):
            parent = Flat(extends.tree, extends.backend, extends.rules, extends.activations, extends.plugins)
        self._fill(reading, reading.flatten(Document(root, Path.cwd()), parent))

    def _fill(self, reading: Reading, flat: Flat) -> None:
        vars(self).update(vars(flat), defaults=reading.check(flat))

    @property
    def is_exact(self) -> bool:
        """Whether the policy leaves every layer, and every other op, of every model as torch has it."""
        if any(block.get("kind") != "raw" for rule in self.activations for block in rule.changes.plain().values()):
            return False
        trees = [self.tree, *(rule.apply(self.tree) for rule in self.rules)]
        plans = [build_plan(tree, self.backend, Problems()) for tree in trees]
        return all(plan is not None and plan.is_exact for plan in plans)

    def with_rules(self, rules: Iterable[Mapping[str, Any]]) -> Policy:
        """This policy with more rules at its end. Raises PolicyError with every problem."""
        return Policy(extends=self, rules=list(rules), description=self.description)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as a policy file without `extends` holds it: ``Policy(**policy.to_dict()) == policy``."""
        return {
            "version": 1,
            "description": self.description,
            "backend": self.backend,
            "plugins": list(self.plugins),
            "defaults": plain(self.tree),
            "rules": [rule.to_dict() for rule in self.rules],
            "activations": [rule.to_dict() for rule in self.activations],
        }


def load_policy(name_or_path: str | os.PathLike[str], *, allow_plugins: bool = False) -> Policy:
    """The policy of a preset or of a YAML file. Raises PolicyError with every problem of the file and of its parents.

    Files under ``plugins:`` run only with ``allow_plugins=True``.
    """
    reading = Reading(allow_plugins)
    name = os.fspath(name_or_path)
    document = reading.open(name, Path(), Mark(file=name))
    if document is None:
        reading.problems.raise_any()
    assert document is not None  # its absence was a problem
    policy = object.__new__(Policy)
    policy._fill(reading, reading.flatten(document))
    return policy
