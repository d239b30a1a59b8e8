"""What all tests share: one seed, one thread (what runs here is small), and slow tests only for those who ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hot import crossover

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _every_layer_runs_its_plan() -> Iterator[None]:
    """No test is left to torch by what was measured on this machine, unless it asks for that."""
    with crossover.off():
        yield


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless ``-m`` says anything, or a test is named outright."""
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)
