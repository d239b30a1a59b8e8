"""Typed plans out of merged trees: every ``{kind, **params}`` block by the parameter model of its kind.

What pydantic finds is said again in plain words, at the place where the offending value was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hot.errors import HotError, did_you_mean
from hot.policies.buffers import Buffer, buffers
from hot.policies.params import Params
from hot.policies.plan import GradInputPlan, GradWeightPlan, LayerPlan
from hot.policies.quantizers import Quantizer, quantizers
from hot.policies.transforms import Transform, transforms
from hot.policies.yaml_source import Mark, Node, Problems, from_python, show
from hot.registry import Registry

SHAPE: dict[str, Any] = {
    "grad_input": {"transform": transforms, "grad_output": quantizers, "weight": quantizers},
    "grad_weight": {"transform": transforms, "grad_output": quantizers, "input": quantizers},
    "buffer": buffers,
}
"""The tree of a plan: a path block, its blocks, and the registry of the kinds that may stand in each."""

NESTED: dict[Any, Registry[Any]] = {Transform: transforms, Quantizer: quantizers, Buffer: buffers}
"""Fields of parameter models that are blocks themselves, by their annotation."""

EXACT = from_python({key: block for key, block in LayerPlan().to_dict().items() if key in SHAPE}, Problems())
"""The tree under every policy: nothing transformed, nothing quantized, the input saved as it is."""

M = TypeVar("M", bound=BaseModel)


def plain(tree: Node, shape: Any = SHAPE) -> dict[str, Any]:
    """A merged tree as plain data, in the order in which people write it: paths and operands as above, `kind` first."""
    if isinstance(shape, Registry):
        block: dict[str, Any] = tree.plain()
        return {"kind": block.pop("kind"), **block}
    return {key: plain(tree.value[key], shape[key]) for key in shape}


def checked(node: Node, shape: Any, problems: Problems) -> Node | None:
    """What of a written tree can be merged: unknown keys, wrong types and unknown kinds are problems and left out."""
    if isinstance(shape, Registry):
        if not problems.expect(node, dict):
            return None
        kind = node.value.get("kind")
        return node if kind is None or _known_kind(kind, shape, problems) else None
    children = {key: checked(child, shape[key], problems) for key, child in problems.fields(node, list(shape)).items()}
    return Node({key: child for key, child in children.items() if child is not None}, node.mark, node.key)


def _known_kind(kind: Node, registry: Registry[Any], problems: Problems) -> bool:
    if not problems.expect(kind, str):
        return False
    if kind.value not in registry:
        problems.add(kind.mark, registry.unknown(kind.value))
        return False
    return True


def build_plan(tree: Node, backend: str, problems: Problems) -> LayerPlan | None:
    """The plan that a merged tree means, or None with the reasons in `problems`."""
    before = len(problems)
    built = build(tree, SHAPE, problems)
    if len(problems) > before:
        return None
    _check_paths(tree, built, problems)
    if len(problems) > before:
        return None
    built["grad_input"]["grad_output"] = _token_is_row(built["grad_input"]["grad_output"])
    grad_input, grad_weight = GradInputPlan(**built["grad_input"]), GradWeightPlan(**built["grad_weight"])
    return LayerPlan(grad_input, grad_weight, built["buffer"], backend)


def build(node: Node, shape: Any, problems: Problems) -> Any:
    """The parameters of every block of a merged tree, None for those with reasons in `problems`."""
    if isinstance(shape, Registry):
        return build_block(node, shape, problems)
    return {key: build(node.value[key], shape[key], problems) for key in shape}


def _token_is_row(quantizer: Quantizer) -> Quantizer:
    """On grad_input's grad_output a token is a row."""
    token = getattr(quantizer, "granularity", "") == "token"
    return quantizer.model_copy(update={"granularity": "row"}) if token else quantizer


def _check_paths(tree: Node, built: Mapping[str, Any], problems: Problems) -> None:
    """What no block can know of itself: where it stands."""

    def refuse(path: str, block: str, field: str, message: str) -> None:
        node = tree.value[path].value[block]
        problems.add(node.value.get(field, node).mark, message)

    if built["grad_weight"]["transform"].axis == "tokens":
        refuse("grad_weight", "transform", "axis", "'tokens' is for grad_input: grad_weight contracts them anyway")
    if built["grad_input"]["weight"].scale_granularity == "token":
        refuse("grad_input", "weight", "granularity", "a weight has no tokens; use granularity 'row' or 'block'")
    transform = built["grad_input"]["transform"]
    if transform.axis != "tokens":
        for field, default in (("prefix_tokens", 0), ("tail", "pad")):
            if getattr(transform, field, default) != default:
                refuse("grad_input", "transform", field, "is for transforms over tokens; this runs over the outputs")


def build_block(node: Node, registry: Registry[Any], problems: Problems) -> Params | None:
    """The parameters of one block, or None with the reasons in `problems`. Equal ones are one object: steps look things up by
    them, and comparing them takes as long as a launch."""
    if not problems.expect(node, dict):
        return None
    kind = node.value.get("kind")
    if kind is None:
        problems.add(node.mark, f"kind is missing; it is one of {', '.join(registry.names())}")
        return None
    if not _known_kind(kind, registry, problems):
        return None
    params = replace(node, value={key: child for key, child in node.value.items() if key != "kind"})
    found = validate(registry[kind.value], params, problems, f"{registry.kind} {kind.value!r}")
    return None if found is None else _built.setdefault(found, found)


_built: dict[Params, Params] = {}


def validate(model: type[M], node: Node, problems: Problems, what: str) -> M | None:
    """The model that a mapping of its fields means, or None with the reasons in `problems`; `what` names it there."""
    before = len(problems)
    fields = {name: field for name, field in model.model_fields.items() if not field.exclude}
    values = {}
    for name, child in node.value.items():
        if name not in fields:
            takes = ", ".join(fields) or "no parameters; does the block lack its kind?"
            problems.add(child.key, f"unknown key {name!r}{did_you_mean(name, fields) or f'; {what} takes {takes}'}")
        elif fields[name].annotation in NESTED:
            values[name] = build_block(child, NESTED[fields[name].annotation], problems)
        else:
            values[name] = child.plain()
    broken = {name for name, value in values.items() if value is None and fields[name].annotation in NESTED}
    try:
        built = model.model_validate({name: value for name, value in values.items() if name not in broken})
    except ValidationError as error:
        for details in error.errors():
            if details["loc"][:1] not in {(name,) for name in broken}:
                problems.add(*_in_plain_words(details, node))
    except HotError as error:  # a model's own validator may look a name up
        problems.add(node.mark, str(error))
    return built if len(problems) == before else None


def _in_plain_words(error: ErrorDetails, node: Node) -> tuple[Mark, str]:
    """Where a pydantic error was written, and what it says."""
    at = node
    for part in error["loc"]:
        children = dict(enumerate(at.value)) if isinstance(at.value, list) else at.value
        if isinstance(children, dict):
            at = children.get(part, at)
    value, context = show(at.plain()), error.get("ctx", {})
    limit = next((context[key] for key in ("ge", "gt", "le", "lt") if key in context), None)
    match error["type"]:
        case "missing":
            name = error["loc"][-1]
            return at.mark, f"{name} is missing" if isinstance(name, str) else "has too few items"
        case "int_type" | "int_from_float":
            return at.mark, f"must be a whole number, not {value}"
        case "float_type":
            return at.mark, f"must be a number, not {value}"
        case "bool_type":
            return at.mark, f"must be true or false, not {value}"
        case "string_type":
            return at.mark, f"must be a string, not {value}"
        case "too_long":
            return at.mark, f"has more than {context['max_length']} items"
        case "tuple_type" | "list_type":
            return at.mark, f"must be a list, not {value}"
        case "literal_error" | "enum":
            nearest = did_you_mean(str(at.value), re.findall(r"'([^']*)'", context["expected"]))
            return at.mark, f"must be {context['expected']}, not {value}{nearest}"
        case "greater_than_equal" | "greater_than" | "less_than_equal" | "less_than":
            words = error["type"].replace("_equal", "").replace("_", " ")
            words = {"greater_than_equal": "at least", "less_than_equal": "at most"}.get(error["type"], words)
            return at.mark, f"must be {words} {limit}, not {value}"
        case "value_error":
            return _blame(str(context["error"]), at)
    return at.mark, f"{error['msg'][:1].lower()}{error['msg'][1:]}, not {value}"


def _blame(message: str, block: Node) -> tuple[Mark, str]:
    """A model's own message, ``rank: 20 is larger than block: 16``, at one of the fields that it names.

    It is the one written last (a child's over its parent's), and of several written together the one named first.
    """
    fields = block.value if isinstance(block.value, dict) else {}
    named = [name for name in re.findall(r"(\w+):", message) if name in fields]
    if not named:
        return block.mark, message
    last = max(named, key=list(fields).index)
    together = [n for n in named if _parent(fields[n].mark) == _parent(fields[last].mark)]
    return fields[together[0]].mark, message.removeprefix(f"{together[0]}: ")


def _parent(mark: Mark) -> tuple[str, str]:
    return mark.file, mark.path.rpartition(".")[0]
