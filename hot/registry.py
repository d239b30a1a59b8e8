"""One registry for everything that can be plugged in: a dict, a decorator and a query.

Names reach a registry in three ways: HOT registers its own when the module that defines them is imported; an installed
package offers its own through the entry-point group ``hot.plugins`` (loaded on first need: the first query, or the
first name that is not known yet); a policy file names local files under ``plugins:``, loaded only if the caller allows it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

from hot.errors import HotError, UnknownNameError, did_you_mean

T = TypeVar("T")
ENTRY_POINT_GROUP = "hot.plugins"
registries: list[Registry[Any]] = []


class Registry(Generic[T]):
    """Names to objects of one kind. Registering a name twice raises; an unknown name lists the known ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._importers: dict[str, str] = {}  # the module whose import registered the name
        registries.append(self)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: ``@registry.register("name")``. Raises HotError if the name is taken."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise HotError(
                    f"{self.kind} {name!r} is registered already, by {_origin(self._entries[name])}; "
                    f"{_origin(entry)} needs another name"
                )
            self._entries[name] = entry
            self._importers[name] = _importing()
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        """The entry of that name. Raises UnknownNameError with the known names, the nearest one, and broken plug-ins."""
        if name not in self._entries:
            load_entry_points()
        if name not in self._entries:
            raise UnknownNameError(self.unknown(name))
        return self._entries[name]

    def unknown(self, name: str) -> str:
        """The message for a name that is not here."""
        known = self.names()
        message = f"unknown {self.kind} {name!r}{did_you_mean(name, known) or '.'} Known: {', '.join(known)}"
        return "; ".join([message, *(f"plug-in {who} failed to import: {why}" for who, why in failed_plugins.items())])

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            load_entry_points()
        return name in self._entries

    def names(self, pattern: str = "*") -> list[str]:
        """The registered names that match a shell pattern, sorted."""
        load_entry_points()
        return sorted(name for name in self._entries if fnmatch.fnmatchcase(name, pattern))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def remove(self, name: str) -> T:
        """Take a name out again (for tests and notebooks that register a class twice)."""
        self._importers.pop(name, None)
        return self._entries.pop(name)


def _importing() -> str:
    """The name of the module that is being run: that of the nearest module-level frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def _forget(module: str) -> None:
    """Take out what one module registered while it was imported, and nothing that it imported in turn."""
    for registry in registries:
        for name in [name for name, importer in registry._importers.items() if importer == module]:
            registry.remove(name)


def _origin(entry: object) -> str:
    return f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', entry)}"


failed_plugins: dict[str, str] = {}
_loaded = False


def load_entry_points() -> None:
    """Import every installed plug-in once. One that fails is kept in ``failed_plugins`` by name and stops nobody."""
    global _loaded
    if _loaded:
        return
    _loaded = True  # before the imports: a plug-in registers names while it is being loaded
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry_point.load()
        except Exception as error:  # whatever it is, it is that plug-in's own and must not take HOT down
            failed_plugins[entry_point.name] = f"{type(error).__name__}: {error}"


def load_plugin_file(path: Path) -> None:
    """Import a local plug-in file, once per resolved path.

    Raises HotError that names the file if it fails; nothing stays registered of it then.
    """
    path = path.resolve()
    name = f"hot_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise HotError(f"plug-in {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        _forget(name)
        raise HotError(f"plug-in {path} failed to import: {type(error).__name__}: {error}") from error
