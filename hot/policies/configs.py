"""Configuration files other than policies: found by name or path, read, and validated; paths in them start at their folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from hot.errors import HotError, did_you_mean
from hot.policies.blocks import validate
from hot.policies.yaml_source import Node, Problems, read_yaml
from hot.registry import load_plugin_file

M = TypeVar("M", bound=BaseModel)


def names_in(folder: Path) -> list[str]:
    """The configurations in a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def find_config(name: str, folder: Path, what: str) -> Path:
    """The path that a name is, or the file of that name in the folder. Raises HotError if there is none."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return Path(name)
    if name not in (known := names_in(folder)):
        raise HotError(
            f"no {what} {name!r}{did_you_mean(name, known) or '.'} Known: {', '.join(known)}; or give a file"
        )
    return folder / f"{name}.yaml"


def read_config(path: Path, paths: Collection[str]) -> Node:
    """The mapping in a file; YAML and Python files under the keys `paths` start at its folder. Raises PolicyError."""
    problems = Problems()
    root = read_yaml(path, problems)
    if root is not None:
        problems.expect(root, dict)
    problems.raise_any()
    assert root is not None  # or there would have been a problem

    def anchored(node: Node) -> Node:
        if isinstance(node.value, list):
            return replace(node, value=[anchored(child) for child in node.value])
        is_path = isinstance(node.value, str) and node.value.partition(":")[0].endswith((".yaml", ".yml", ".py"))
        return replace(node, value=str(path.parent / node.value)) if is_path else node

    return replace(root, value={key: anchored(child) if key in paths else child for key, child in root.value.items()})


def load_plugins(root: Node, allowed: bool) -> None:
    """Import the files under ``plugins``. Raises HotError if there are some and code may not run, or if one fails."""
    paths = root.value["plugins"].plain() if "plugins" in root.value else []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        return  # the schema says what is wrong with them
    if paths and not allowed:
        raise HotError(f"plugins: {', '.join(paths)} is code that would run; allow it with --allow-plugins")
    for path in paths:
        load_plugin_file(Path(path))


def named(model: type[M], root: Node, path: Path, what: str) -> M:
    """What a file's mapping says, with the file's name as its ``name`` where it gives none. Raises PolicyError with every
    problem."""
    problems = Problems()
    name = Node(path.stem, root.mark, root.mark)
    found = validate(model, replace(root, value={"name": name, **root.value}), problems, what)
    problems.raise_any()
    assert found is not None  # or there would have been a problem
    return found
