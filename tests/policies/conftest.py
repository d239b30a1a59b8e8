"""What the policy tests share: a small model with every kind of layer, and policy files written in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.proj = nn.Linear(32, 32, bias=False)


class Model(nn.Module):
    """Convolutions, a depthwise one among them, two blocks, an attention of torch's, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.point = nn.Conv2d(8, 32, 1)
        self.depthwise = nn.Conv2d(32, 32, (1, 3), groups=32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.attention = nn.MultiheadAttention(32, 4)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.fixture
def model() -> nn.Module:
    return Model()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a file below the working directory, which is a fresh folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "mine.yaml") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write
