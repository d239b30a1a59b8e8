"""The one timing harness: candidates take turns, their inputs rotate, and the answer is the median of many repeats."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice

import torch

from hot.errors import HotError

Call = Callable[[], object]
Candidate = Callable[[int], Call]
"""From the number of an input set to the call that is timed. What it does before it returns that call is set-up, not timed."""

FEWEST = 5
"""Rounds that are measured even where the time is up."""
WARM_UP = 3
"""Calls before anything is timed: kernels are compiled, tuned and loaded then."""
SHORTEST = 2.0
"""Milliseconds that one measurement should last; a shorter call is repeated in it."""
LONG = 20.0
"""Milliseconds of a call beside which the launch of its first kernel is nothing."""
MOST_COPIES = 200
MOST_SETS = 64


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the 20th, 50th and 80th percentile of the repeats."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Of one sample or more, interpolated between neighbours."""
        deciles = statistics.quantiles(samples if len(samples) > 1 else [*samples, *samples], n=10, method="inclusive")
        return cls(deciles[1], deciles[4], deciles[7])


@dataclass(frozen=True)
class Failed:
    """A candidate that can't run here, and why."""

    reason: str


def place(device: str | None) -> torch.device:
    """The device of that name; the GPU, where there is one, without a name. Raises HotError if it is missing here."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise HotError(f"--device {name!r} can't be timed: use cpu, cuda or cuda:1")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise HotError(f"--device {name!r} is not here: there are {torch.cuda.device_count()} CUDA devices; use cpu")
    return found


def sets_for(size: int, device: torch.device) -> int:
    """How many input sets of `size` bytes to rotate so that the L2 cache of a GPU holds none: four times as much as fits."""
    if device.type != "cuda":
        return 1
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(math.ceil(4 * cache / max(size, 1)), 1), MOST_SETS)


def measure(
    candidates: Mapping[str, Candidate],
    device: torch.device,
    *,
    sets: int = 1,
    repeats: int = 25,
    seconds: float = 10.0,
    graph: bool = False,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing | Failed]:
    """Time candidates against each other: in every round each is measured once, so that a drift hits all of them.

    sets: input sets that each goes through in turn. repeats: rounds; fewer, but FEWEST, once `seconds` are over. graph: capture
    the calls in a CUDA graph and time its replays. Times are the device's between two events on CUDA, `now` in seconds on the
    CPU. Where the host is slower than the device, eager times are the host's: a loop of such calls takes as long.
    A candidate that raises in set-up or warm-up becomes Failed. Raises HotError for a graph on the CPU, and what is HotError.
    """
    if graph and device.type != "cuda":
        raise HotError("mode 'graph' needs a CUDA device: leave it out on cpu")
    results: dict[str, Timing | Failed] = {}
    loops: dict[str, _Loop] = {}
    with _own_stream(device):
        for name, candidate in candidates.items():
            try:
                loops[name] = _Loop(candidate, sets, device, graph, now)
            except HotError:
                raise
            except Exception as error:  # whatever it is, the others are measured
                results[name] = Failed(f"{type(error).__name__}: {error}".split("\n", 1)[0])
        samples: dict[str, list[float]] = {name: [] for name in loops}
        start = now()
        for turn in range(repeats):
            if turn >= FEWEST and now() - start > seconds:
                break
            for name, loop in loops.items():
                samples[name].append(loop.time())
    results |= {name: Timing.of(found) for name, found in samples.items()}
    return {name: results[name] for name in candidates}


class _Loop:
    """One candidate: a call for each input set, warmed up, and how many of them one measurement holds."""

    def __init__(
        self, candidate: Candidate, sets: int, device: torch.device, graph: bool, now: Callable[[], float]
    ) -> None:
        self.device, self.now = device, now
        calls = [candidate(number) for number in range(sets)]
        for call in islice(cycle(calls), max(sets, WARM_UP)):
            call()
        self.turns, self.copies, self.is_long = cycle(calls), 1, False
        self.run: Call = self._once_through
        once = self.time()
        self.copies, self.is_long = min(max(math.ceil(SHORTEST / max(once, 1e-6)), 1), MOST_COPIES), once > LONG
        if graph:
            self.copies = math.ceil(self.copies / sets) * sets  # every set, each as often
            self.run = self._captured(calls)

    def time(self) -> float:
        """Milliseconds of one call, on average over the copies of one measurement."""
        if self.device.type == "cpu":
            start = self.now()
            self.run()
            return (self.now() - start) * 1e3 / self.copies
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if not self.is_long:  # busies the device, so that no launch is waited for
            (self.run if self.copies > 1 else next(self.turns))()
        begin.record()
        self.run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.copies

    def _once_through(self) -> None:
        for call in islice(self.turns, self.copies):
            call()

    def _captured(self, calls: Sequence[Call]) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for call in islice(cycle(calls), self.copies):
                call()
        return graph.replay


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """A stream that is not the default one, which can't be captured; backward runs on the stream of its forward."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        with torch.cuda.stream(_stream(torch.cuda.current_device())):
            yield
        torch.cuda.synchronize()


@cache
def _stream(index: int) -> torch.cuda.Stream:
    """Always the same one: memory that was freed on a stream is kept for it."""
    return torch.cuda.Stream(index)


def copy_candidate(device: torch.device, size: int | None = None) -> tuple[Candidate, int]:
    """A copy within the device, the yardstick of what moves memory, and its bytes: those that it reads plus those it writes.

    By a kernel of torch's: on an H200, the driver's own copy takes half as long again once it is part of a CUDA graph.
    """
    bytes = size or (2**30 if device.type == "cuda" else 2**26)
    source = torch.ones(-(-bytes // 4), device=device)
    target = torch.empty_like(source)
    return lambda _: lambda: torch.mul(source, 1.0, out=target), 8 * source.numel()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy within the device, read plus written: the median."""
    candidate, size = copy_candidate(device)
    found = measure({"copy": candidate}, device)["copy"]
    if isinstance(found, Failed):
        raise HotError(f"no copy on {device}: {found.reason}")
    return size / found.p50 * 1e3
