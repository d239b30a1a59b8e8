"""DDP and FSDP2: two processes on gloo give the gradients of one, with conversion before wrapping and after."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from helpers import relative
from torch import Tensor, nn

import hot
from hot.train.models import Vit

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")

# what two processes may differ by from one: rounding alone, the 8-bit codes of half of the tokens' rows, and for the
# plain 8-bit plan the scale of every grad_weight row, which covers one rank's tokens instead of both's
POLICIES = {
    "exact": ({"kind": "none"}, 1e-5),
    "hadamard": ({"kind": "none"}, 1e-5),
    "int8": ({"kind": "int", "bits": 8, "granularity": "row"}, 0.03),
}
SHAPE, CLASSES, BATCH = (1, 8, 8), 4, 8


def policy(name: str) -> hot.Policy:
    if name == "exact":
        return hot.load_policy("exact")
    block, _ = POLICIES[name]
    transform = {"kind": "hadamard", "block": 16}
    return hot.Policy(
        defaults={
            "grad_input": {"transform": transform, "grad_output": block, "weight": block},
            "grad_weight": {"transform": transform, "grad_output": block, "input": block},
            "buffer": {"kind": "packed"},
        }
    )


def model() -> nn.Module:
    torch.manual_seed(0)
    return Vit(patch=2, dim=16, depth=1, heads=2, mlp_ratio=2, fused_qkv=False).build(SHAPE, CLASSES)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, *SHAPE, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def gradients(net: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    F.cross_entropy(net(images), labels).backward()
    return {name.removeprefix("module."): p.grad for name, p in net.named_parameters()}


def wrapped(net: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block.mlp.fc1, mesh=mesh)  # a layer of its own, so that its class is FSDP's too
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def worker(rank: int, port: int, folder: str) -> None:
    """Every case in one process group, since starting processes is what takes long."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    images, labels = (t.chunk(2)[rank] for t in batch())
    found = {}
    for how in ("ddp", "fsdp2"):
        for name in POLICIES:
            for order in ("before", "after"):
                net = model()
                if order == "before":
                    hot.convert(net, policy(name))
                net = wrapped(net, how)
                if order == "after":
                    hot.convert(net, policy(name))
                report = hot.convert(net, policy(name))  # again, through the wrapper: the same layers
                full = {
                    k: g.full_tensor() if hasattr(g, "full_tensor") else g
                    for k, g in gradients(net, images, labels).items()
                }
                found[how, name, order] = (
                    {k: g.clone() for k, g in full.items()},
                    list(report.layers),
                    len(report.converted),
                )
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                optimizer.step()
                optimizer.zero_grad()
                F.cross_entropy(net(images), labels).backward()  # a second step runs on the changed weights
                found[how, name, order] += (hot.revert(net), [type(m).__name__ for m in net.modules()])
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (port, str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_gradients_of_one_process(found: list[dict], how: str, name: str, order: str) -> None:
    """The mean over two halves of a batch is the gradient of the whole batch, on every rank the same."""
    net = model()
    report = hot.convert(net, policy(name))
    expected = gradients(net, *batch())
    _, most = POLICIES[name]
    (ours, layers, converted, reverted, kinds), (theirs, *_) = (rank[how, name, order] for rank in found)
    assert layers == list(report.layers) and converted == len(report.converted) == reverted
    assert not any("Hot" in kind for kind in kinds) and (how == "ddp" or "FSDPLinear" in kinds)
    assert ours.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.equal(ours[key], theirs[key]), key
        if not key.endswith("k.bias"):  # the softmax does not see it: its gradient is zero but for rounding
            assert relative(ours[key], gradient) < most, key


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_order_does_not_matter(found: list[dict], how: str) -> None:
    """Converted before wrapping or after, the bits are the same, and the 8-bit ones differ from exact ones."""
    for name in POLICIES:
        before, after = (found[0][how, name, order][0] for order in ("before", "after"))
        assert all(torch.equal(before[key], after[key]) for key in before), name
    assert not torch.equal(
        found[0][how, "int8", "before"][0]["blocks.0.mlp.fc1.weight"],
        found[0][how, "exact", "before"][0]["blocks.0.mlp.fc1.weight"],
    )
