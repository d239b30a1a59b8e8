"""The base of everything that a policy names by its ``kind``: a frozen, strict set of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import Self

from hot.errors import HotError
from hot.registry import Registry


class Params(BaseModel):
    """Parameters of one registered kind: strict (``true`` is no integer), unknown keys refused, frozen and hashable.

    A list is accepted for a tuple, since a policy file has no tuples.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    kind: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _lists_to_tuples(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        tuples = {name for name in data if name in fields and _is_tuple(fields[name].annotation)}
        return {name: tuple(v) if name in tuples and isinstance(v, list) else v for name, v in data.items()}

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": …, **params}``: plain data, as a policy file holds it."""
        return {"kind": self.kind, **self.model_dump(mode="json")}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A validated copy with some fields changed; nothing that was cached of the old fields goes with it."""
        return type(self).model_validate({**{n: getattr(self, n) for n in type(self).model_fields}, **(update or {})})

    def __hash__(self) -> int:
        """That of its fields, worked out once: steps look things up by their parameters."""
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = self.__dict__["_hash"] = hash((type(self), *(getattr(self, n) for n in type(self).model_fields)))
        return found

    def __getstate__(self) -> dict[Any, Any]:
        """Without the hash: that of a string is another one in each process."""
        state = super().__getstate__()
        return {**state, "__dict__": {name: value for name, value in state["__dict__"].items() if name != "_hash"}}

    def __str__(self) -> str:
        """The kind and what differs from its defaults: ``int(bits=4, granularity='row')``."""
        shown = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if field.is_required() or value != field.default:
                shown.append(f"{name}={value if isinstance(value, Params) else repr(value)}")
        return f"{self.kind}({', '.join(shown)})" if shown else self.kind


def _is_tuple(annotation: Any) -> bool:
    """Whether a field takes a tuple: ``tuple[int, ...]``, or a union with one."""
    if annotation is tuple or get_origin(annotation) is tuple:
        return True
    return get_origin(annotation) in (Union, UnionType) and any(map(_is_tuple, get_args(annotation)))


P = TypeVar("P", bound=type[Params])


def registering(registry: Registry[Any], base: type[Params]) -> Callable[[str], Callable[[P], P]]:
    """The decorator that registers subclasses of `base`: it also tells the class its kind."""

    def register(name: str) -> Callable[[P], P]:
        def add(cls: P) -> P:
            if not (isinstance(cls, type) and issubclass(cls, base)):
                raise HotError(f"{registry.kind} {name!r} must be a subclass of hot.{base.__name__}")
            registry.register(name)(cls)
            cls.kind = name
            return cls

        return add

    return register
