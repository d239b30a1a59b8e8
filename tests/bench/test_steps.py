"""Steps of a workload: what variants save, what running out of memory leaves behind, the search for a batch, configurations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import hot
from hot.bench import steps
from hot.bench.steps import TORCH, StepConfig, Training, Variant, config_names, load_config, measure_step
from hot.bench.workloads import VitStep

CPU = torch.device("cpu")
TINY = VitStep(size=32, classes=10, patch=8, dim=64, depth=2, heads=2)


def variants() -> dict[str, Variant]:
    ours = [Variant(name, low=True, policy=hot.load_policy(name)) for name in ("hot", "memory")]
    return {variant.name: variant for variant in (*TORCH, *ours)}


def test_every_variant_saves_less_than_the_one_before() -> None:
    found = {name: measure_step(TINY, "tiny", each, 8, CPU, repeats=3) for name, each in variants().items()}
    assert all(row.reason == "" and row.p20_ms <= row.p50_ms <= row.p80_ms for row in found.values())
    saved = {name: row.saved for name, row in found.items()}
    assert saved["fp32"] == saved["tf32"] > saved["bf16"] > saved["hot"] > saved["memory"]
    assert saved["bf16"] > saved["bf16 + checkpointing"]
    assert all(row.peak_reserved is None and row.peak_allocated is not None for row in found.values())


def test_variants_train_the_same_model_on_the_same_batch() -> None:
    """Forward is exact: the first losses are equal to the bit, checkpointed or under a policy."""
    losses = {name: Training(TINY, each, 4, CPU).step().item() for name, each in variants().items()}
    assert losses["fp32"] == losses["tf32"]
    assert losses["bf16"] == losses["bf16 + checkpointing"] == losses["hot"] == losses["memory"] != losses["fp32"]


def test_out_of_memory_is_a_row_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    full, real = {"fp32"}, Training.step

    def step(self: Training) -> Tensor:
        if self.variant.name in full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self)

    monkeypatch.setattr(Training, "step", step)
    first, second = (measure_step(TINY, "tiny", variants()[name], 4, CPU, repeats=3) for name in ("fp32", "bf16"))
    assert first.reason == "out of memory at batch 4: try --batch 2, or --budget" and first.p50_ms is None
    assert second.reason == "" and second.saved


def test_ops_of_a_variant() -> None:
    """They add up to what the row says, and out of memory leaves none."""
    row = measure_step(TINY, "tiny", variants()["memory"], 4, CPU, repeats=3)
    found = steps.measure_ops(TINY, variants()["memory"], 4, CPU)
    assert sum(found.values()) == row.saved and found["blocks.0.mlp.act", "Activation"] > 0
    assert found["blocks.0.attn.qkv", "Hot"] > 0 and ("blocks.0.mlp.fc2", "Hot") not in found


def test_ops_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Training) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Training, "forward", full)
    assert steps.measure_ops(TINY, TORCH[0], 4, CPU) == {}


def test_the_precision_is_as_it_was() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match="out"), steps.settled(variants()["tf32"], CPU):
        assert torch.get_float32_matmul_precision() == "high"
        raise RuntimeError("out")
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("name", config_names())
def test_configurations_that_come_along(name: str) -> None:
    found = load_config(name)
    assert isinstance(found, StepConfig) and found.name == name and found.batch > 1
    assert all(hot.load_policy(policy) for policy in found.policies)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workload: {kind: vit}\n", r"mine.yaml:1:1.*batch"),
        ("workload: {kind: vid}\nbatch: 4\n", r"mine.yaml:1:18.*unknown workload 'vid', did you mean 'vit'"),
        ("workload: {kind: vit, depth: 0}\nbatch: 4\n", r"mine.yaml:1:30.*depth: must be at least 1, not 0"),
        ("workload: {kind: vit}\nbatch: 4\nbudget: 1\n", r"mine.yaml:3:1.*unknown key 'budget'"),
        ("- 1\n", r"mine.yaml:1:1.*mapping"),
    ],
)
def test_broken_configurations(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(hot.PolicyError, match=message):
        load_config(str(path))


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(hot.HotError, match=r"no configuration 'vit'.*Known: bert-base, llama-1b"):
        load_config("vit")
