"""The analytic estimate against what a forward really saves, and against numbers worked out by hand."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hot
from hot.bench.steps import TORCH, Training, Variant
from hot.bench.workloads import Batch, BertStep, LlamaStep, VitStep, Workload
from hot.crossover import Point
from hot.estimate import Estimate, estimate
from hot.policies.resolve import resolve
from hot.train.models import ResNet18

CPU = torch.device("cpu")


class ResNetStep(Workload):
    """Convolutions, batch norm and ReLU in place of what they read, channels_last."""

    def build(self) -> nn.Module:
        return ResNet18(width=16).build((3, 32, 32), 10).to(memory_format=torch.channels_last)

    def batch(self, size: int, device: torch.device) -> Batch:
        images = torch.randn(size, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
        return images, torch.randint(0, 10, (size,), device=device)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [block for stage in range(1, 5) for block in model.get_submodule(f"layer{stage}").children()]


class WrittenOut(nn.Module):
    """A block as models write it out: attention by softmax and two products, and kinks other than ReLU's."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.up = (nn.Linear(dim, n) for n in (3 * dim, dim, 2 * dim))
        self.down = nn.Linear(2 * dim, dim)
        self.kinks = nn.ModuleList([nn.LeakyReLU(), nn.ReLU6()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = self.kinks[0](self.proj((q @ k.mT).softmax(-1, dtype=torch.float32) @ v))
        return self.down(self.kinks[1](self.up(x)))


class WrittenOutStep(Workload):
    def build(self) -> nn.Module:
        return nn.Sequential(WrittenOut(64), WrittenOut(64))

    def batch(self, size: int, device: torch.device) -> Batch:
        return torch.randn(size, 96, 64, device=device), torch.empty(0, device=device)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch[0]).sum()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())


VIT = VitStep(size=32, classes=10, patch=8, dim=64, depth=2, heads=2)
WORKLOADS: dict[str, Workload] = {
    "vit": VIT,
    "resnet": ResNetStep(),
    "written out": WrittenOutStep(),
    "bert": BertStep(dim=64, depth=2, heads=2, length=32, vocabulary=100),
    "llama": LlamaStep(dim=64, hidden=128, depth=2, heads=4, groups=2, length=32, vocabulary=100),
    "lora": LlamaStep(dim=64, hidden=128, depth=2, heads=4, groups=2, length=32, vocabulary=100, lora=4),
}
POLICIES = ("", "hot", "memory")


def variant(policy: str, low: bool = False) -> Variant:
    return Variant(policy or "exact", low=low, policy=hot.load_policy(policy) if policy else None)


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("policy", [*POLICIES, "checkpoints"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_bytes_that_are_saved(name: str, policy: str, low: bool) -> None:
    """Within 1 %: where no dropout is, which keeps factors on a CPU and a mask on a GPU, both save the same."""
    if name in ("bert", "llama", "lora"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    if name == "lora":
        pytest.importorskip("peft", reason="peft is not installed")
        policy += "-lora" * (policy in ("hot", "memory"))
    workload = WORKLOADS[name]
    way = Variant("", low=low, checkpoints=True) if policy == "checkpoints" else variant(policy, low)
    training = Training(workload, way, 8, CPU)
    for module in training.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    # CUDA has no fused attention in float32 for heads that share keys; a CPU's has
    kernel = sdpa_kernel(SDPBackend.MATH) if name in ("llama", "lora") and not low else nullcontext()
    with kernel:
        saved, in_layers = training.saved()
    guess = estimate(workload, way, 8)
    dropped = sum(size for (_, op), size in guess.by_op.items() if op == "dropout")
    integers = 4 * sum(t.numel() * 8 for t in training.batch if not t.is_floating_point())  # labels: not estimated
    assert abs(guess.saved - dropped - saved) <= 0.01 * saved + integers
    assert abs(guess.saved_in_layers - in_layers) <= 0.01 * in_layers


def test_by_hand() -> None:
    """One block, counted with a pencil: float32, 4 images of 17 tokens, 64 features."""
    guess = estimate(VitStep(size=32, classes=10, patch=8, dim=64, depth=1, heads=2), TORCH[0], 4)
    tokens, byte = 4 * 17, 4
    x = tokens * 64 * byte
    block = {
        ("blocks.0.norm1", "layer_norm"): x + 2 * tokens * byte,
        ("blocks.0.attn.qkv", "linear"): x,
        ("blocks.0.attn", "scaled_dot_product_attention"): 4 * x + 2 * tokens * byte,
        ("blocks.0.norm2", "layer_norm"): x + 2 * tokens * byte,
        ("blocks.0.mlp.fc1", "linear"): x,
        ("blocks.0.mlp.act", "gelu"): 4 * x,
        ("blocks.0.mlp.fc2", "linear"): 4 * x,
    }
    assert {at: size for at, size in guess.by_op.items() if at[0].startswith("blocks")} == block
    macs = tokens * (64 * 192 + 64 * 64 + 2 * 64 * 256) + 4 * 16 * 64 * 192 + 4 * 64 * 10
    assert guess.bops["forward"] == guess.bops["grad_input"] == guess.bops["grad_weight"] == macs * 32 * 32


def test_bit_operations_of_a_plan() -> None:
    """4 × 4 bits in grad_input, 8 × 8 bits over half of the tokens in grad_weight; bf16 is 16 × 16."""
    exact, ours = (estimate(VIT, variant(policy, low=True), 16) for policy in ("", "hot"))
    assert ours.bops["forward"] == exact.bops["forward"]
    all_macs, left_exact = exact.bops["forward"] // 16**2, 16 * (16 * 64 * 192 + 64 * 10)  # the stem and the head
    assert ours.bops["grad_input"] == (all_macs - left_exact) * 4**2 + left_exact * 16**2
    assert ours.bops["grad_weight"] < (all_macs - left_exact) * 8**2 * 0.6 + left_exact * 16**2
    assert ours.published < 0.6 * exact.published


def test_variants_in_order() -> None:
    found = {v.name: estimate(VIT, v, 16) for v in (*TORCH, *(variant(policy, low=True) for policy in POLICIES))}
    for kind in ("saved", "peak"):
        sizes = {name: getattr(guess, kind) for name, guess in found.items()}
        assert sizes["fp32"] == sizes["tf32"] > sizes["bf16"] == sizes["exact"] > sizes["hot"] > sizes["memory"]
        assert sizes["bf16"] > sizes["bf16 + checkpointing"]


def test_it_grows_with_the_batch_and_stays_above_what_is_always_there() -> None:
    small, large = (estimate(VIT, variant("hot", low=True), batch) for batch in (4, 64))
    assert 12 < large.saved / small.saved < 16
    weights = 4 * sum(p.numel() for p in VIT.build().parameters())
    assert 4 * weights <= small.peak < large.peak


def test_a_crossover_counts() -> None:
    plan = str(resolve(hot.load_policy("hot"), VIT.build())["blocks.0.mlp.fc1"])
    losing = Point("linear", plan, "bfloat16", 100, 100, 100, 0.5)
    exact, ours, left = (
        estimate(VIT, variant(policy, low=True), 16, points)
        for policy, points in (("", ()), ("hot", ()), ("hot", (losing,)))
    )
    assert isinstance(left, Estimate) and left.saved == exact.saved > ours.saved


def test_what_the_peak_is_made_of() -> None:
    """Adapters train a little of the model: weights of all of it, gradients and moments of them."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    guess = estimate(WORKLOADS["lora"], TORCH[2], 8)
    model = WORKLOADS["lora"].build()
    sizes = [
        4 * sum(p.numel() for p in model.parameters() if p.requires_grad or not trained) for trained in (True, False)
    ]
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert (guess.gradients, guess.weights) == (sizes[0], sizes[1] + buffers) and guess.moments == 2 * sizes[0]
    assert guess.inputs == 8 * 32 * 8  # token ids, which nobody saves: the embedding is frozen
    assert guess.peak >= guess.weights + guess.moments + guess.inputs + guess.saved


def test_bit_operations_by_layer() -> None:
    guess = estimate(VIT, variant("hot", low=True), 16)
    assert sum(guess.bops_by_layer.values(), Counter[str]()) == guess.bops
    tokens = 16 * 17
    assert guess.bops_by_layer["blocks.0.mlp.fc1"]["grad_input"] == tokens * 64 * 256 * 4 * 4
    assert guess.bops_by_layer["head"]["grad_input"] == 16 * 64 * 10 * 16 * 16
