"""The analytic calculator: what a training step saves, its peak, and its bit operations, from shapes alone.

The forward runs on meta tensors, without memory or time. A ledger sees every call of a torch function, casts as CUDA's autocast
does, and books what torch's op keeps for backward, or what a plan keeps instead: the codes are those of the code that makes
them. Peak = weights, AdamW's two moments and the batch, plus the larger of

    forward    what is saved so far + what the running op reads and writes, and other tensors that are still in use
    backward   what is not yet differentiated + gradients of what the op read and wrote + gradients of the weights behind it

A checkpointed block is one op of the latter, which writes all that it saves when it runs again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hot.bench.steps import Variant
from hot.bench.workloads import Workload
from hot.books import Books
from hot.crossover import Point
from hot.ledger import Ledger
from hot.policies.schema import Policy

PASSES = "forward", "grad_input", "grad_weight"


@dataclass
class Estimate:
    """Bytes, and bit operations.

    saved: what autograd holds, copies of weights that autocast makes included; saved_in_layers: by linear and conv layers;
    by_op: by module and op. weights: the model's, buffers included; gradients of what is trained; moments: AdamW's two;
    inputs: the batch, but for what is saved of it anyway. peak: of a whole step.

    published: what papers count as saved, inputs of linear and conv layers alone: elements · bits / 8 · the share of the
    coefficients that a projection keeps. bops: of the products of linear and conv layers, by pass: multiply-adds · bits of one
    operand · bits of the other, as *HOT: Hadamard-based Optimized Training* (CVPR 2025) counts them, without transforms.
    """

    saved: int = 0
    saved_in_layers: int = 0
    peak: int = 0
    weights: int = 0
    gradients: int = 0
    moments: int = 0
    inputs: int = 0
    published: int = 0
    by_op: dict[tuple[str, str], int] = field(default_factory=dict)
    bops: Counter[str] = field(default_factory=Counter)
    bops_by_layer: dict[str, Counter[str]] = field(default_factory=dict)


def estimate(workload: Workload, variant: Variant, batch: int, points: Sequence[Point] = ()) -> Estimate:
    """The estimate of one variant's step at a batch size. points: the crossover that counts under ``backend: auto``.

    Raises HotError that names what to install, and what resolving the policy raises.
    """
    with torch.device("meta"):
        model = workload.build()
    inputs = workload.batch(batch, torch.device("meta"))
    ledger = Ledger(model, variant, points)
    blocks = workload.blocks(model) if variant.checkpoints else []
    with torch.no_grad(), ledger.watching(model, blocks):
        workload.loss(model, inputs)
    return _totals(ledger, model, inputs)


def books_of(model: nn.Module, policy: Policy | None, sample: Tensor, points: Sequence[Point] = ()) -> Books:
    """What a forward of a model on the meta device saves under a policy, or as torch has it, once it ran. Raises what the model
    raises of an input that it cannot take."""
    ledger = Ledger(model, Variant("", policy=policy), points)
    with torch.no_grad(), ledger.watching(model, []):
        model(sample)
    return ledger.books


def _totals(ledger: Ledger, model: nn.Module, inputs: tuple[Tensor, ...]) -> Estimate:
    """What the books of a whole forward come to."""
    result = Estimate(published=ledger.published, bops=ledger.bops, bops_by_layer=ledger.bops_by_layer)
    booked = {key[1] for key in ledger.books.booked if key[0] == "tensor"}
    given = {ledger.books.key(t): t.untyped_storage().nbytes() for t in inputs}
    result.inputs = sum(size for key, size in given.items() if key not in booked)
    result.weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    result.gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    result.moments = 2 * result.gradients
    result.saved = held = sum(ledger.books.booked.values())
    result.saved_in_layers, result.by_op = ledger.books.saved_in_layers, ledger.books.by_op()
    gradients, backward = 0, result.gradients
    for event in reversed(ledger.events):
        backward = max(backward, held + gradients + event.moved)
        held -= event.saved
        gradients += event.gradients
    result.peak = result.weights + result.moments + result.inputs + max(ledger.peak, backward)
    return result
