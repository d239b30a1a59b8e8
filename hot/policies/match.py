"""Which layers a rule speaks of: segment globs, regular expressions, and mappings of conditions."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hot.policies.layers import Scope
from hot.policies.yaml_source import Node, Problems, show

REGEX = "re:"
NUMBERS = ("in_features", "out_features", "in_channels", "out_channels", "groups")
PAIRS = ("kernel_size", "stride", "dilation")
KEYS = ("type", "name", *NUMBERS, *PAIRS, "bias")
COMPARISON = re.compile(r"(>=|<=|!=|>|<)\s*(\d+)")
OPERATORS: dict[str, Callable[[int, int], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


def glob_matches(pattern: str, name: str) -> bool:
    """Whether a segment glob matches a whole layer name: ``*`` is one segment, ``**`` any number of them, even none."""
    if "*" not in pattern:
        return pattern == name
    segments = name.split(".") if name else []
    reached = {0}  # how many segments the parts so far can have matched
    for part in pattern.split("."):
        if part == "**":
            reached = set(range(min(reached), len(segments) + 1)) if reached else set()
        else:
            reached = {i + 1 for i in reached if i < len(segments) and part in ("*", segments[i])}
    return len(segments) in reached


def name_matches(pattern: str, name: str) -> bool:
    """Whether a pattern, a glob or ``re:…``, matches a whole layer name."""
    if pattern.startswith(REGEX):
        return re.fullmatch(pattern[len(REGEX) :], name) is not None
    return glob_matches(pattern, name)


@dataclass(frozen=True)
class Matcher:
    """What `match:` says: conditions, (key, value) with tuples for lists, all of which must hold."""

    conditions: tuple[tuple[str, Any], ...]

    def matches(self, layer: Scope) -> bool:
        """Whether the layer or module, under any of its names, is one that the rule speaks of."""
        return all(_holds(key, wanted, layer) for key, wanted in self.conditions)

    def plain(self) -> Any:
        """What a policy file says for it."""
        written = {key: list(value) if isinstance(value, tuple) else value for key, value in self.conditions}
        return written["name"] if written.keys() == {"name"} else written

    def nearest(self, layers: Sequence[Scope]) -> str:
        """A hint for a matcher that matches none of the layers: the nearest name or type that exists."""
        if not layers:
            return "the model has no nn.Linear and no nn.Conv2d"
        wanted = dict(self.conditions)
        if "name" in wanted:
            names = [name for layer in layers for name in layer.names]
            text = wanted["name"].removeprefix(REGEX).replace("\\", "")
            return f"the nearest layer is {difflib.get_close_matches(text, names, n=1, cutoff=0)[0]!r}"
        first = {type(layer.module).__name__: layer.name for layer in reversed(layers)}
        return "the model has " + ", ".join(f"{kind} {name!r}" for kind, name in first.items())


def _holds(key: str, wanted: Any, layer: Scope) -> bool:
    if key == "name":
        return any(name_matches(wanted, name) for name in layer.names)
    if key == "type":
        return any(cls.__name__ == wanted for cls in type(layer.module).__mro__)
    if key == "bias":
        return (getattr(layer.module, "bias", None) is not None) is wanted
    actual = getattr(layer.module, key, None)
    if actual is None or isinstance(wanted, tuple):
        return actual == wanted
    values = actual if isinstance(actual, tuple) else (actual,)
    if isinstance(wanted, int):
        return all(value == wanted for value in values)
    sign, number = COMPARISON.fullmatch(wanted).groups()  # type: ignore[union-attr]
    if sign == "!=":
        return any(value != int(number) for value in values)
    return all(OPERATORS[sign](value, int(number)) for value in values)


def parse_match(node: Node, problems: Problems) -> Matcher | None:
    """The matcher of a `match:` value, or None with the reasons in `problems`."""
    before = len(problems)
    if isinstance(node.value, str):
        _check_pattern(node, problems)
        return Matcher((("name", node.value),)) if len(problems) == before else None
    if not isinstance(node.value, dict):
        problems.add(node.mark, f"must be a name pattern or a mapping such as {{type: Conv2d}}, not {show(node.value)}")
        return None
    if not node.value:
        problems.add(node.mark, f"is empty; give it one of {', '.join(KEYS)}")
    for key, child in problems.fields(node, KEYS).items():
        _check_condition(key, child, problems)
    if len(problems) > before:
        return None
    plain = node.plain()
    return Matcher(tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in plain.items()))


def _check_pattern(node: Node, problems: Problems) -> None:
    pattern = node.value
    if pattern.startswith(REGEX):
        try:
            re.compile(pattern[len(REGEX) :])
        except re.error as error:
            problems.add(node.mark, f"not a regular expression: {error}")
        return
    for segment in pattern.split(".") if pattern else []:
        if not segment:
            problems.add(node.mark, f"{pattern!r} has an empty segment: a dot too many")
        elif segment not in ("*", "**") and re.search(r"[*?\[\]]", segment):
            regex = r"\.".join(re.escape(s).replace(r"\*\*", ".*").replace(r"\*", "[^.]*") for s in pattern.split("."))
            why = f"{segment!r}: * stands for one whole segment and ** for any number"
            problems.add(node.mark, f"{why}; for parts of a segment say 're:{regex}'")


def _check_condition(key: str, node: Node, problems: Problems) -> None:
    value = node.value
    if key == "name":
        if problems.expect(node, str):
            _check_pattern(node, problems)
    elif key == "type":
        problems.expect(node, str)
    elif key == "bias":
        problems.expect(node, bool)
    elif isinstance(value, str):
        if not COMPARISON.fullmatch(value):
            problems.add(
                node.mark, f"{value!r} is no comparison; write a number or one of '>1', '>=16', '<8', '<=4', '!=1'"
            )
    elif isinstance(value, list) and key in PAIRS:
        if len(value) != 2 or any(type(child.value) is not int for child in value):
            problems.add(node.mark, "must be a list of two whole numbers, such as [3, 3]")
    elif type(value) is not int:
        problems.add(node.mark, f"must be a whole number or a comparison such as '>1', not {show(value)}")
