"""What `hot plan` shows: the plan of every layer, who decided it, what serves its products, whether the crossover leaves it
exact, and the bytes that its input costs before and after.

The bytes are those of the executor's own saving code, run on meta tensors: exact, without memory or time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hot.backends import AUTO, Ops, get_ops
from hot.convert import view_of
from hot.crossover import Point, Verdict, judge
from hot.errors import BackendError, HotError
from hot.estimate import books_of
from hot.executor import keep
from hot.operands import holders
from hot.policies.plan import GradInputPlan, GradWeightPlan, LayerPlan, Skip, product_kind
from hot.policies.resolve import Resolution, resolve_activations, resolve_detailed
from hot.policies.schema import Policy


@dataclass(frozen=True)
class Row:
    """One layer of the table. before, after: bytes of its input that torch and the plan save; None if it never ran.

    products: how each path's runs, empty for a Skip; verdict: what the crossover says, if it knows the layer and ever ran it.
    """

    resolution: Resolution
    products: dict[str, str]
    before: int | None = None
    after: int | None = None
    verdict: Verdict | None = None

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
            "products": self.products or None,
            "crossover": self.verdict.to_dict() if self.verdict else None,
            "saved_before": self.before,
            "saved_after": self.after,
        }


@dataclass(frozen=True)
class OpRow:
    """An op other than a layer, inside a module. buffer: how it keeps what it saves; before, after: bytes that torch and the
    plan save."""

    module: str
    op: str
    buffer: str
    before: int
    after: int


def op_rows(policy: Policy, model: nn.Module, sample: Tensor, points: Sequence[Point] = ()) -> list[OpRow]:
    """What the ops inside a model, on the meta device, save of a sample beside what layers keep of their inputs. Of the sample
    only shape and dtype count."""
    plans = resolve_activations(policy, model)
    sample = sample.to("meta")
    before, after = (books_of(model, how, sample, points).by_op(beside_inputs=True) for how in (None, policy))

    def buffer(module: str, op: str) -> str:
        while module and module not in plans:  # the plan of the nearest module around
            module = module.rpartition(".")[0]
        found = dict(plans[module].buffers) if module in plans else {}
        return str(found.get(op, "raw"))

    places = [place for place in {**before, **after} if place[1] not in ("linear", "conv2d")]
    return [OpRow(*place, buffer(*place), before.get(place, 0), after.get(place, 0)) for place in places]


def plan_rows(
    policy: Policy,
    model: nn.Module,
    sample: Tensor | None = None,
    *,
    device: str = "cpu",
    points: Sequence[Point] = (),
) -> list[Row]:
    """The table of a policy and a model. sample: an input, of which only shape and dtype count; without it, no bytes.

    device: the torch device type whose kernels are named; points: the crossover table that counts, if there is a sample.
    The model's parameters are on the meta device afterwards if a sample is given. Raises PolicyError as `resolve` does, and
    HotError if the model can't take the sample.
    """
    resolutions = resolve_detailed(policy, model)
    ran = {} if sample is None else _run(model, resolutions, sample, points)
    if sample is not None and any(_is_recomputed(resolution.plan) for resolution in resolutions.values()):
        kept = {
            module: size for (module, _), size in books_of(model, policy, sample.to("meta"), points).by_op().items()
        }
        for name, (whole, _, known) in ran.items():
            if _is_recomputed(resolutions[name].plan) and not (known and known.leaves_exact):
                ran[name] = whole, kept.get(name, 0), known
    rows = []
    for name, resolution in resolutions.items():
        before, after, verdict = ran.get(name, (None, None, None))
        rows.append(Row(resolution, _products(resolution.plan, verdict, device), before, after, verdict))
    return rows


def _is_recomputed(plan: LayerPlan | Skip) -> bool:
    return isinstance(plan, LayerPlan) and plan.buffer.recompute


def _products(plan: LayerPlan | Skip, verdict: Verdict | None, device: str) -> dict[str, str]:
    """How the products of a row run, by path."""
    if isinstance(plan, Skip):
        return {}
    if verdict and verdict.leaves_exact:
        return dict.fromkeys(_PATHS, "torch")
    try:
        stages = serving(plan, device)
    except BackendError:  # a plan for another machine can be looked at as well
        return dict.fromkeys(_PATHS, f"{plan.backend}, missing here")
    return {path: stages[f"{path} product"] for path in _PATHS}


def _run(
    model: nn.Module, resolutions: dict[str, Resolution], sample: Tensor, points: Sequence[Point]
) -> dict[str, tuple[int, int, Verdict | None]]:
    """(before, after, verdict) of every layer that the model runs. What layers share counts for the first; of a layer that
    runs more than once, a verdict that leaves it exact counts."""
    seen: dict[int, Tensor] = {}  # holds what was counted, so that an id stays one tensor's

    def count(tensors: tuple[Tensor, ...]) -> int:
        new = [t for t in tensors if id(t) not in seen]
        seen.update((id(t), t) for t in new)
        return sum(t.numel() * t.element_size() for t in new)

    found: dict[str, tuple[int, int, Verdict | None]] = {}
    with _inputs(model.to("meta"), resolutions) as inputs:
        try:
            model(sample.to("meta"))
        except Exception as error:  # whatever a model says of an input that it cannot take
            raise HotError(
                f"the model does not take an input {tuple(sample.shape)} of {sample.dtype}: {error}"
            ) from error
    for name, x in inputs:
        module, plan = resolutions[name].layer.module, resolutions[name].plan
        view, verdict = view_of(module), None
        if isinstance(plan, LayerPlan) and plan.backend == AUTO:
            verdict = judge(points, x.shape, x.dtype, module.weight.shape, plan, view)
        if not module.weight.requires_grad:
            before = after = 0
        elif isinstance(plan, Skip) or (verdict and verdict.leaves_exact):
            before = after = count((x,))
        else:
            before = count((x,))
            after = count(keep(x, x.dtype, plan, view))
        known = found.get(name, (0, 0, None))
        kept = known[2] if known[2] and known[2].leaves_exact else verdict
        found[name] = known[0] + before, known[1] + after, kept
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


_PATHS = "grad_input", "grad_weight"


def serving(plan: LayerPlan, device: str) -> dict[str, str]:
    """Which kernel on which backend is tried first for each stage of a plan on a device type, and how each product runs.

    Raises BackendError if the plan names a backend that is missing here or not for that device.
    """
    ops = get_ops(plan.backend, device)

    def operand(op: str) -> str:
        served = ops.serving(op)
        return (
            served
            if served != "composition"
            else f"{ops.serving('project')} project + {ops.serving('quantize')} quantize"
        )

    def product(path: GradInputPlan | GradWeightPlan) -> str:
        backend = ops.serving("matmul")
        return product_text(product_kind(path), backend, _product_note(path, ops))

    both = ops.serving("grad_output_operands")
    return {
        "grad_output": both if both != "composition" else operand("transform_quantize"),
        "weight": operand("transform_quantize"),
        "input": operand("transform_quantize"),
        "grad_input product": product(plan.grad_input),
        "grad_weight product": product(plan.grad_weight),
    }


def product_text(kind: str, backend: str, note: str) -> str:
    """``integer, reference``, with what the backend says of it behind a colon; the kind alone where torch multiplies floats."""
    if kind in ("torch", "float"):
        return kind
    return f"{kind}, {backend}: {note}" if note else f"{kind}, {backend}"


def _product_note(path: GradInputPlan | GradWeightPlan, ops: Ops) -> str:
    """What is to be said of a product beyond its kind: that its integer codes are held as floats."""
    return (
        "exact in float8 e4m3, small ones in int8" if isinstance(path, GradInputPlan) and holders(path, ops)[0] else ""
    )
