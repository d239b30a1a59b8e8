"""YAML read strictly into nodes that know where they were written.

YAML 1.2 core scalars: ``1e-5`` is a number, ``no``, ``4_8`` and ``12:30`` are strings. Duplicate keys, tags, merge keys
and recursive aliases are problems; nothing that a file says is executed, and its size, depth and aliases are bounded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hot.errors import PolicyError, did_you_mean
from hot.policies.params import Params

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 64


@dataclass(frozen=True)
class Mark:
    """Where something was written: its path in the document, and the file, if there is one, with line and column."""

    path: str = ""
    file: str = ""
    line: int = 0
    column: int = 0

    @property
    def place(self) -> str:
        """``file:line``, or "" for what was written in Python."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return " ".join(part for part in (place, self.path) if part)


@dataclass(frozen=True)
class Node:
    """A value (a scalar, ``list[Node]`` or ``dict[str, Node]``), where it was written and where its key was.

    Two nodes are equal if their values are. Nobody writes to a node.
    """

    value: Any
    mark: Mark = field(compare=False, repr=False)
    key: Mark = field(compare=False, repr=False)

    def plain(self) -> Any:
        """The value as plain data."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        return [child.plain() for child in self.value] if isinstance(self.value, list) else self.value


TYPE_WORDS = {str: "a string", int: "a whole number", bool: "true or false", list: "a list", dict: "a mapping"}


class Problems:
    """What is wrong, collected so that a person sees all of it at once. The same problem counts once."""

    def __init__(self) -> None:
        self.found: dict[tuple[Mark, str], None] = {}

    def __len__(self) -> int:
        return len(self.found)

    def add(self, mark: Mark, message: str) -> None:
        self.found[mark, message] = None

    def unknown_key(self, node: Node, name: str, known: Sequence[str], of: str = "") -> None:
        self.add(node.key, f"unknown key {name!r}{of}{did_you_mean(name, known) or '; known: ' + ', '.join(known)}")

    def expect(self, node: Node, wanted: type) -> bool:
        """Whether the value is of that type exactly (``true`` is no integer); if not, that is a problem."""
        if type(node.value) is wanted:
            return True
        self.add(node.mark, f"must be {TYPE_WORDS[wanted]}, not {show(node.value)}")
        return False

    def fields(self, node: Node, known: Sequence[str]) -> dict[str, Node]:
        """The known entries of a mapping. No mapping, or a key that is not known, is a problem."""
        if not self.expect(node, dict):
            return {}
        for name, child in node.value.items():
            if name not in known:
                self.unknown_key(child, name, known)
        return {name: child for name, child in node.value.items() if name in known}

    def raise_any(self) -> None:
        """Raise PolicyError with every problem, in the order of files and lines; return if there is none."""
        files = list(dict.fromkeys(mark.file for mark, _ in self.found))
        ordered = sorted(self.found, key=lambda found: (files.index(found[0].file), found[0].line, found[0].column))
        if ordered:
            raise PolicyError([f"{mark}: {message}" if str(mark) else message for mark, message in ordered])


def show(value: Any) -> str:
    """A value in the words of a policy file, for messages."""
    if isinstance(value, (dict, list)):
        return TYPE_WORDS[type(value)]
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return repr(value)


def from_python(value: Any, problems: Problems, path: str = "") -> Node:
    """A node of plain data, in which objects such as ``Hadamard(block=16)`` may stand. Its marks are paths."""
    mark = Mark(path)
    if isinstance(value, Params):
        value = value.to_dict()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                problems.add(mark, f"keys must be strings, not {show(key)}")
        children = {key: child for key, child in value.items() if isinstance(key, str)}
        return Node({key: from_python(child, problems, join(path, key)) for key, child in children.items()}, mark, mark)
    if isinstance(value, (list, tuple)):
        return Node([from_python(child, problems, f"{path}[{i}]") for i, child in enumerate(value)], mark, mark)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is not None and type(value) not in (bool, int, float, str):
        problems.add(mark, f"a {type(value).__name__} cannot stand in a policy: {value!r}")
        value = None
    return Node(value, mark, mark)


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def read_yaml(path: Path, problems: Problems) -> Node | None:
    """The root node of a YAML file, or None with the reason in `problems` if there is none to speak of."""
    shown = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
    whole = Mark(file=shown)
    try:
        if path.is_dir():
            problems.add(whole, "is a directory; name a file in it")
            return None
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        problems.add(whole, f"cannot be read: {error.strerror}")
        return None
    if len(data) > MAX_BYTES:
        problems.add(whole, "is larger than 1 MiB: that is no file written by hand")
    elif b"\0" in data:
        problems.add(whole, f"is binary: there is a NUL byte at offset {data.index(0)}")
    else:
        try:
            return read_text(data.decode("utf-8-sig"), shown, problems)
        except UnicodeDecodeError as error:
            problems.add(whole, f"is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}")
    return None


def read_text(text: str, file: str, problems: Problems) -> Node | None:
    """The root node of a YAML text, `file` being what its marks call it, or None with the reason in `problems`."""
    return _Reader(file, problems).read(text)


class _Loader(yaml.SafeLoader):
    """PyYAML up to its nodes, with bounds. Tags are noted for a problem each; nothing is ever constructed from them."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tagged: list[tuple[str, yaml.Mark]] = []
        self.nodes = self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if (tag := getattr(event, "tag", None)) is not None:
            self.tagged.append((tag, event.start_mark))
        self.nodes, self.depth = self.nodes + 1, self.depth + 1
        if self.nodes > MAX_NODES:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_NODES} values", problem_mark=event.start_mark)
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested over {MAX_DEPTH} levels deep", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Reader:
    """One reading of one file."""

    def __init__(self, file: str, problems: Problems) -> None:
        self.file, self.problems = file, problems
        self.nodes = 0
        self.open: list[yaml.Node] = []  # the nodes around the one being read

    def read(self, text: str) -> Node | None:
        try:
            loader = _Loader(text)
            root = loader.get_single_node()
            for tag, mark in loader.tagged:
                self.problems.add(self.mark(mark), f"tags are refused: {tag}")
            if root is not None:
                return self.node(root, "")
            self.problems.add(Mark(file=self.file, line=1, column=1), "the file is empty")
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            place = Mark("", self.file, before.count("\n") + 1, error.position - before.rfind("\n"))
            self.problems.add(place, f"is not text: character #x{error.character:02x} is not allowed in YAML")
        except yaml.MarkedYAMLError as error:
            context = f"{error.context}, " if error.context else ""
            message = f"not valid YAML: {context}{error.problem}"
            if "'\\t'" in message:
                message = "not valid YAML: a tab cannot indent or begin a value; use spaces"
            self.problems.add(self.mark(error.problem_mark or error.context_mark), message)
        return None

    def mark(self, mark: yaml.Mark | None, path: str = "") -> Mark:
        return Mark(path, self.file, mark.line + 1, mark.column + 1) if mark else Mark(path, self.file)

    def node(self, node: yaml.Node, path: str, key: Mark | None = None) -> Node:
        mark = self.mark(node.start_mark, path)
        self.nodes += 1
        if self.nodes > MAX_NODES or len(self.open) > MAX_DEPTH:  # by aliases: what is written out, the loader bounds
            raise yaml.MarkedYAMLError(problem="its aliases expand too far", problem_mark=node.start_mark)
        if node in self.open:
            raise yaml.MarkedYAMLError(problem="an alias stands inside its own value", problem_mark=node.start_mark)
        value: Any
        if isinstance(node, yaml.ScalarNode):
            value = node.value if node.style else self.scalar(node)
        else:
            self.open.append(node)
            if isinstance(node, yaml.SequenceNode):
                value = [self.node(child, f"{path}[{i}]") for i, child in enumerate(node.value)]
            else:
                value = self.mapping(node, path)
            self.open.pop()
        return Node(value, mark, key or mark)

    def mapping(self, node: yaml.Node, path: str) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, child in node.value:
            name, mark = key_node.value, self.mark(key_node.start_mark, path)
            own = replace(mark, path=join(path, name)) if isinstance(name, str) else mark
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.add(mark, "keys must be strings, not lists or mappings")
            elif not key_node.style and type(core := self.scalar(key_node)) is not str:
                self.problems.add(mark, f"keys must be strings, not {show(core)}")
            elif name == "<<":
                self.problems.add(mark, "merge keys (<<) are refused: say extends: or repeat the fields")
            elif name in entries:
                self.problems.add(own, f"duplicate key {name!r}, first in line {entries[name].key.line}")
            else:
                entries[name] = self.node(child, own.path, own)
        return entries

    def scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return core_scalar(node.value)
        except ValueError:  # Python's own bound on the digits of an integer
            raise yaml.MarkedYAMLError(problem="a number too long", problem_mark=node.start_mark) from None


_WORDS = {word: value for value, words in {
    None: ("", "~", "null", "Null", "NULL"), True: ("true", "True", "TRUE"), False: ("false", "False", "FALSE"),
}.items() for word in words}  # fmt: skip
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def core_scalar(text: str) -> Any:
    """The value of a plain scalar in the core schema of YAML 1.2: null, a bool, an int, a float, or the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1) if text[-1].isalpha() else text)  # .inf and .nan are Python's inf and nan
    return text
