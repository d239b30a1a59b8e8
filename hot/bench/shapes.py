"""The layers that `hot bench layers` measures, by named sets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hot.errors import HotError, UnknownNameError, did_you_mean


@dataclass(frozen=True)
class Layer:
    """A linear layer, or a square convolution without a bias where `kernel` is not 0.

    x: shape of the input, (…, I) or (B, C, H, W). count: how often the network has it. published: µs of FP32 and HOT.
    """

    name: str
    x: tuple[int, ...]
    outputs: int
    kernel: int = 0
    stride: int = 1
    count: int = 1
    published: tuple[float, float] | None = None

    @property
    def kind(self) -> str:
        """``linear``, ``conv1x1``, ``conv3x3``, …"""
        return f"conv{self.kernel}x{self.kernel}" if self.kernel else "linear"

    @property
    def y(self) -> tuple[int, ...]:
        """The shape of the output."""
        if not self.kernel:
            return (*self.x[:-1], self.outputs)
        return (self.x[0], self.outputs, *(-(-size // self.stride) for size in self.x[2:]))

    @property
    def weight(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return (self.outputs, self.x[1], self.kernel, self.kernel) if self.kernel else (self.outputs, self.x[-1])

    @property
    def tokens(self) -> int:
        """T of the two products: rows of x, or pixels of y."""
        return math.prod(self.y) // self.outputs

    @property
    def inputs(self) -> int:
        """I of the two products: a convolution's is its channels times its taps."""
        return math.prod(self.weight) // self.outputs

    @property
    def numel(self) -> int:
        """Elements of x, the weight and y together."""
        return sum(map(math.prod, (self.x, self.weight, self.y)))


def linear(tokens: int, outputs: int, inputs: int, name: str = "") -> Layer:
    """A linear layer on x (T, I), named after its shape unless it has a name."""
    return Layer(name or f"{tokens}x{outputs}x{inputs}", (tokens, inputs), outputs)


def _llm(batch: int) -> list[Layer]:
    """The linear layers of an 8-billion-parameter decoder on 16384 tokens."""
    shapes = {"up": (16384, 14336, 4096), "down": (16384, 4096, 14336), "attention": (16384, 4096, 4096)}
    return [linear(*shape, name=name) for name, shape in shapes.items()]


def _vit(batch: int) -> list[Layer]:
    """The linear layers of a block of ViT-B/16 on 224² images."""
    sizes = {"fc1": (3072, 768), "fc2": (768, 3072), "qkv": (2304, 768), "proj": (768, 768)}
    return [Layer(name, (batch, 197, inputs), outputs) for name, (outputs, inputs) in sizes.items()]


PUBLISHED = (
    ("ResNet-50", 3136, 64, 256, 115, 62),
    ("ResNet-50", 3136, 64, 576, 134, 59),
    ("ResNet-50", 784, 128, 512, 117, 67),
    ("ResNet-50", 784, 128, 1152, 124, 60),
    ("ResNet-50", 196, 256, 2304, 114, 64),
    ("ResNet-50", 49, 512, 4608, 137, 72),
    ("ViT-B", 197, 2304, 768, 182, 70),
    ("ViT-B", 197, 768, 768, 122, 71),
    ("ViT-B", 197, 3072, 768, 226, 73),
    ("ViT-B", 197, 768, 3072, 233, 72),
    ("EfficientFormer-L7", 3136, 384, 96, 125, 63),
    ("EfficientFormer-L7", 784, 768, 192, 129, 68),
    ("EfficientFormer-L7", 196, 1536, 384, 126, 66),
    ("EfficientFormer-L7", 49, 1536, 768, 128, 62),
    ("EfficientFormer-L7", 49, 768, 1024, 111, 69),
    ("EfficientFormer-L7", 49, 3072, 768, 146, 66),
)
"""Model, L, O, I, and µs of one backward at batch 1, FP32 and HOT, as the HOT paper has them for an RTX 3090."""


def _latency(batch: int) -> list[Layer]:
    """The layers whose backward the HOT paper timed, as products of (L, O, I)."""
    return [Layer(f"{model} {t}x{o}x{i}", (t, i), o, published=(fp, hot)) for model, t, o, i, fp, hot in PUBLISHED]


def resnet50(batch: int) -> list[Layer]:
    """Every distinct convolution of ResNet-50 (stride in the 3×3) on 224² images but the stem, with its multiplicity."""
    found: Counter[tuple[int, int, int, int, int]] = Counter()  # channels, outputs, kernel, stride, input size
    channels, size = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            found[channels, width, 1, 1, size] += 1
            found[width, width, 3, stride, size] += 1
            found[width, 4 * width, 1, 1, size // stride] += 1
            if not block:
                found[channels, 4 * width, 1, stride, size] += 1
            channels, size = 4 * width, size // stride
    return [
        Layer(f"{k}x{k} {c}-{o} {n}/{s}", (batch, c, n, n), o, kernel=k, stride=s, count=count)
        for (c, o, k, s, n), count in found.items()
    ]


@dataclass(frozen=True)
class LayerSet:
    """Layers by a batch size (0: they have none to choose); the dense baselines and modes on CUDA; how they are summed up."""

    layers: Callable[[int], list[Layer]]
    batch: int = 0
    baselines: tuple[str, ...] = ("bf16", "tf32", "fp32")
    modes: tuple[str, ...] = ("eager",)
    peers: bool = True
    summary: str = ""


SETS = {
    "llm": LayerSet(_llm, modes=("eager", "graph")),
    "vit": LayerSet(_vit, batch=256, modes=("eager", "graph")),
    "latency": LayerSet(
        _latency, baselines=("bf16", "fp32"), modes=("eager", "graph"), peers=False, summary="geometric mean"
    ),
    "resnet50": LayerSet(resnet50, batch=256, baselines=("bf16",), modes=("graph",), peers=False, summary="sum"),
}
CUSTOM = LayerSet(lambda batch: [])
"""What a layer from ``--shape`` is measured as."""


def layer_set(name: str, batch: int | None = None) -> tuple[LayerSet, list[Layer]]:
    """A set by name, and its layers. Raises UnknownNameError, and HotError for a batch that it can't have."""
    if name not in SETS:
        raise UnknownNameError(f"unknown set {name!r}{did_you_mean(name, SETS) or '.'} Known: {', '.join(SETS)}")
    found = SETS[name]
    if batch is not None and not found.batch:
        raise HotError(f"--batch {batch}: the layers of {name!r} have a fixed size; leave it out")
    return found, found.layers(batch or found.batch)
