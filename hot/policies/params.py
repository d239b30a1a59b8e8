"""The base of everything that a policy names by its ``kind``: a frozen, strict set of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

from hot.errors import HotError
from hot.registry import Registry


class Params(BaseModel):
    """Parameters of one registered kind: strict (``true`` is no integer), unknown keys refused, frozen and hashable."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    kind: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": …, **params}``: plain data, as a policy file holds it."""
        return {"kind": self.kind, **self.model_dump(mode="json")}

    def __str__(self) -> str:
        """The kind and what differs from its defaults: ``int(bits=4, granularity='row')``."""
        shown = {
            name: value
            for name, value in self
            if (field := type(self).model_fields[name]).is_required() or value != field.default
        }
        return f"{self.kind}({', '.join(f'{k}={v!r}' for k, v in shown.items())})" if shown else self.kind


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
