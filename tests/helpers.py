"""What the tests share: plans by name, the gradients of a function, errors in decibels, what autograd saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hot.policies.buffers import Packed, Quantized, Raw
from hot.policies.plan import GradInputPlan, GradWeightPlan, LayerPlan
from hot.policies.quantizers import Float8, Int, Luq, NoQuantizer, Quantizer, Sawb
from hot.policies.transforms import Hadamard, HadamardLowRank, NoTransform, Transform

NONE, FULL, LOW = NoTransform(), Hadamard(), HadamardLowRank()
FLOAT = NoQuantizer()


def integer(bits: int, rounding: str = "nearest", granularity: str = "row", **params: Any) -> Int:
    return Int(bits=bits, rounding=rounding, granularity=granularity, **params)


def plan(
    grad_input: tuple[Transform, Quantizer, Quantizer] = (NONE, FLOAT, FLOAT),
    grad_weight: tuple[Transform, Quantizer, Quantizer] = (NONE, FLOAT, FLOAT),
    buffer: Packed | Quantized | Raw | None = None,
) -> LayerPlan:
    """A plan from (transform, grad_output, weight or input) of each path; packed unless a buffer is given."""
    return LayerPlan(GradInputPlan(*grad_input), GradWeightPlan(*grad_weight), buffer or Packed())


I4, I8 = integer(4), integer(8)
HOT = plan((FULL, integer(4, "hashed"), I4), (LOW, integer(8, "hashed"), I8))
PLANS = {
    "hot": HOT,
    "int8": plan((NONE, I8, I8), (NONE, I8, I8)),
    "int4": plan((NONE, I4, I4), (NONE, I4, I4)),
    "hadamard_int8": plan((FULL, I8, I8), (FULL, I8, I8)),
    "raw_buffer": plan((FULL, I8, I8), (FULL, I8, I8), Raw()),
    "quantized_buffer": plan((FULL, I8, I8), (FULL, I8, I8), Quantized()),
    "only_grad_input": plan((FULL, I8, I8), buffer=Raw()),
    "only_grad_weight": plan(grad_weight=(FULL, I8, I8)),
    "only_buffer": plan(buffer=Quantized()),
    "float_grad_output": plan((FULL, FLOAT, I8), (FULL, FLOAT, I8)),
    "tensor_scales": plan(
        (FULL, *[integer(8, granularity="tensor")] * 2), (FULL, *[integer(8, granularity="tensor")] * 2)
    ),
    "block_scales": plan(
        (FULL, *[integer(8, granularity="block", block=16)] * 2),
        (FULL, *[integer(8, granularity="block", block=16)] * 2),
    ),
    "token_scales": plan((FULL, I8, I8), (FULL, integer(8, granularity="token"), I8)),
    "float8": plan(
        (FULL, Float8(format="e5m2", granularity="row"), Float8(granularity="row")), (FULL, Float8(), Float8())
    ),
    "sawb": plan((FULL, I8, Sawb(bits=8)), (FULL, I8, Sawb(bits=8))),
    "luq": plan((NONE, Luq(), I4), (NONE, Luq(), I4)),
    "random_signs": plan((Hadamard(signs="random"), I8, I8), (Hadamard(signs="random", seed=3), I8, I8)),
    "random_rows": plan((FULL, I8, I8), (HadamardLowRank(order="random"), I8, I8)),
    "stochastic": plan(
        (FULL, integer(8, "stochastic"), I8), (FULL, integer(8, "stochastic"), integer(8, "stochastic"))
    ),
    "pseudo_stochastic": plan((FULL, integer(8, "pseudo_stochastic"), I8), (FULL, integer(8, "pseudo_stochastic"), I8)),
    "projected_tokens": plan((HadamardLowRank(axis="tokens"), I8, I8), (LOW, I8, I8)),
    "class_token": plan((FULL, I8, I8), (HadamardLowRank(prefix_tokens=1, tail="keep"), I8, I8)),
}
UNQUANTIZED = {
    "packed": plan((FULL, FLOAT, FLOAT), (FULL, FLOAT, FLOAT)),
    "raw": plan((FULL, FLOAT, FLOAT), (FULL, FLOAT, FLOAT), Raw()),
    "kept_tail": plan((FULL, FLOAT, FLOAT), (Hadamard(block=8, prefix_tokens=1, tail="keep"), FLOAT, FLOAT)),
    "signs": plan(
        (Hadamard(block=32, signs="random"), FLOAT, FLOAT), (Hadamard(block=4, signs="random"), FLOAT, FLOAT)
    ),
}


def for_conv(plan: LayerPlan) -> LayerPlan:
    """The plan for a k×k convolution, which can't be packed: 8-bit codes, or x itself where nothing is quantized."""
    if not plan.buffer.is_packed:
        return plan
    return replace(plan, buffer=Raw() if plan.grad_weight.input.is_identity else Quantized())


class Grads(NamedTuple):
    """What a layer gives: its output and the gradients of its operands (None where not asked for)."""

    output: Tensor
    grad_input: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


def grads(
    function: Callable[..., Tensor], *operands: Tensor | None, g: Tensor | None = None, autocast: bool = False
) -> Grads:
    """Run a layer on fresh leaves that share no storage with the operands, then backward with g (or a seeded one)."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in operands]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = function(*leaves)
    y.backward(grad_like(y) if g is None else g)
    got = [None if leaf is None else leaf.grad for leaf in leaves]
    return Grads(y.detach(), *got, *[None] * (3 - len(got)))


def grad_like(y: Tensor, seed: int = 1) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative(got: Tensor, exact: Tensor) -> float:
    """‖got − exact‖ / ‖exact‖ in float64; 0 for two tensors of zeros."""
    error, norm = (got.double() - exact.double()).norm().item(), exact.double().norm().item()
    return error / norm if norm else error


def decibels(got: Tensor, exact: Tensor) -> float:
    """The signal-to-noise ratio of got."""
    return -20 * torch.tensor(max(relative(got, exact), 1e-20)).log10().item()


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Every tensor that autograd packs inside the block."""
    found: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        found.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found


def storage_bytes(tensors: list[Tensor], without: tuple[Tensor, ...] = ()) -> int:
    """Bytes of the distinct storages of some tensors, but for those that others (a Parameter) own."""
    own = {t.untyped_storage().data_ptr() for t in without}
    sizes = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(size for address, size in sizes.items() if address not in own)
