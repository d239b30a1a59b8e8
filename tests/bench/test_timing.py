"""The timing harness by a clock that the test moves, and the files of results."""

from __future__ import annotations

import csv
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hot.bench import timing
from hot.bench.records import check_csv, environment, write_csv
from hot.bench.timing import Failed, Timing, copy_bandwidth, measure, place, sets_for
from hot.errors import HotError

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass only while a candidate runs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls: list[tuple[str, int]] = []

    def now(self) -> float:
        return self.seconds

    def takes(self, name: str, *ms: float) -> Callable[[int], Callable[[], None]]:
        """A candidate whose calls last so long, one after the other; the last duration stays."""
        left = list(ms)

        def candidate(number: int) -> Callable[[], None]:
            def call() -> None:
                self.calls.append((name, number))
                self.seconds += (left.pop(0) if len(left) > 1 else left[0]) / 1e3

            return call

        return candidate


def test_percentiles() -> None:
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0)
    assert Timing.of([float(n) for n in range(101)]) == Timing(20.0, 50.0, 80.0)
    assert Timing.of([3.0, 1.0, 2.0]).p50 == 2.0


def test_the_median_of_what_the_clock_says() -> None:
    """Four calls warm up and tell how long one takes; then each round measures one of 3, 5, 5, 5, 9 ms."""
    clock = Clock()
    candidates = {"a": clock.takes("a", 100, 100, 100, 4, 9, 5, 3, 5, 5), "b": clock.takes("b", 8)}
    found = measure(candidates, CPU, repeats=5, now=clock.now)
    assert found["b"] == Timing(pytest.approx(8), pytest.approx(8), pytest.approx(8))
    assert found["a"] == Timing(pytest.approx(4.6), pytest.approx(5), pytest.approx(5.8))


def test_candidates_take_turns_and_sets_rotate() -> None:
    clock = Clock()
    measure({"a": clock.takes("a", 5), "b": clock.takes("b", 5)}, CPU, sets=2, repeats=5, now=clock.now)
    timed = clock.calls[8:]  # three warm up and one is timed to see how long it takes, of each
    assert [name for name, _ in timed] == ["a", "b"] * 5
    numbers = [number for name, number in timed if name == "a"]
    assert all(one != other for one, other in pairwise(numbers))


def test_short_calls_are_repeated() -> None:
    clock = Clock()
    found = measure({"a": clock.takes("a", 0.5)}, CPU, repeats=6, now=clock.now)["a"]
    assert isinstance(found, Timing) and found.p50 == pytest.approx(0.5)
    assert len(clock.calls) == 4 + 6 * 4  # 2 ms a measurement


def test_the_time_ends_the_rounds() -> None:
    clock = Clock()
    measure({"a": clock.takes("a", 1000)}, CPU, repeats=25, seconds=7.5, now=clock.now)
    assert len(clock.calls) == 4 + 8
    clock.calls.clear()
    measure({"a": clock.takes("a", 1000)}, CPU, repeats=25, seconds=0.0, now=clock.now)
    assert len(clock.calls) == 4 + timing.FEWEST


def test_one_that_fails_stops_no_other() -> None:
    clock = Clock()

    def broken(number: int) -> Callable[[], object]:
        raise ModuleNotFoundError("No module named 'peer'\nand more")

    def refused(number: int) -> Callable[[], object]:
        raise HotError("said on purpose")

    found = measure({"broken": broken, "a": clock.takes("a", 5)}, CPU, repeats=5, now=clock.now)
    assert list(found) == ["broken", "a"] and isinstance(found["a"], Timing)
    assert found["broken"] == Failed("ModuleNotFoundError: No module named 'peer'")
    with pytest.raises(HotError, match="on purpose"):
        measure({"refused": refused}, CPU)


def test_graphs_and_devices_that_are_not_there() -> None:
    with pytest.raises(HotError, match="mode 'graph' needs a CUDA device: leave it out on cpu"):
        measure({}, CPU, graph=True)
    for name, message in (("tpu", "can't be timed"), ("meta", "can't be timed"), ("cuda:99", "is not here")):
        with pytest.raises(HotError, match=f"--device '{name}' {message}"):
            place(name)
    assert place("cpu") == CPU and sets_for(1, CPU) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_eager_calls_and_graphs_on_cuda() -> None:
    """Both run every set, a graph each as often. No time is asserted."""
    device = place("cuda")
    totals = torch.zeros(3, device=device)
    for graph in (False, True):
        before = totals.clone()
        found = measure({"add": lambda number: lambda: totals[number].add_(1)}, device, sets=3, repeats=5, graph=graph)
        assert isinstance(found["add"], Timing) and 0 < found["add"].p20 <= found["add"].p80
        calls = totals - before
        assert calls.min() > 5 and calls.max() - calls.min() <= 1
    assert sets_for(1, device) == timing.MOST_SETS and sets_for(2**40, device) == 1


def test_copy_bandwidth_counts_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "measure", lambda candidates, device: {"copy": Timing(1.0, 2.0, 3.0)})
    assert copy_bandwidth(CPU) == 2 * 2**26 / 2e-3


def test_environment() -> None:
    found = environment(CPU)
    assert list(found) == ["date", "device", "driver", "torch", "triton", "threads"]
    assert found["driver"] == "" and found["device"] and found["torch"] == torch.__version__


def test_csv_is_appended_to_and_its_columns_are_fixed(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    write_csv(path, [])
    assert not path.exists()
    write_csv(path, [{"name": "a, b", "ms": 1.23456789, "none": None}])
    write_csv(path, [{"name": "c", "ms": 100000.0, "none": None}])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{"name": "a, b", "ms": "1.2346", "none": ""}, {"name": "c", "ms": "1e+05", "none": ""}]
    with pytest.raises(HotError, match=r"results\.csv has the columns name,ms,none, not name,s: name another file"):
        write_csv(path, [{"name": "d", "s": 1.0}])
    assert len(path.read_text().splitlines()) == 3
    with pytest.raises(HotError, match="there is no folder"):
        check_csv(tmp_path / "nowhere" / "results.csv", ["name"])
    with pytest.raises(HotError, match="can't be read"):
        check_csv(tmp_path, ["name"])
