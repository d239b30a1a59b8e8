"""Models to train: a compact ViT, ResNet-18, and what timm or a file of your own builds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hot.errors import HotError
from hot.policies.params import Params, registering
from hot.registry import Registry


class Model(Params):
    """Parameters of a model. Subclass it, declare fields, write `build`."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """A new model for inputs of a shape, (C, H, W) for images, (T,) for token ids; its weights follow torch.manual_seed."""
        raise NotImplementedError(f"{type(self).__name__} has no build()")


models: Registry[type[Model]] = Registry("model")
register_model = registering(models, Model)


class Attention(nn.Module):
    """Multi-head self-attention over (B, T, dim). fused: one layer `qkv`; else `q`, `k` and `v` on one input."""

    def __init__(self, dim: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        if fused:
            self.qkv = nn.Linear(dim, 3 * dim)
        else:
            self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """dim → ratio · dim → dim, GELU between."""

    def __init__(self, dim: int, ratio: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, ratio * dim)
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(ratio * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int, ratio: int, fused: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads, fused)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, ratio, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """(B, C, H, W) → (B, classes). pool: mean over the tokens, or a class token in front of them."""

    def __init__(self, spec: Vit, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        dim, tokens = spec.dim, (height // spec.patch) * (width // spec.patch)
        kernel, padding = (2 * spec.patch - 1, spec.patch - 1) if spec.overlap else (spec.patch, 0)
        self.patch_embed = nn.Conv2d(channels, dim, kernel, stride=spec.patch, padding=padding)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if spec.pool == "token" else None
        self.pos_embed = nn.Parameter(torch.empty(1, tokens + (spec.pool == "token"), dim))
        self.blocks = nn.ModuleList(
            Block(dim, spec.heads, spec.mlp_ratio, spec.fused_qkv, spec.dropout) for _ in range(spec.depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        nn.init.normal_(self.pos_embed, std=0.5)  # as large as the patches: a model this narrow learns slowly from less
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1) if self.cls_token is None else x[:, 0]))


@register_model("vit")
class Vit(Model):
    """A compact vision transformer, layers named as in timm: ``blocks.0.attn.qkv``, ``blocks.0.mlp.fc1``, ``head``.

    overlap: patches of 2·patch − 1 pixels every `patch` pixels, as in PVT v2 (W. Wang et al. 2022), so that neighbouring
    tokens are alike.
    """

    patch: int = Field(default=4, ge=1)
    overlap: bool = False
    dim: int = Field(default=96, ge=1)
    depth: int = Field(default=4, ge=1)
    heads: int = Field(default=4, ge=1)
    mlp_ratio: int = Field(default=4, ge=1)
    fused_qkv: bool = True
    pool: str = Field(default="mean", pattern="^(mean|token)$")
    dropout: float = Field(default=0.0, ge=0, lt=1)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        if self.dim % self.heads:
            raise HotError(f"model.heads: {self.heads} does not divide dim {self.dim}")
        if len(shape) != 3 or shape[1] % self.patch or shape[2] % self.patch:
            raise HotError(f"model.patch: {self.patch} does not divide images of {tuple(shape)}; data.size pads them")
        return VisionTransformer(self, shape, classes)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, 1×1 where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


@register_model("resnet18")
class ResNet18(Model):
    """ResNet-18 with a 3×3 stem for small images, named as in torchvision. width: channels of the first stage."""

    width: int = Field(default=64, ge=1)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        width = self.width
        model = nn.Sequential()
        model.add_module("conv1", nn.Conv2d(shape[0], width, 3, padding=1, bias=False))
        model.add_module("bn1", nn.BatchNorm2d(width))
        model.add_module("relu", nn.ReLU())
        inputs = width
        for stage in range(4):
            outputs, stride = width << stage, 1 if stage == 0 else 2
            blocks = nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))
            model.add_module(f"layer{stage + 1}", blocks)
            inputs = outputs
        model.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
        model.add_module("flatten", nn.Flatten())
        model.add_module("fc", nn.Linear(inputs, classes))
        return model


@register_model("timm")
class Timm(Model):
    """A model of timm, not pretrained: ``timm:vit_tiny_patch16_224``. image: edge of the images, for those that ask."""

    name: str
    image: int | None = Field(default=None, ge=1)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        try:
            import timm
        except ImportError as error:
            raise HotError(
                f"model 'timm:{self.name}' needs timm ({error}): pip install 'hot-training[timm]'"
            ) from error
        size = {} if self.image is None else {"img_size": self.image}
        try:
            return timm.create_model(self.name, pretrained=False, num_classes=classes, in_chans=shape[0], **size)
        except (RuntimeError, TypeError) as error:
            raise HotError(f"timm can't build {self.name!r}: {error}") from error


@register_model("file")
class FromFile(Model):
    """What a function of a file returns: ``file.py:build``, called as ``build()``. Code that runs: --allow-plugins."""

    path: str
    function: str = "build"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        spec = importlib.util.spec_from_file_location(Path(self.path).stem, self.path)
        if spec is None or spec.loader is None or not Path(self.path).is_file():
            raise HotError(f"model file {self.path} is not there, or is not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, self.function):
            raise HotError(f"model file {self.path} defines no {self.function}")
        model = getattr(module, self.function)()
        if not isinstance(model, nn.Module):
            raise HotError(f"{self.path}:{self.function} returned a {type(model).__name__}, not an nn.Module")
        return model


def model_spec(text: str) -> dict[str, str]:
    """The short form of a model as its block: ``vit``, ``timm:NAME`` or ``file.py:function``."""
    kind, colon, rest = text.rpartition(":")
    if kind == "timm":
        return {"kind": "timm", "name": rest}
    if colon and kind.endswith(".py"):
        return {"kind": "file", "path": kind, "function": rest}
    return {"kind": text}


def build_model(text: str, shape: tuple[int, ...], classes: int, *, allow_code: bool = False) -> nn.Module:
    """The model of a short form, with its default parameters. Raises HotError if it is code and that is not allowed."""
    spec = model_spec(text)
    kind = spec.pop("kind")
    if kind == "file" and not allow_code:
        raise HotError(f"model: {spec['path']} is code that would run; allow it with --allow-plugins")
    return models[kind](**spec).build(shape, classes)
