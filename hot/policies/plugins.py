"""Plug-in files that a configuration names, and paths in it, which start at its own folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from hot.errors import HotError
from hot.policies.yaml_source import Node
from hot.registry import load_plugin_file


def anchored(root: Node, folder: Path, keys: Collection[str]) -> Node:
    """The tree with the paths of YAML and Python files under these keys made to start at a folder."""

    def anchor(node: Node) -> Node:
        if isinstance(node.value, list):
            return replace(node, value=[anchor(child) for child in node.value])
        is_path = isinstance(node.value, str) and node.value.partition(":")[0].endswith((".yaml", ".yml", ".py"))
        return replace(node, value=str(folder / node.value)) if is_path else node

    return replace(root, value={key: anchor(child) if key in keys else child for key, child in root.value.items()})


def load_plugins(root: Node, allowed: bool) -> None:
    """Import the files under ``plugins``. Raises HotError if there are some and code may not run, or if one fails."""
    paths = root.value["plugins"].plain() if "plugins" in root.value else []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        return  # the schema says what is wrong with them
    if paths and not allowed:
        raise HotError(f"plugins: {', '.join(paths)} is code that would run; allow it with --allow-plugins")
    for path in paths:
        load_plugin_file(Path(path))
