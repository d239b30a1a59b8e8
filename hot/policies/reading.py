"""One reading of a policy document and of everything that it names: parents, policies of rules, plug-ins.

Every problem is collected, cited where it was written, and raised at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hot.errors import HotError, did_you_mean
from hot.policies.activations import ACTIVATIONS, EVERYTHING_RAW
from hot.policies.blocks import EXACT, SHAPE, build, build_plan, checked
from hot.policies.match import Matcher, parse_match
from hot.policies.merge import merge
from hot.policies.plan import LayerPlan
from hot.policies.presets import find_policy, not_found, preset_names
from hot.policies.yaml_source import Mark, Node, Problems, read_yaml
from hot.registry import load_plugin_file

KEYS = ("version", "description", "extends", "backend", "defaults", "rules", "activations", "plugins")


@dataclass(frozen=True)
class Rule:
    """What changes for the layers that `match` speaks of. With `policy` they start anew from that policy's defaults.

    changes: what the rule writes of a plan's tree. start: the defaults of `policy`. mark: where `match` was written. A rule
    under `activations` is one too, without a policy.
    """

    match: Matcher
    changes: Node
    policy: str | None = None
    optional: bool = False
    start: Node | None = field(default=None, compare=False, repr=False)
    mark: Mark = field(default=Mark(), compare=False, repr=False)

    def apply(self, tree: Node) -> Node:
        """The tree of a layer after this rule."""
        return merge(tree if self.start is None else self.start, self.changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as a policy file holds it."""
        policy = {} if self.policy is None else {"policy": self.policy}
        optional = {"optional": True} if self.optional else {}
        return {"match": self.match.plain(), **optional, **policy, **self.changes.plain()}


@dataclass(frozen=True)
class Document:
    """The root of a document, the folder that its paths are relative to, and its file if it has one."""

    root: Node
    folder: Path
    path: Path | None = None


@dataclass(frozen=True)
class Flat:
    """A document on top of its parents, before the last checks."""

    tree: Node = EXACT
    backend: str = "auto"
    rules: tuple[Rule, ...] = ()
    activations: tuple[Rule, ...] = ()
    plugins: tuple[str, ...] = ()
    description: str = ""


class Reading:
    """Reads documents and collects what is wrong with them. Files under ``plugins:`` run only if `allow_plugins`."""

    def __init__(self, allow_plugins: bool) -> None:
        self.allow_plugins = allow_plugins
        self.problems = Problems()

    def open(self, name: str, folder: Path, mark: Mark) -> Document | None:
        """The document of a preset or path that was written at `mark`."""
        path = find_policy(name, folder)
        if path is None:
            self.problems.add(mark, not_found(name, folder))
            return None
        root = read_yaml(path, self.problems)
        return None if root is None else Document(root, path.parent, path.resolve())

    def flatten(self, document: Document, parent: Flat | None = None, chain: tuple[Path, ...] = ()) -> Flat:
        """A document on top of its parent, given or named by `extends`; `chain` are the files that extend it."""
        fields = self.problems.fields(document.root, KEYS)
        flat = parent or self._parent(fields.get("extends"), document, chain)
        self._version(fields.get("version"))
        plugins = self._plugins(fields.get("plugins"), document.folder)  # before the kinds that they may register
        tree = checked(fields["defaults"], SHAPE, self.problems) if "defaults" in fields else None
        description = self._string(fields.get("description"))
        return Flat(
            flat.tree if tree is None else merge(flat.tree, tree),
            self._backend(fields.get("backend")) or flat.backend,
            (*flat.rules, *self._rules(fields.get("rules"), document.folder)),
            (*flat.activations, *self._rules(fields.get("activations"), document.folder, ACTIVATIONS, ())),
            tuple(dict.fromkeys((*flat.plugins, *plugins))),
            description or "",
        )

    def check(self, flat: Flat) -> LayerPlan:
        """The checks on merged values: the defaults, and each rule on the defaults or on them and an earlier rule.

        What all rules of a layer make together is known when a model is. Returns the plan of the defaults.

        Raises PolicyError if this or anything before it found a problem.
        """
        plan = build_plan(flat.tree, flat.backend, self.problems)
        trees = [flat.tree]
        for rule in flat.rules:
            if not any(build_plan(rule.apply(tree), flat.backend, Problems()) for tree in trees):
                build_plan(rule.apply(flat.tree), flat.backend, self.problems)
            trees.append(rule.apply(flat.tree))
        trees = [EVERYTHING_RAW]
        for rule in flat.activations:
            if not any(self._is_sound(rule.apply(tree)) for tree in trees):
                build(rule.apply(EVERYTHING_RAW), ACTIVATIONS, self.problems)
            trees.append(rule.apply(EVERYTHING_RAW))
        self.problems.raise_any()
        assert plan is not None  # there would have been a problem
        return plan

    @staticmethod
    def _is_sound(tree: Node) -> bool:
        problems = Problems()
        build(tree, ACTIVATIONS, problems)
        return not len(problems)

    def _parent(self, node: Node | None, document: Document, chain: tuple[Path, ...]) -> Flat:
        name = self._string(node)
        if node is None or name is None:
            return Flat()
        if document.path is not None:
            chain = (*chain, document.path)
        found = self.open(name, document.folder, node.mark)
        if found is not None and found.path in chain:
            names = [path.name for path in (*chain[chain.index(found.path) :], found.path)]
            self.problems.add(node.mark, f"extends itself: {' → '.join(names)}")
            return Flat()
        return Flat() if found is None else self.flatten(found, chain=chain)

    def _string(self, node: Node | None) -> str | None:
        return node.value if node is not None and self.problems.expect(node, str) else None

    def _list(self, node: Node | None) -> list[Node]:
        return node.value if node is not None and self.problems.expect(node, list) else []

    def _version(self, node: Node | None) -> None:
        if node is not None and self.problems.expect(node, int) and node.value != 1:
            self.problems.add(node.mark, f"must be 1, the only version there is, not {node.value}")

    def _backend(self, node: Node | None) -> str | None:
        from hot.backends.table import AUTO, backends  # here: policies know no backend, only which names there are

        name = self._string(node)
        if node is not None and name is not None and name != AUTO and name not in backends:
            known = [AUTO, *backends.names()]
            nearest = did_you_mean(name, known) or f"; it is one of {', '.join(known)}"
            self.problems.add(node.mark, f"unknown backend {name!r}{nearest}")
        return name

    def _plugins(self, node: Node | None, folder: Path) -> list[str]:
        paths = []
        for child in self._list(node):
            name = self._string(child)
            if name is None:
                continue
            path = (folder / name).resolve()
            paths.append(str(path))
            if not self.allow_plugins:
                how = "if you trust it, pass allow_plugins=True, or --allow-plugins on the command line"
                self.problems.add(child.mark, f"plug-in {name!r} is code and was not run; {how}")
            elif not path.is_file():
                self.problems.add(child.mark, f"there is no plug-in file {str(path)!r}")
            else:
                try:
                    load_plugin_file(path)
                except HotError as error:
                    self.problems.add(child.mark, str(error))
        return paths

    def _rules(
        self, node: Node | None, folder: Path, shape: Any = SHAPE, more: tuple[str, ...] = ("policy",)
    ) -> list[Rule]:
        """Rules that change trees of a shape, and may have some more keys."""
        return [rule for child in self._list(node) if (rule := self._rule(child, folder, shape, more)) is not None]

    def _rule(self, node: Node, folder: Path, shape: Any, more: tuple[str, ...]) -> Rule | None:
        before = len(self.problems)
        fields = self.problems.fields(node, ("match", *more, "optional", *shape))
        changes = checked(replace(node, value={k: v for k, v in fields.items() if k in shape}), shape, self.problems)
        start = self._start(fields.get("policy"), folder)
        match = parse_match(fields["match"], self.problems) if "match" in fields else None
        optional = fields.get("optional")
        if optional is not None:
            self.problems.expect(optional, bool)
        if len(self.problems) == before:
            if match is None:
                whom = "layers" if shape is SHAPE else "modules"
                self.problems.add(node.mark, f"match is missing: of which {whom} does the rule speak?")
            elif not fields.keys() - {"match", "optional"}:
                self.problems.add(node.mark, f"changes nothing; give it one of {', '.join((*more, *shape))}")
        if match is None or changes is None or len(self.problems) > before:
            return None
        policy, tree = start or (None, None)
        return Rule(match, changes, policy, optional is not None and optional.value, tree, fields["match"].mark)

    def _start(self, node: Node | None, folder: Path) -> tuple[str, Node] | None:
        """What `policy:` of a rule names, a preset or an absolute path, and the defaults that its layers start from."""
        name = self._string(node)
        document = self.open(name, folder, node.mark) if node is not None and name is not None else None
        if document is None or name is None or not isinstance(document.root.value, dict):
            return None
        rest = {
            key: child for key, child in document.root.value.items() if key != "rules"
        }  # which name policies in turn
        flat = self.flatten(replace(document, root=replace(document.root, value=rest)))
        return name if name in preset_names() else str(document.path), flat.tree
