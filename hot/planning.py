"""What `hot plan` shows: the plan of every layer, who decided it, and the bytes that its input costs before and after.

The bytes are those of the executor's own saving code, run on meta tensors: exact, without memory or time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hot.backends import ops_for
from hot.convert import view_of
from hot.errors import HotError
from hot.executor import keep
from hot.policies.plan import GradInputPlan, GradWeightPlan, LayerPlan, Skip, product_kind
from hot.policies.resolve import Resolution, resolve_detailed
from hot.policies.schema import Policy


@dataclass(frozen=True)
class Row:
    """One layer of the table. before, after: bytes of its input that torch and the plan save; None if it never ran."""

    resolution: Resolution
    before: int | None
    after: int | None

    @property
    def name(self) -> str:
        return self.resolution.layer.name

    @property
    def kind(self) -> str:
        module = self.resolution.layer.module
        return "Linear" if isinstance(module, nn.Linear) else "Conv2d"

    @property
    def shape(self) -> str:
        """``O×I``, and for a convolution ``×kh×kw``."""
        return "×".join(map(str, self.resolution.layer.module.weight.shape))

    def to_dict(self) -> dict[str, Any]:
        plan = self.resolution.plan
        return {
            "layer": self.name,
            "type": self.kind,
            "shape": self.shape,
            "plan": plan.to_dict() if isinstance(plan, LayerPlan) else None,
            "skip": plan.reason if isinstance(plan, Skip) else None,
            "decided_by": self.resolution.decided_by,
            "saved_before": self.before,
            "saved_after": self.after,
        }


def plan_rows(policy: Policy, model: nn.Module, sample: Tensor | None = None) -> list[Row]:
    """The table of a policy and a model. sample: an input, of which only shape and dtype count; without it, no bytes.

    The model's parameters are on the meta device afterwards if a sample is given. Raises PolicyError as `resolve` does, and
    HotError if the model can't take the sample.
    """
    resolutions = resolve_detailed(policy, model)
    bytes_of = {} if sample is None else _saved_bytes(model, resolutions, sample)
    return [Row(resolution, *bytes_of.get(name, (None, None))) for name, resolution in resolutions.items()]


def _saved_bytes(model: nn.Module, resolutions: dict[str, Resolution], sample: Tensor) -> dict[str, tuple[int, int]]:
    """(before, after) of every layer that the model runs; what layers share counts for the first."""
    seen: dict[int, Tensor] = {}  # holds what was counted, so that an id stays one tensor's

    def count(tensors: tuple[Tensor, ...]) -> int:
        new = [t for t in tensors if id(t) not in seen]
        seen.update((id(t), t) for t in new)
        return sum(t.numel() * t.element_size() for t in new)

    found: dict[str, tuple[int, int]] = {}
    with _inputs(model.to("meta"), resolutions) as inputs:
        try:
            model(sample.to("meta"))
        except Exception as error:  # whatever a model says of an input that it cannot take
            raise HotError(
                f"the model does not take an input {tuple(sample.shape)} of {sample.dtype}: {error}"
            ) from error
    for name, x in inputs:
        module, plan = resolutions[name].layer.module, resolutions[name].plan
        if not module.weight.requires_grad:
            before = after = 0
        elif isinstance(plan, Skip):
            before = after = count((x,))
        else:
            before = count((x,))
            after = count(keep(x, x.dtype, plan, view_of(module)))
        known = found.get(name, (0, 0))
        found[name] = known[0] + before, known[1] + after
    return found


@contextmanager
def _inputs(model: nn.Module, resolutions: dict[str, Resolution]) -> Iterator[list[tuple[str, Tensor]]]:
    """The inputs of the layers while the context is open, in the order of their calls."""
    calls: list[tuple[str, Tensor]] = []
    with ExitStack() as stack:
        for name, resolution in resolutions.items():
            hook = resolution.layer.module.register_forward_pre_hook(
                lambda _, arguments, name=name: calls.append((name, arguments[0]))
            )
            stack.callback(hook.remove)
        yield calls


def serving(plan: LayerPlan, device: str) -> dict[str, str]:
    """Which kernel on which backend is tried first for each stage of a plan on a device type, and how each product runs."""
    ops = ops_for(plan.backend, device)

    def operand(op: str) -> str:
        served = ops.serving(op)
        return (
            served
            if served != "composition"
            else f"{ops.serving('project')} project + {ops.serving('quantize')} quantize"
        )

    def product(path: GradInputPlan | GradWeightPlan) -> str:
        kind = product_kind(path)
        return kind if kind in ("torch", "float") else f"{kind}, {ops.serving('matmul')} matmul"

    both = ops.serving("grad_output_operands")
    return {
        "grad_output": both if both != "composition" else operand("transform_quantize"),
        "weight": operand("transform_quantize"),
        "input": operand("transform_quantize"),
        "grad_input product": product(plan.grad_input),
        "grad_weight product": product(plan.grad_weight),
    }
