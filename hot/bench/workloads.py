"""What a training step is made of: a model, a batch for it, its loss, and the blocks that gradient checkpointing wraps."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hot.errors import HotError
from hot.policies.params import Params, registering
from hot.registry import Registry
from hot.train.models import Vit

Batch = tuple[Tensor, Tensor]
"""Inputs and labels."""


class Workload(Params):
    """Parameters of a model to take steps of. Subclass it, declare fields, write the methods."""

    def build(self) -> nn.Module:
        """A new model, on the current default device. Raises HotError that names what to install."""
        raise NotImplementedError(f"{type(self).__name__} has no build()")

    def batch(self, size: int, device: torch.device) -> Batch:
        """Random inputs and labels."""
        raise NotImplementedError(f"{type(self).__name__} has no batch()")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules that checkpointing wraps, each for itself."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks()")

    @property
    def unit(self) -> str:
        """What a batch is counted in."""
        return "images"


workloads: Registry[type[Workload]] = Registry("workload")
register_workload = registering(workloads, Workload)


def checkpointed(blocks: list[nn.Module]) -> None:
    """Let every block run again in backward instead of saving what is inside: torch.utils.checkpoint, without reentry."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class _Images(Workload):
    size: int = Field(default=224, ge=1)
    classes: int = Field(default=1000, ge=1)

    def batch(self, size: int, device: torch.device) -> Batch:
        images = torch.randn(size, 3, self.size, self.size, device=device)
        return images, torch.randint(0, self.classes, (size,), device=device)


@register_workload("vit")
class VitStep(_Images):
    """HOT's vision transformer, layers named as in timm; ViT-B/16 by default."""

    patch: int = Field(default=16, ge=1)
    dim: int = Field(default=768, ge=1)
    depth: int = Field(default=12, ge=1)
    heads: int = Field(default=12, ge=1)

    def build(self) -> nn.Module:
        spec = Vit(patch=self.patch, dim=self.dim, depth=self.depth, heads=self.heads, pool="token")
        return spec.build((3, self.size, self.size), self.classes)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule("blocks").children())


@register_workload("resnet50")
class ResNet50Step(_Images):
    """torchvision's ResNet-50, channels_last."""

    def build(self) -> nn.Module:
        resnet = _library("torchvision.models", "torchvision").resnet50
        model: nn.Module = resnet(num_classes=self.classes)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(self, size: int, device: torch.device) -> Batch:
        images, labels = super().batch(size, device)
        return images.contiguous(memory_format=torch.channels_last), labels

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [block for stage in range(1, 5) for block in model.get_submodule(f"layer{stage}").children()]


class _Text(Workload):
    length: int = Field(default=512, ge=1)
    vocabulary: int = Field(default=30522, ge=2)

    @property
    def unit(self) -> str:
        return "sequences"


@register_workload("bert")
class BertStep(_Text):
    """transformers' BERT with a classification head; BERT-base by default, with its dropout."""

    dim: int = Field(default=768, ge=1)
    depth: int = Field(default=12, ge=1)
    heads: int = Field(default=12, ge=1)

    def build(self) -> nn.Module:
        library = _library("transformers", "hot-training[hf]")
        config = library.BertConfig(
            vocab_size=self.vocabulary, hidden_size=self.dim, num_hidden_layers=self.depth, num_attention_heads=self.heads,
            intermediate_size=4 * self.dim, max_position_embeddings=self.length, attn_implementation="sdpa",
        )  # fmt: skip
        model: nn.Module = library.BertForSequenceClassification(config)
        return model.train()

    def batch(self, size: int, device: torch.device) -> Batch:
        words = torch.randint(0, self.vocabulary, (size, self.length), device=device)
        return words, torch.randint(0, 2, (size,), device=device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).logits, batch[1])

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule("bert.encoder.layer").children())


@register_workload("llama")
class LlamaStep(_Text):
    """transformers' Llama, 1.1 B parameters by default. lora: rank of adapters on linear layers, all else frozen; 0: none."""

    length: int = Field(default=2048, ge=1)
    vocabulary: int = Field(default=32000, ge=2)
    dim: int = Field(default=2048, ge=1)
    hidden: int = Field(default=8192, ge=1)
    depth: int = Field(default=16, ge=1)
    heads: int = Field(default=32, ge=1)
    groups: int = Field(default=8, ge=1)
    lora: int = Field(default=0, ge=0)

    def build(self) -> nn.Module:
        library = _library("transformers", "hot-training[hf]")
        config = library.LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.dim, intermediate_size=self.hidden, num_hidden_layers=self.depth,
            num_attention_heads=self.heads, num_key_value_heads=self.groups, max_position_embeddings=self.length,
            attn_implementation="sdpa", use_cache=False,
        )  # fmt: skip
        model: nn.Module = library.LlamaForCausalLM(config)
        if self.lora:
            peft = _library("peft", "hot-training[hf]")
            adapters = peft.LoraConfig(r=self.lora, lora_alpha=2 * self.lora, target_modules="all-linear")
            model = peft.get_peft_model(model, adapters)
        return model.train()

    def batch(self, size: int, device: torch.device) -> Batch:
        words = torch.randint(0, self.vocabulary, (size, self.length), device=device)
        return words, words

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
        return loss

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        name = "base_model.model.model.layers" if self.lora else "model.layers"
        return list(model.get_submodule(name).children())


def _library(name: str, package: str) -> Any:
    """The module of that name, which that package, or HOT's extra, brings along."""
    try:
        return __import__(name, fromlist=["_"])
    except ImportError as error:
        raise HotError(f"this workload needs {name.partition('.')[0]} ({error}): pip install '{package}'") from error
