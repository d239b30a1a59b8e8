"""Transforms of the contracted axis of a product. What applies to both operands cancels in the product.

A transform of your own needs a `block` and a `matrix()`; one that is made of Hadamard rows says so in `spec`, which is
what the kernels understand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from hot.hadamard import is_power_of_two, lp_l1_rows, random_signs, sequency_order
from hot.policies.params import Params, registering
from hot.registry import Registry


class Transform(Params):
    """A linear map on every block of an axis, `block` elements to `kept` coefficients, with orthonormal rows.

    Subclass it, set `block` (a field or a property) and write `matrix`; the rest follows. `ops` is the op table of the
    backend that runs the layer.
    """

    block: int
    axis: Literal["contracted", "tokens"] = "contracted"

    @property
    def kept(self) -> int:
        """Coefficients kept of each block: the rows of the matrix."""
        return self.block

    @property
    def is_identity(self) -> bool:
        return False

    def matrix(self) -> Tensor:
        """The (kept, block) matrix of the map, float64, rows orthonormal."""
        raise NotImplementedError(f"{type(self).__name__} has neither a spec nor a matrix()")

    @property
    def spec(self) -> dict[str, Any] | None:
        """The arguments of the op `project` that mean this transform, or None: then it runs by its `matrix`."""
        return None

    @property
    def draws(self) -> bool:
        """Whether something is drawn anew for each forward, which both operands share."""
        return False

    def draw(self, device: torch.device) -> Tensor | None:
        """What is drawn (follows torch.manual_seed), or None."""
        return None

    def projected_length(self, length: int) -> int:
        """The length that `project` makes of an axis."""
        return -(-length // self.block) * self.kept

    def project(self, x: Tensor, ops: Any, draw: Tensor | None = None) -> Tensor:
        """(…, L) float → (…, L') coefficients, float32 or float64; a ragged last block is zero-padded."""
        spec = self.spec
        if spec is not None:
            return ops.project(x, **spec, draw=draw)
        x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        blocks = F.pad(x, (0, -x.shape[-1] % self.block)).unflatten(-1, (-1, self.block))
        return (blocks @ self.matrix().to(x).T).flatten(-2)

    def expand(self, c: Tensor, length: int, ops: Any, draw: Tensor | None = None) -> Tensor:
        """The transpose of `project`: (…, L') coefficients → (…, length)."""
        spec = self.spec
        if spec is not None:
            return ops.expand(c, length, **spec, draw=draw)
        return (c.unflatten(-1, (-1, self.kept)) @ self.matrix().to(c)).flatten(-2)[..., :length]


transforms: Registry[type[Transform]] = Registry("transform")
register_transform = registering(transforms, Transform)


@register_transform("none")
class NoTransform(Transform):
    """The operands as they are."""

    block: Literal[1] = Field(default=1, exclude=True)
    axis: Literal["contracted"] = Field(default="contracted", exclude=True)

    @property
    def is_identity(self) -> bool:
        return True

    @cached_property
    def spec(self) -> dict[str, Any]:
        return {"block": 1, "rows": (0,), "signs": (), "prefix": 0, "tail": "pad"}

    def project(self, x: Tensor, ops: Any, draw: Tensor | None = None) -> Tensor:
        return x

    def expand(self, c: Tensor, length: int, ops: Any, draw: Tensor | None = None) -> Tensor:
        return c


class HadamardTransform(Transform):
    """What the Hadamard kinds share: a power-of-two block, optional random signs, kept prefix tokens and a ragged tail.

    block: elements per block. signs: ``random`` multiplies each position of a block by ±1 drawn with `seed`.
    prefix_tokens: leading tokens of every sample (a class token) that are kept as they are, for a transform over tokens.
    tail: what happens to a last block that is not full: ``pad`` with zeros, or ``keep`` its elements as they are.
    """

    block: int = Field(default=16, ge=2, le=4096)
    axis: Literal["contracted"] = "contracted"
    signs: Literal["none", "random"] = "none"
    seed: int = Field(default=0, ge=0)
    prefix_tokens: int = Field(default=0, ge=0)
    tail: Literal["pad", "keep"] = "pad"

    @model_validator(mode="after")
    def _power_of_two(self) -> Self:
        if not is_power_of_two(self.block):
            raise ValueError(f"block: {self.block} is not a power of two")
        return self

    def __str__(self) -> str:
        size = str(self.block) if self.kept == self.block else f"{self.kept}/{self.block} {getattr(self, 'order', '')}"
        extras = (
            ("random signs", self.signs == "random"),
            ("over tokens", self.axis != "contracted"),
            (f"prefix {self.prefix_tokens}", self.prefix_tokens > 0),
            ("tail kept", self.tail == "keep"),
        )
        return ", ".join([f"hadamard {size}", *(text for text, applies in extras if applies)])

    def rows(self) -> Sequence[int]:
        """Natural indices of the kept rows."""
        return range(self.block)

    def projected_length(self, length: int) -> int:
        prefix = min(self.prefix_tokens, length)
        whole, ragged = (length - prefix) // self.block, (length - prefix) % self.block
        kept = ragged if self.tail == "keep" else (self.kept if ragged else 0)
        return prefix + whole * self.kept + kept

    @cached_property
    def spec(self) -> dict[str, Any]:
        return {
            "block": self.block,
            "rows": tuple(self.rows()),
            "signs": random_signs(self.block, self.seed) if self.signs == "random" else (),
            "prefix": self.prefix_tokens,
            "tail": self.tail,
        }


@register_transform("hadamard")
class Hadamard(HadamardTransform):
    """Every coefficient of the block Walsh–Hadamard transform: an exact change of basis that spreads outliers."""


@register_transform("hadamard_low_rank")
class HadamardLowRank(HadamardTransform):
    """`rank` of every `block` Hadamard coefficients: a projection, lossless for signals that vary slowly along the axis.

    order: ``sequency`` keeps the lowest frequencies; ``lp_l1`` the published low-pass triangle (block a power of four, rank
    √n(√n + 1)/2); ``random`` draws the kept rows anew each step, rescaled so that the gradient is unbiased.
    axis: ``contracted``, or on grad_input ``tokens``: project the tokens of grad_output and expand the product back.
    """

    axis: Literal["contracted", "tokens"] = "contracted"  # type: ignore[assignment]
    rank: int = Field(default=8, ge=1)
    order: Literal["sequency", "lp_l1", "random"] = "sequency"

    @model_validator(mode="after")
    def _rank_fits(self) -> Self:
        if self.rank > self.block:
            raise ValueError(f"rank: {self.rank} is larger than block: {self.block}")
        if self.order == "lp_l1" and self.rank != (kept := len(lp_l1_rows(self.block))):
            raise ValueError(f"rank: order lp_l1 keeps {kept} of {self.block} coefficients, not {self.rank}")
        return self

    @property
    def kept(self) -> int:
        return self.rank

    def rows(self) -> Sequence[int]:
        if self.order == "lp_l1":
            return lp_l1_rows(self.block)
        return range(self.block) if self.order == "random" else sequency_order(self.block)[: self.rank]

    @property
    def draws(self) -> bool:
        return self.order == "random"

    def draw(self, device: torch.device) -> Tensor | None:
        if not self.draws:
            return None
        return torch.rand(self.block, device=device).argsort()[: self.rank]
