"""In which order backends are asked for an op under ``auto``: by the times of their kernels, measured per device, as data.

The backends that have times for an op, on cases that all of them have, are asked in the order of the geometric mean of these
times, the least first. Times say nothing of other backends: those keep the places that they hold by priority, and the measured
ones share the rest. The times of an op are this user's (`hot bench kernels --write-order`), else those that are packaged for
the device. A GPU that has neither goes by the packaged H200's: a guess, but the best there is of an NVIDIA GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from hot.measured import Measured, name_of

GUESS = "NVIDIA H200"
"""The GPU whose times stand for those of one that has none."""


@dataclass(frozen=True)
class Time:
    """One measured kernel. case: what it was asked to do, as `hot bench kernels` names it; p50_ms: the median, milliseconds."""

    op: str
    case: str
    backend: str
    p50_ms: float


FILES = Measured(
    "order",
    Time,
    {
        **dict.fromkeys(("op", "case", "backend"), (str, len, "a name")),
        "p50_ms": (float, lambda time: 0 < time < math.inf, "a number above 0"),
    },
    "hot bench kernels --write-order",
)
assert list(FILES.columns) == [field.name for field in fields(Time)]


def arrange(backends: Sequence[str], times: Iterable[Time]) -> list[str]:
    """The backends that serve an op, given by priority, in the order in which they are asked.

    times: of that op. Of equally fast ones the one of higher priority is asked first.
    """
    logs: dict[str, dict[str, float]] = {}
    for time in times:
        if time.backend in backends:
            logs.setdefault(time.backend, {})[time.case] = math.log(time.p50_ms)
    shared = set.intersection(*map(set, logs.values())) if logs else set()
    if not shared:
        return list(backends)
    measured = [name for name in backends if name in logs]
    fastest = iter(sorted(measured, key=lambda name: math.fsum(logs[name][case] for case in shared)))
    return [next(fastest) if name in logs else name for name in backends]


def times_on(device: torch.device) -> dict[str, list[Time]]:
    """The times that count on a device, by op; of a device without an index, those of the current one of its type.

    Raises HotError, with the line and the fix, for a broken file.
    """
    name = name_of(device)
    paths = [FILES.packaged(name), FILES.own(name)] if name else []
    if device.type == "cuda":
        paths.insert(0, FILES.packaged(GUESS))
    found: dict[str, list[Time]] = {}
    for path in paths:
        if path.exists():
            found |= by_op(FILES.read(path))
    return found


def write(times: Iterable[Time], device_name: str, path: Path | None = None) -> Path:
    """Put times into the file of a device: this user's, or the one at `path`. Returns the file.

    Of an op that is among them, all that the file has is replaced, so that no old time is compared with a new one. They count
    for the ops that are chosen from then on. Raises HotError for a time that could not be read again, and if the file to add to
    is broken; nothing is written then.
    """
    path = path or FILES.own(device_name)
    new = by_op(FILES.check(times))
    known = by_op(FILES.read(path)) if path.exists() else {}
    FILES.write([time for of in (known | new).values() for time in of], path)
    return path


def by_op(times: Iterable[Time]) -> dict[str, list[Time]]:
    """The times of every op; of two for the same kernel and case, the last."""
    found: dict[str, list[Time]] = {}
    for time in {(time.op, time.case, time.backend): time for time in times}.values():
        found.setdefault(time.op, []).append(time)
    return found
