"""What the training tests share: an experiment of a few seconds, as a file."""

from collections.abc import Callable
from pathlib import Path

import pytest

TINY = """\
model: {kind: vit, patch: 2, dim: 16, depth: 1, heads: 2, dropout: 0.1}
data: {kind: digits}
optimizer: {kind: adamw, lr: 3e-3}
schedule: {kind: cosine, warmup: 0.1}
steps: 24
batch_size: 32
policy: hot
log_every: 1
eval_every: 8
checkpoint_every: 3
threads: 1
"""


@pytest.fixture
def write(tmp_path) -> Callable[[str], Path]:
    """Write an experiment file and return its path."""

    def write_file(text: str, name: str = "tiny.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write_file


@pytest.fixture
def tiny(write) -> Path:
    return write(TINY)
