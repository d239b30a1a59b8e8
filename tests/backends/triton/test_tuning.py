"""The launch settings: defaults, files of a device and a version, and that nothing is timed unless asked for."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hot.backends.triton import tuning

CPU = torch.device("cpu")
KEY = (10, "columns", "torch.float32")
DEFAULT = {"ELEMENTS": 4, "num_warps": 4}
SMALL, LARGE = {"ELEMENTS": 1, "num_warps": 2}, {"ELEMENTS": 9, "num_warps": 8}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOT_CACHE", str(tmp_path))
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture
def family() -> Iterator[tuning.Family]:
    yield tuning.family("a test", lambda key: DEFAULT, lambda key: [SMALL, DEFAULT, LARGE])
    del tuning.families["a test"]


def clock(times: dict[int, float]) -> Callable[[Callable[[], object]], float]:
    """Calls once, and says how long it took from what was called."""
    return lambda call: times[call()]  # type: ignore[index]


def elements(config: tuning.Config) -> int:
    return config["ELEMENTS"]


def tune(family: tuning.Family, best: int = 9) -> tuning.Config:
    times = {size: 1.0 if size == best else 5.0 for size in (1, 4, 9)}
    return tuning.tune(family, KEY, elements, CPU, clock(times))


def test_a_family_that_nobody_tuned_has_its_default(family: tuning.Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*args: object) -> float:
        raise AssertionError("timed")

    monkeypatch.setattr(tuning, "_cpu_milliseconds", timed)
    monkeypatch.setattr(tuning, "_gpu_milliseconds", timed)
    assert tuning.config(family, KEY, CPU) == DEFAULT
    ran: list[tuning.Config] = []
    tuning.launch(family, KEY, CPU, ran.append)
    assert ran == [DEFAULT]
    assert not tuning.cache_file(CPU).exists()


def test_round_trip(family: tuning.Family) -> None:
    assert tune(family) == LARGE == tuning.config(family, KEY, CPU)
    assert tuning.config(family, (11, *KEY[1:]), CPU) == DEFAULT
    tuning.forget()
    assert tuning.config(family, KEY, CPU) == LARGE
    assert tune(family, best=1) == SMALL == tuning.config(family, KEY, CPU)


def test_device_and_version_are_in_the_name(
    family: tuning.Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    assert tuning.cache_file(CPU) == tmp_path / "tuning" / f"cpu-triton-{triton.__version__}.json"
    tune(family)
    for target, name, other in (
        ("triton.__version__", "9.9.9", None),
        ("device_name", None, lambda device: "NVIDIA H200"),
    ):
        with monkeypatch.context() as patch:
            if other is None:
                patch.setattr(target, name)
            else:
                patch.setattr(tuning, target, other)
                assert tuning.packaged_file(CPU).name == "nvidia-h200.json"
            tuning.forget()
            assert tuning.config(family, KEY, CPU) == DEFAULT
    tuning.forget()
    assert tuning.config(family, KEY, CPU) == LARGE


def test_packaged_settings_come_after_the_users_own(
    family: tuning.Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = tmp_path / "packaged.json"
    entry = f"a test{json.dumps(KEY)}"
    packaged.write_text(json.dumps({"format": tuning.FORMAT, "settings": {entry: SMALL}}))
    monkeypatch.setattr(tuning, "packaged_file", lambda device: packaged)
    assert tuning.config(family, KEY, CPU) == SMALL
    tune(family)
    assert tuning.config(family, KEY, CPU) == LARGE


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"format": 99, "settings": {}}',
        b'{"format": 1, "settings": {"a": {"b": "4"}}}',
    ],
)
def test_a_damaged_file_is_left_aside_with_one_warning(family: tuning.Family, text: bytes) -> None:
    path = tuning.cache_file(CPU)
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    with pytest.warns(UserWarning, match=f"{path} is damaged"):
        assert tuning.config(family, KEY, CPU) == DEFAULT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.config(family, (1,), CPU) == DEFAULT
        tune(family)
    tuning.forget()
    assert tuning.config(family, KEY, CPU) == LARGE


def test_settings_that_are_no_candidates_any_more_are_left_aside(family: tuning.Family) -> None:
    tune(family)
    path = tuning.cache_file(CPU)
    path.write_text(path.read_text().replace('"ELEMENTS": 9', '"ELEMENTS": 77'))
    tuning.forget()
    assert tuning.config(family, KEY, CPU) == DEFAULT


def test_what_others_wrote_since_stays(family: tuning.Family) -> None:
    tuning.config(family, KEY, CPU)  # reads, nothing there yet
    path = tuning.cache_file(CPU)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"format": tuning.FORMAT, "settings": {"theirs[1]": SMALL}}))
    tune(family)
    assert set(json.loads(path.read_text())["settings"]) == {"theirs[1]", f"a test{json.dumps(KEY)}"}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_tuning_tunes_what_is_launched_inside_once(family: tuning.Family) -> None:
    ran: list[int] = []

    def run(config: tuning.Config) -> None:
        ran.append(config["ELEMENTS"])

    with tuning.tuning() as results:
        for _ in range(2):
            tuning.launch(family, KEY, CPU, run)
    assert sorted(ran[:3]) == [1, 4, 9] and len(ran) == 5
    assert [(found.family, found.key) for found in results] == [("a test", KEY)]
    assert results[0].milliseconds <= results[0].default_milliseconds
    ran.clear()
    tuning.launch(family, KEY, CPU, run)
    assert ran == [results[0].config["ELEMENTS"]]
    assert len(tuning.tune_all([lambda: tuning.launch(family, (1,), CPU, run)])) == 1


def test_a_candidate_that_does_not_fit_is_passed_over(family: tuning.Family) -> None:
    from triton.runtime.errors import OutOfResources

    def run(config: tuning.Config) -> None:
        if config == SMALL:
            raise OutOfResources(400, 200, "shared memory")

    times = iter([3.0, 2.0])

    def milliseconds(call: Callable[[], object]) -> float:
        call()
        return next(times)

    assert tuning.tune(family, KEY, run, CPU, milliseconds) == LARGE


def test_every_default_is_whole() -> None:
    """The families of the kernels: settings are positive integers, and candidates have the keys of the default."""
    from hot.backends import triton

    triton.load()
    assert {"transform", "quantization", "dequantization", "pack4"} <= set(tuning.families)
    for each in tuning.families.values():
        assert each.name.isidentifier()
