"""Plans: what one layer does in backward, fully resolved. The executor sees nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hot.policies.buffers import Buffer, Quantized, Raw
from hot.policies.quantizers import NoQuantizer, Quantizer
from hot.policies.transforms import NoTransform, Transform


class _Path:
    """What both paths have: a transform of the contracted axis and a quantizer for each operand, the gradient's first."""

    transform: Transform

    @property
    def quantizers(self) -> tuple[Quantizer, Quantizer]:
        raise NotImplementedError

    @cached_property
    def is_exact(self) -> bool:
        """Whether the path computes what torch computes (grad_weight: from an exact input)."""
        return self.transform.is_identity and all(quantizer.is_identity for quantizer in self.quantizers)

    def __str__(self) -> str:
        """``hadamard 16: int4 row hashed × int4 row nearest``."""
        if self.is_exact:
            return "exact"
        operands = " × ".join("float" if quantizer.is_identity else str(quantizer) for quantizer in self.quantizers)
        return operands if self.transform.is_identity else f"{self.transform}: {operands}"


@dataclass(frozen=True)
class GradInputPlan(_Path):
    """The path grad_input, g_x = g_y w, contracted over the outputs."""

    transform: Transform = field(default_factory=NoTransform)
    grad_output: Quantizer = field(default_factory=NoQuantizer)
    weight: Quantizer = field(default_factory=NoQuantizer)

    @property
    def quantizers(self) -> tuple[Quantizer, Quantizer]:
        return self.grad_output, self.weight


@dataclass(frozen=True)
class GradWeightPlan(_Path):
    """The path grad_weight, g_w = g_yᵀ x, contracted over the tokens."""

    transform: Transform = field(default_factory=NoTransform)
    grad_output: Quantizer = field(default_factory=NoQuantizer)
    input: Quantizer = field(default_factory=NoQuantizer)

    @property
    def quantizers(self) -> tuple[Quantizer, Quantizer]:
        return self.grad_output, self.input


@dataclass(frozen=True)
class LayerPlan:
    """Both paths, what forward saves of the input, and the backend (``auto`` or a name). Frozen, hashable, printable."""

    grad_input: GradInputPlan = field(default_factory=GradInputPlan)
    grad_weight: GradWeightPlan = field(default_factory=GradWeightPlan)
    buffer: Buffer = field(default_factory=Raw)
    backend: str = "auto"
    text: str = field(init=False, repr=False, compare=False)
    """``str(plan)``, for graphs under torch.compile, which can't print it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", str(self))  # frozen, and this follows from the rest
        parts: list[Transform | Quantizer] = [self.buffer.quantizer] if isinstance(self.buffer, Quantized) else []
        for path in (self.grad_input, self.grad_weight):
            parts += [path.transform, *path.quantizers]
        # worked out here once: steps, and graphs under torch.compile, read constants
        _ = self.is_exact
        for part in parts:
            _ = part.spec

    @cached_property
    def is_exact(self) -> bool:
        """Whether the layer is left as torch has it."""
        keeps_input = isinstance(self.buffer, Raw) and not self.buffer.recompute
        return self.grad_input.is_exact and self.grad_weight.is_exact and keeps_input

    def to_dict(self) -> dict[str, Any]:
        """Plain data, in the words of a policy file."""
        return {
            "grad_input": {
                "transform": self.grad_input.transform.to_dict(),
                "grad_output": self.grad_input.grad_output.to_dict(),
                "weight": self.grad_input.weight.to_dict(),
            },
            "grad_weight": {
                "transform": self.grad_weight.transform.to_dict(),
                "grad_output": self.grad_weight.grad_output.to_dict(),
                "input": self.grad_weight.input.to_dict(),
            },
            "buffer": self.buffer.to_dict(),
            "backend": self.backend,
        }

    def __str__(self) -> str:
        return f"grad_input: {self.grad_input} · grad_weight: {self.grad_weight} · buffer: {self.buffer}"


@dataclass(frozen=True)
class Skip:
    """A layer that is left exact, and why."""

    reason: str

    def __str__(self) -> str:
        return f"exact: {self.reason}"


def product_kind(path: GradInputPlan | GradWeightPlan) -> str:
    """How the product of a path runs: ``torch``, ``integer``, ``float8``, ``dequantized`` (a scale lies on the contracted
    axis, or the codes differ in kind) or ``float`` (an operand that is not quantized)."""
    if path.is_exact:
        return "torch"
    specs = [quantizer.spec for quantizer in path.quantizers]
    if any(quantizer.is_identity for quantizer in path.quantizers):
        return "float"
    formats = [
        "custom" if spec is None else "float8" if spec["format"] in ("e4m3", "e5m2") else "integer" for spec in specs
    ]
    scales = {spec["granularity"] for spec in specs if spec is not None}
    if len(set(formats)) > 1 or formats[0] == "custom" or "token" in scales:
        return "dequantized"
    return formats[0]
