"""What torch's other ops (norms, activations, attention, dropout) save for backward: the words of `activations:` rules.

A rule speaks of modules. What it says of an op holds for every such op that runs inside their forward, however deep, but for
modules in there of which some rule speaks: their own plan holds for theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hot.errors import PolicyError
from hot.policies.buffers import Quantized, Raw
from hot.policies.params import Params
from hot.policies.yaml_source import Problems, from_python
from hot.registry import Registry

values: Registry[type[Params]] = Registry("activation buffer")
"""What may be kept of inputs of which an op's backward needs the values."""
signs: Registry[type[Params]] = Registry("mask buffer")
"""What may be kept where backward needs to know only which elements passed."""

for registry in (values, signs):
    registry.register("raw")(Raw)
values.register("quantized")(Quantized)


@signs.register("mask")
class Mask(Params):
    """One bit an element: whether it passed."""

    kind = "mask"


places: Registry[type[Params]] = Registry("index buffer")
"""What may be kept where backward needs to know which element of a few was taken."""
places.register("raw")(Raw)


@places.register("byte")
class Byte(Params):
    """Where in its window the element is, in one byte."""

    kind = "byte"


ACTIVATIONS: dict[str, Registry[Any]] = {
    "layer_norm": values,
    "rms_norm": values,
    "group_norm": values,
    "batch_norm": values,
    "gelu": values,
    "silu": values,
    "mul": values,
    "scaled_dot_product_attention": values,
    "softmax": values,
    "matmul": values,
    "cross_entropy": values,
    "module": values,
    "other": values,
    "max_pool2d": places,
    "relu": signs,
    "leaky_relu": signs,
    "hardtanh": signs,
    "dropout": signs,
}
"""The ops by the names that torch.nn.functional, and torch for `mul` and `matmul`, have for them, and the kinds that each may
have; relu6 is a `hardtanh`. `module` is the matched module itself: it keeps its inputs and runs again in backward, whatever is
inside. `other` is whatever else autograd saves inside: lossy, and blind to what it means."""

EVERYTHING_RAW = from_python({op: {"kind": "raw"} for op in ACTIVATIONS}, Problems())
"""The tree under every policy: every op saves what torch saves."""


@dataclass(frozen=True)
class ActivationPlan:
    """What the ops inside a module save, by op, of those that do not save what torch saves; and the backend."""

    buffers: tuple[tuple[str, Params], ...] = ()
    backend: str = "auto"

    @property
    def is_exact(self) -> bool:
        return not self.buffers

    @property
    def whole(self) -> Quantized | None:
        """How the inputs of the matched module are kept, if nothing else of it is."""
        return self._codes("module")

    @property
    def other(self) -> Quantized | None:
        """How what no op here keeps is kept."""
        return self._codes("other")

    def _codes(self, op: str) -> Quantized | None:
        found = dict(self.buffers).get(op)
        return found if isinstance(found, Quantized) else None

    def __str__(self) -> str:
        """``gelu: int4 block 128 nearest · relu: mask``."""
        return " · ".join(f"{op}: {buffer}" for op, buffer in self.buffers) or "raw"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, in the words of a policy file."""
        return {op: buffer.to_dict() for op, buffer in self.buffers} | {"backend": self.backend}


def activation_plan(built: dict[str, Params], backend: str) -> ActivationPlan:
    """The plan of the buffers of every op."""
    plan = ActivationPlan(tuple((op, buffer) for op, buffer in built.items() if not isinstance(buffer, Raw)), backend)
    for op, buffer in plan.buffers:
        if isinstance(buffer, Quantized):
            _ = buffer.quantizer.spec  # worked out here once
            if buffer.recompute:
                raise PolicyError([f"activations: {op}: recompute is for the buffer of a layer: leave it out"])
    return _known.setdefault(plan, plan)


_known: dict[ActivationPlan, ActivationPlan] = {}
"""Equal plans as one object, by which steps tell them apart: comparing their parameters takes as long as a launch."""
