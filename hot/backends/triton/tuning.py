"""Launch settings of kernels: a good default per shape class, and measured ones from disk. Nothing is timed in a step.

A kernel family declares its candidates and its default as functions of a shape class, a small tuple. `config` looks a class
up: this user's file, else the packaged one, else the default. Under `tuning()` every kernel that is launched with `launch`
is timed first, on its real arguments, and the fastest settings are kept in the user's file, one per GPU and Triton version:

    with tuning() as results:
        hot.linear(x, weight, None, plan).sum().backward()
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.testing
from triton.runtime.errors import TritonError

from hot.files import cache_folder, slug, write_whole
from hot.policies.presets import preset_folder

Key = tuple[int | str, ...]
Config = dict[str, int]
"""Tile sizes by their name in the kernel, num_warps, num_stages."""
FORMAT = 1


@dataclass(frozen=True)
class Family:
    """A kernel's settings: `default` and `candidates` of a shape class. Register it with `family`."""

    name: str
    default: Callable[[Key], Config]
    candidates: Callable[[Key], Iterable[Config]]


class Tuned(NamedTuple):
    """What tuning found: the fastest settings and its milliseconds beside those of the default."""

    family: str
    key: Key
    config: Config
    milliseconds: float
    default_milliseconds: float


families: dict[str, Family] = {}
_tables: dict[Path, dict[str, Config]] = {}
_chosen: dict[tuple[str, Key, torch.device], Config] = {}
_damaged: set[Path] = set()
_lock = threading.Lock()
_results: list[Tuned] | None = None  # a list while tuning


def family(name: str, default: Callable[[Key], Config], candidates: Callable[[Key], Iterable[Config]]) -> Family:
    """Declare a kernel family. Raises ValueError if the name is taken."""
    if name in families:
        raise ValueError(f"kernel family {name!r} is declared already")
    families[name] = Family(name, default, candidates)
    return families[name]


def bucket(size: int) -> int:
    """The class of a size: the exponent of the next power of two."""
    return max(size - 1, 0).bit_length()


def config(of: Family, key: Key, device: torch.device) -> Config:
    """The settings for a shape class on a device: tuned by this user, else packaged, else the default. Times nothing."""
    chosen = _chosen.get((of.name, key, device))
    if chosen is None:
        chosen = _chosen[of.name, key, device] = _choose(of, key, device)
    return chosen


def _choose(of: Family, key: Key, device: torch.device) -> Config:
    default = of.default(key)
    for path in (cache_file(device), packaged_file(device)):
        found = _table(path).get(_entry(of, key))
        if found is not None and (found == default or found in of.candidates(key)):  # older code had other candidates
            return found
    return default


def _entry(of: Family, key: Key) -> str:
    return f"{of.name}{json.dumps(key)}"


def launch(of: Family, key: Key, device: torch.device, run: Callable[[Config], object]) -> None:
    """``run(config)`` with the settings for the class; under `tuning()`, tuned before. Running it twice must do no harm."""
    if _results is not None:
        tune(of, key, run, device)
    run(config(of, key, device))


@contextmanager
def tuning() -> Iterator[list[Tuned]]:
    """Inside, `launch` tunes every class that it meets, once; the list that it gives grows with what was found."""
    global _results
    before, _results = _results, []
    try:
        yield _results
    finally:
        _results = before


def tune(
    of: Family,
    key: Key,
    run: Callable[[Config], object],
    device: torch.device,
    milliseconds: Callable[[Callable[[], object]], float] | None = None,
) -> Config:
    """Time every candidate on ``run``, keep the fastest in the user's file, and return it.

    A candidate that does not compile or fit is passed over; raises what the default raises. A class that this `tuning()` has
    met already is not timed again. milliseconds: how a call is timed.
    """
    if any((done.family, done.key) == (of.name, key) for done in _results or ()):
        return config(of, key, device)
    clock = milliseconds or (_gpu_milliseconds if device.type == "cuda" else _cpu_milliseconds)
    default = of.default(key)
    best, base = default, clock(lambda: run(default))
    least = base
    for candidate in of.candidates(key):
        if candidate == default:
            continue
        try:
            took = clock(lambda candidate=candidate: run(candidate))  # type: ignore[misc]
        except TritonError:
            continue
        if took < least:
            best, least = candidate, took
    _store(_entry(of, key), best, device)
    if _results is not None:
        _results.append(Tuned(of.name, key, best, least, base))
    return best


def tune_all(calls: Iterable[Callable[[], object]]) -> list[Tuned]:
    """Tune every kernel that the calls launch, such as steps of layers at the sizes that matter; what was found."""
    with tuning() as results:
        for call in calls:
            call()
    return results


def _gpu_milliseconds(call: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median"))


def _cpu_milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1000


def device_name(device: torch.device) -> str:
    """What a file of settings is called after: the GPU, or ``cpu`` for the interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cache_file(device: torch.device) -> Path:
    """The user's settings of a device under this Triton."""
    return cache_folder() / "tuning" / f"{slug(device_name(device))}-triton-{triton.__version__}.json"


def packaged_file(device: torch.device) -> Path:
    """The settings that come with HOT for a device; there need not be any."""
    return preset_folder().parent / "tuning" / f"{slug(device_name(device))}.json"


def forget() -> None:
    """Read the files again at the next launch, and warn again of damaged ones."""
    _tables.clear()
    _chosen.clear()
    _damaged.clear()


def _table(path: Path) -> dict[str, Config]:
    """A file's settings, read once; none, with one warning that names it, where it is damaged."""
    if path not in _tables:
        _tables[path] = _read(path)
    return _tables[path]


def _read(path: Path) -> dict[str, Config]:
    try:
        text = path.read_bytes()
    except OSError:
        return {}
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, not {FORMAT}")
        return {str(entry): _checked(found) for entry, found in data["settings"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if path not in _damaged:
            _damaged.add(path)
            warnings.warn(f"{path} is damaged and left aside; remove it, or tune again: {error}", stacklevel=2)
        return {}


def _checked(found: Any) -> Config:
    if not isinstance(found, dict) or not all(type(value) is int and value >= 0 for value in found.values()):
        raise ValueError(f"{found!r} are no settings")
    return found


def _store(entry: str, best: Config, device: torch.device) -> None:
    """Add one entry to the user's file, on top of what others have written there since."""
    path = cache_file(device)
    with _lock:
        settings = {**_read(path), entry: best}
        data = {"format": FORMAT, "device": device_name(device), "triton": triton.__version__}
        text = json.dumps({**data, "settings": dict(sorted(settings.items()))}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write(text.encode()))
        _tables[path] = settings
        _chosen.clear()
