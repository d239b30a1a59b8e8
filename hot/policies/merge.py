"""The merge law: field by field, later wins, and changing a ``kind`` replaces that block whole."""

from __future__ import annotations

from hot.policies.yaml_source import Node


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`; every value keeps the mark of where it was written.

    Layers are always merged one by one onto a complete base, the oldest first: two of them merged beforehand would
    forget that a kind was changed in between. The keys of a merged mapping are in the order of writing, latest last.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    if "kind" in over.value and over.value["kind"] != base.value.get("kind"):
        return over
    merged = {key: child for key, child in base.value.items() if key not in over.value}
    for key, child in over.value.items():
        merged[key] = merge(base.value[key], child) if key in base.value else child
    return Node(merged, over.mark, over.key)
