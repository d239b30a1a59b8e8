"""The schema of an experiment: what `hot train` runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from hot.policies.params import Params
from hot.train.data import Dataset
from hot.train.models import Model
from hot.train.optim import AdamW, Cosine, Optimizer, Schedule


class Experiment(BaseModel):
    """What to train, on what, how long, and under which policies.

    epochs or steps: one of them. policy: a preset or a file; compare: several, side by side. backend: in place of the
    policies' own. seeds: one run each.
    clip_norm: the largest norm of the whole gradient. log_every, eval_every, checkpoint_every: in steps, the latter two
    every epoch where left out. output: the folder, ``runs/NAME`` where left out. threads: of torch on the CPU.
    plugins: files that register models, data sets and the like; loaded only with --allow-plugins.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str = Field(min_length=1)
    model: Model
    data: Dataset
    optimizer: Optimizer = AdamW()
    schedule: Schedule = Cosine()
    epochs: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=128, ge=1)
    precision: Literal["float32", "bf16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    policy: str = "hot"
    compare: list[str] = []
    backend: str | None = None
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Len(min_length=1)] = [0]
    clip_norm: float | None = Field(default=None, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    log_every: int = Field(default=10, ge=1)
    eval_every: int | None = Field(default=None, ge=1)
    checkpoint_every: int | None = Field(default=None, ge=1)
    output: str | None = None
    threads: int | None = Field(default=None, ge=1)
    plugins: list[str] = []

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: one seed is given twice")
        return self

    @property
    def policies(self) -> list[str]:
        """The policies to run, in order."""
        return self.compare or [self.policy]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as an experiment file holds it."""
        return {name: value.to_dict() if isinstance(value, Params) else value for name, value in self}

    def identity(self) -> dict[str, Any]:
        """What decides the weights that come out: a resumed run must not change it."""
        free = {
            "name",
            "device",
            "policy",
            "compare",
            "backend",
            "seeds",
            "eval_every",
            "checkpoint_every",
            "log_every",
            "output",
            "threads",
        }
        return {name: value for name, value in self.to_dict().items() if name not in free}
