"""torch.compile: one graph, compiled once, with the gradients of eager runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import HOT, PLANS, for_conv, grads, normal, plan
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from hot.convert import HotConv2d, HotLinear
from hot.executor import linear
from hot.policies.plan import LayerPlan


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Attention(nn.Module):
    """q, k and v read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        t = self.norm(x)
        q, k, v = (f(t).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Pixels(nn.Module):
    """A patch embedding, a 3×3 and a 1×1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding="same"), nn.Conv2d(8, 4, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unflatten(-1, (8, 16)).transpose(1, 2)[:, :3, :, :8])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def converted(model: nn.Module, plan: LayerPlan) -> nn.Module:
    for m in model.modules():
        if isinstance(m, nn.Linear):
            m.__class__, m.hot_plan = HotLinear, plan
        elif isinstance(m, nn.Conv2d):
            m.__class__, m.hot_plan = HotConv2d, plan if m.kernel_size == (1, 1) else for_conv(plan)
    return model


def step(model: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert [torch.equal(s, t) for s, t in zip(a, b, strict=True)] == [True] * len(a)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, normal(2, 20, 16)),
    "attention": (Attention, normal(2, 20, 16)),
    "convolutions": (Pixels, normal(2, 16, 16 * 8)),
}


@pytest.mark.parametrize(
    ("name", "model"),
    [("hot", "mlp"), ("hadamard_int8", "attention"), ("hot", "convolutions"), ("projected_tokens", "mlp"), ("class_token", "mlp")],
)  # fmt: skip
def test_one_graph(name: str, model: str) -> None:
    """Laws 1 and 8: no graph break, one compilation for three steps, the gradients of eager bit for bit."""
    build, x = MODELS[model]
    net = converted(build(), PLANS[name])
    parameters = list(net.parameters())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, backend=counter, dynamic=False)
    for scale in (1.0, 0.5, 2.0):
        assert_same(step(compiled, parameters, x * scale), step(net, parameters, x * scale))
    assert counter.frame_count == 1


def test_draws_compile() -> None:
    """Plans that draw run in one graph too, follow the seed and change with it."""
    for name in ("stochastic", "random_rows"):
        torch._dynamo.reset()
        net = converted(nn.Sequential(nn.Linear(16, 16)), PLANS[name])
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(step(compiled, list(net.parameters()), normal(2, 20, 16)))
        assert_same(found[0], found[1])
        assert not torch.equal(found[0][2], found[2][2])


def test_exact_compiles_to_torchs_graph() -> None:
    """Law 1 in compiled runs."""
    net = mlp()
    theirs = step(torch.compile(net, backend="aot_eager"), list(net.parameters()), normal(2, 20, 16))
    torch._dynamo.reset()
    ours = converted(net, LayerPlan())
    assert_same(
        step(torch.compile(ours, backend="aot_eager", fullgraph=True), list(net.parameters()), normal(2, 20, 16)),
        theirs,
    )


def test_half_exact_and_autocast() -> None:
    """The exact path of a plan, under autocast and compile."""
    half = plan(
        (HOT.grad_input.transform, HOT.grad_input.grad_output, HOT.grad_input.weight), buffer=PLANS["raw_buffer"].buffer
    )
    net = converted(mlp(), half)

    def run(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = f(normal(2, 20, 16))
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(net.parameters()))]

    assert_same(run(torch.compile(net, fullgraph=True, backend="aot_eager")), run(net))


def test_autocast_is_traced_into_every_layer() -> None:
    """What the compiler thinks of the layers behind the first, by which kernels are chosen and dtypes fixed in the graph."""
    seen: list[torch.dtype] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        found = [node.meta["example_value"] for node in graph.graph.nodes if "autograd_function" in node.name]
        seen.extend(y.dtype for layer in found for y in layer)
        return graph.forward

    net = torch.compile(converted(nn.Sequential(mlp(), mlp()), HOT), fullgraph=True, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        net(normal(2, 20, 16))
    assert seen == [torch.bfloat16] * 4


def test_batches_of_other_sizes() -> None:
    """A changed batch size recompiles once, to a graph for any size, and still agrees with eager."""
    net = converted(nn.Sequential(nn.Linear(16, 16)), PLANS["hadamard_int8"])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    for batch in (2, 3, 5, 7):
        x = normal(batch, 20, 16)
        assert_same(step(compiled, list(net.parameters()), x), step(net, list(net.parameters()), x))
    assert counter.frame_count <= 2


def test_checkpointed_and_compiled() -> None:
    """Activation checkpointing inside a compiled region."""
    net = converted(mlp(), HOT)
    compiled = torch.compile(lambda x: checkpoint(net, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    assert_same(
        step(compiled, list(net.parameters()), normal(2, 20, 16)), step(net, list(net.parameters()), normal(2, 20, 16))
    )


def test_compiled_buffers_are_small() -> None:
    """What a compiled forward keeps for backward is the packed codes, not the input."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    kept: list[list[torch.fx.Node]] = []

    def forward_compiler(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        kept.append([n for n in graph.graph.find_nodes(op="output")[0].args[0] if isinstance(n, torch.fx.Node)])
        return graph

    backend = aot_autograd(fw_compiler=forward_compiler, bw_compiler=lambda g, _: g, partition_fn=default_partition)
    weight = normal(12, 20).requires_grad_()
    torch.compile(lambda x, w: linear(x, w, None, HOT), backend=backend, fullgraph=True)(
        normal(3, 197, 20), weight
    ).sum().backward()
    values = [n.meta["val"] for n in kept[0][1:]]
    sizes = [v.numel() * v.element_size() for v in values if tuple(v.shape) != tuple(weight.shape)]
    assert sum(sizes) == 20 * (3 * 104 + 4)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_inductor(model: str) -> None:
    """The default compiler: gradients within the noise of codes that fall on the other side."""
    build, x = MODELS[model]
    net = converted(build(), PLANS["hadamard_int8"])
    eager = step(net, list(net.parameters()), x)
    compiled = step(torch.compile(net, fullgraph=True), list(net.parameters()), x)
    assert all((a - b).norm() <= 0.03 * b.norm() + 1e-6 for a, b in zip(compiled, eager, strict=True))


def test_functional_form() -> None:
    """hot.linear inside somebody's compiled function, bias gradient included."""
    f = lambda x, w, b: F.gelu(linear(x, w, b, HOT))  # noqa: E731
    operands = normal(2, 20, 16), normal(8, 16), normal(8)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            grads(torch.compile(f, fullgraph=True, backend="aot_eager"), *operands), grads(f, *operands), strict=True
        )
    )
