"""What `hot bench layers` times of a layer: torch's own in several precisions, policies, and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hot import crossover
from hot.bench.peers import LIBRARIES, PRODUCTS, Operands, Run, int8_products, library
from hot.bench.shapes import Layer
from hot.bench.timing import Call, Candidate
from hot.executor import conv2d, linear
from hot.policies.plan import LayerPlan, Skip
from hot.policies.resolve import resolve
from hot.policies.schema import Policy

FORWARD, BACKWARD = "forward", "backward"
BASELINES = {"bf16": (torch.bfloat16, "highest"), "tf32": (torch.float32, "high"), "fp32": (torch.float32, "highest")}
"""torch's own layer: its dtype, and the precision of its float32 products."""
RESERVED = {*BASELINES, *LIBRARIES, PRODUCTS}
Passes = dict[str, Candidate]
"""A candidate for each pass."""


def candidates(
    layer: Layer,
    policies: Mapping[str, Policy],
    baselines: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
    peers: bool,
) -> dict[str, Passes]:
    """Baselines, policies and, of a linear layer, peers, by name. They share their input sets. Raises as `plan_of`."""

    @cache
    def operands(dtype: torch.dtype, number: int) -> Operands:
        return _operands(layer, dtype, device, number)

    def passes(run: Callable[[Operands], Run], dtype: torch.dtype, precision: str) -> Passes:
        def forward(number: int) -> Call:
            return _at(precision, run(operands(dtype, number)).forward)

        def backward(number: int) -> Call:
            t = operands(dtype, number)
            compute, trained = run(t)
            y = _at(precision, compute)()
            return _at(precision, lambda: torch.autograd.grad(y, trained, t.g, retain_graph=True))

        return {FORWARD: forward, BACKWARD: backward}

    found = {name: passes(_dense(layer), *BASELINES[name]) for name in baselines}
    found |= {name: passes(_planned(layer, policy), dtype, "highest") for name, policy in policies.items()}
    if peers and layer.kind == "linear":
        found[PRODUCTS] = {BACKWARD: lambda number: int8_products(operands(dtype, number))}
        found |= {name: passes(library(name), dtype, "highest") for name in LIBRARIES}
    return found


def plan_of(layer: Layer, policy: Policy) -> LayerPlan | Skip:
    """What a policy makes of a layer that has no name. Raises PolicyError as `resolve` does."""
    with torch.device("meta"):
        module: nn.Module = (
            nn.Conv2d(layer.weight[1], layer.outputs, layer.kernel, layer.stride, layer.kernel // 2, bias=False)
            if layer.kernel
            else nn.Linear(layer.inputs, layer.outputs)
        )
    return resolve(policy, module)[""]


def _dense(layer: Layer) -> Callable[[Operands], Run]:
    if layer.kernel:
        return lambda t: Run(lambda: F.conv2d(t.x, t.weight, t.bias, layer.stride, layer.kernel // 2), _trained(t))
    return lambda t: Run(lambda: F.linear(t.x, t.weight, t.bias), _trained(t))


def _planned(layer: Layer, policy: Policy) -> Callable[[Operands], Run]:
    """The layer under a policy; torch's own where the policy leaves it exact."""
    plan = plan_of(layer, policy)
    if isinstance(plan, Skip):
        return _dense(layer)
    if layer.kernel:
        return lambda t: Run(lambda: conv2d(t.x, t.weight, t.bias, plan, layer.stride, layer.kernel // 2), _trained(t))
    return lambda t: Run(lambda: linear(t.x, t.weight, t.bias, plan), _trained(t))


def _trained(t: Operands) -> tuple[Tensor, ...]:
    return (t.x, t.weight) if t.bias is None else (t.x, t.weight, t.bias)


def _operands(layer: Layer, dtype: torch.dtype, device: torch.device, number: int) -> Operands:
    """Normal numbers with a few outlier channels, as activations and gradients have them; a convolution's in channels_last."""
    generator = torch.Generator(device).manual_seed(number)

    def values(shape: tuple[int, ...]) -> Tensor:
        t = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return t.contiguous(memory_format=torch.channels_last) if layer.kernel else t

    x, weight, g = values(layer.x), values(layer.weight).mul_(layer.inputs**-0.5), values(layer.y)
    for t in (x, g):
        t.movedim(1 if layer.kernel else -1, 0)[3::97].mul_(20)
    bias = None if layer.kernel else torch.zeros(layer.outputs, device=device, dtype=dtype).requires_grad_()
    return Operands(x.requires_grad_(), weight.requires_grad_(), bias, g)


def _at(precision: str, call: Callable[[], object]) -> Callable[[], Any]:
    """A call whose float32 products have that precision."""

    def run() -> object:
        torch.set_float32_matmul_precision(precision)
        return call()

    return run


@contextmanager
def settled(device: torch.device, as_in_training: bool = False) -> Iterator[None]:
    """HOT on every layer that a policy gives it to, or `as_in_training` where the crossover table does; torch at its best, and
    able to run a compiled backward twice."""
    import torch._functorch.config

    with ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        if not as_in_training:
            stack.enter_context(crossover.off())
        stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
        if device.type == "cuda":  # cuDNN chooses by trying, and its float32 is float32
            for flag, value in {"benchmark": True, "allow_tf32": False}.items():
                stack.callback(setattr, torch.backends.cudnn, flag, getattr(torch.backends.cudnn, flag))
                setattr(torch.backends.cudnn, flag, value)
        yield
