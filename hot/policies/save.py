"""Policies written to YAML that a person can read, edit and compare."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hot.files import write_whole
from hot.policies.schema import Policy
from hot.policies.yaml_source import core_scalar

PLAIN = re.compile(r"([A-Za-z_]|\.\.?/)[\w./-]*", re.ASCII)
YAML_1_1_BOOLS = ("y", "yes", "n", "no", "on", "off")


def save_policy(policy: Policy, path: str | os.PathLike[str], *, comments: Mapping[int, str] | None = None) -> None:
    """Write a policy, parents included, to a file that loads back to an equal policy. Replaces the file in one step.

    comments: text that stands as ``# …`` above a rule, by the rule's index in ``policy.rules``.
    """
    path = Path(path)
    data = policy.to_dict()
    folder = path.resolve().parent
    data["plugins"] = [_relative(plugin, folder) for plugin in data["plugins"]]
    for rule in data["rules"]:
        if os.path.isabs(rule.get("policy", "")):
            rule["policy"] = _relative(rule["policy"], folder)
    text = "\n".join(_lines(data, comments or {})) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


def _relative(path: str, folder: Path) -> str:
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith("..") else f"./{relative}"


def _lines(data: dict[str, Any], comments: Mapping[int, str]) -> Iterator[str]:
    for key in ("version", "description", "backend", "plugins"):
        if data[key] not in ("", []):
            yield f"{key}: {flow(data[key])}"
    yield "defaults:"
    for key, block in data["defaults"].items():
        if "kind" in block:
            yield f"  {key}: {flow(block)}"
        else:
            yield f"  {key}:"
            yield from (f"    {name}: {flow(child)}" for name, child in block.items())
    yield "rules:" if data["rules"] else "rules: []"
    for i, rule in enumerate(data["rules"]):
        for line in comments.get(i, "").splitlines():
            yield "  # " + "".join(c if c.isprintable() else " " for c in line)
        yield from _rule(rule)
    if data["activations"]:
        yield "activations:"
    for rule in data["activations"]:
        yield from _rule(rule)


def _rule(rule: dict[str, Any]) -> Iterator[str]:
    for key, value in rule.items():
        yield f"  {'-' if key == 'match' else ' '} {key}: {flow(value)}"


def flow(value: Any) -> str:
    """A value on one line of YAML, read back as it is by YAML 1.2 and 1.1."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        is_plain = PLAIN.fullmatch(value) and core_scalar(value) == value and value.lower() not in YAML_1_1_BOOLS
        return value if is_plain else yaml.safe_dump(value, default_style='"', width=1 << 20).strip()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return re.sub("inf|nan", r".\g<0>", repr(value))
