"""How far each op's gradients are from exact ones under a policy, on activations of a model that has trained a while.

python benchmarks/op_errors.py benchmarks/results/op_errors.csv fashion-vit wordnet-minilm … [--set data.root=…]

A step is recorded call by call, with the gradient that comes back to each call; then every call is made again by itself, as
torch has it and as the policy has it, from the same inputs and the same gradient.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import hot
from hot.activations import saving
from hot.activations.calls import OPS
from hot.bench.records import environment, write_csv
from hot.policies.activations import ActivationPlan
from hot.policies.plan import LayerPlan
from hot.policies.resolve import resolve, resolve_activations
from hot.train.config import Experiment
from hot.train.loading import load_experiment
from hot.train.loop import Run

LAYERS = {F.linear: "linear", torch.conv2d: "conv2d", F.conv2d: "conv2d"}
NAMES = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias"),
    "scaled_dot_product_attention": ("query", "key", "value"),
    "mul": ("input", "other"),
}
"""Of the arguments that gradients go to, where they are not an input, a weight and a bias."""


@dataclass
class Call:
    """A call of torch's, with copies of its tensors, and the gradient of its result."""

    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: LayerPlan | ActivationPlan
    gradient: list[Tensor] = field(default_factory=list)

    def gradients(self, ours: bool) -> dict[str, Tensor]:
        """Those of the arguments that a gradient goes to, as torch, or as the plan, has them."""
        leaves: dict[str, Tensor] = {}

        def again(name: str, t: Any) -> Any:
            if not _differentiates(t):
                return t
            leaves[name] = t.detach().requires_grad_()
            return leaves[name].clone()  # what is done in place is not done to a leaf

        names = NAMES.get(self.op, ("input", "weight", "bias"))
        args = [again(names[i], t) if i < len(names) else t for i, t in enumerate(self.args)]
        kwargs = {name: again(name, t) for name, t in self.kwargs.items()}
        torch.manual_seed(0)  # dropout draws the same
        if ours and isinstance(self.plan, LayerPlan):
            layer = hot.linear if self.op == "linear" else hot.conv2d
            x, weight, bias, *how = args if len(args) > 2 else (*args, None)
            y = layer(x, weight, bias, self.plan, *how[:3])
        else:
            with saving(self.plan) if ours and isinstance(self.plan, ActivationPlan) else nullcontext():
                y = self.function(*args, **kwargs)
        return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), self.gradient[0]), strict=True))


class Recording(TorchFunctionMode):
    """Records calls of a forward: those of layers by the plans of their weights, all others by one plan."""

    def __init__(self, layers: dict[int, LayerPlan], plan: ActivationPlan) -> None:
        super().__init__()
        self.layers, self.plan, self.calls = layers, plan, list[Call]()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op, plan = OPS.get(function), self.plan
        if function in LAYERS:
            op, plan = LAYERS[function], self.layers.get(id(args[1]))
        elif op not in dict(plan.buffers):
            op = None
        if op is None or plan is None or not any(_differentiates(t) for t in tree_leaves((args, kwargs))):
            return function(*args, **kwargs)
        kept = tree_map(
            lambda t: t.detach().clone().requires_grad_(t.requires_grad) if _differentiates(t) else t, (args, kwargs)
        )
        y = function(*args, **kwargs)
        call = Call(op, function, *kept, plan)
        y.register_hook(lambda g: call.gradient.append(g.detach().clone()))
        self.calls.append(call)
        return y


def _differentiates(t: Any) -> bool:
    return isinstance(t, Tensor) and t.requires_grad


def record(experiment: Experiment, policy: hot.Policy, steps: int) -> list[Call]:
    """The calls of one step after `steps` exact ones."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(experiment, hot.load_policy("exact"), "exact", 0, Path(folder), experiment.data.load())
        for step in range(steps):
            run._update(*run.batch(0, step))
        plans = resolve(policy, run.model)
        modules = dict(run.model.named_modules())
        layers = {id(modules[name].weight): plan for name, plan in plans.items() if isinstance(plan, LayerPlan)}
        recording = Recording(layers, resolve_activations(policy, run.model).get("", ActivationPlan()))
        with recording:
            loss = run.loss(*run.batch(0, steps))
        loss.backward()
    return [call for call in recording.calls if call.gradient]


def errors(calls: Sequence[Call]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """By op and argument: ‖ours − exact‖ / ‖exact‖, and ⟨ours, exact⟩ / ⟨exact, exact⟩, of each call."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for call in calls:
        ours = call.gradients(True)
        for name, exact in call.gradients(False).items():
            a, b = ours[name].double().flatten(), exact.double().flatten()
            if b.norm() > 0:
                found[call.op, name].append((((a - b).norm() / b.norm()).item(), (a @ b / (b @ b)).item()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--policy", default="memory")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    for name in args.experiments:
        experiment = load_experiment(name, args.set)
        policy = hot.load_policy(args.policy)
        if experiment.backend:
            policy = hot.Policy(extends=policy, backend=experiment.backend)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        rows = []
        for (op, what), each in errors(record(experiment, policy, args.steps)).items():
            off = [error for error, _ in each]
            row = {"experiment": experiment.name, "policy": args.policy, "op": op, "gradient": what, "calls": len(each)}
            slope = median(slope for _, slope in each)
            rows.append({**environment(device), **row, "median": median(off), "largest": max(off), "slope": slope})
            print(
                f"{name}: {op}, {what}: {len(each)} calls, {median(off):.4f}, at most {max(off):.4f}, slope {slope:.4f}"
            )
        write_csv(args.output, rows)


if __name__ == "__main__":
    main()
