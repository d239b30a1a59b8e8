"""The executor and the reference backend on a CUDA device: the same laws, the same codes as on the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers import PLANS
from torch import Tensor, nn

import hot
from hot import crossover
from hot.bench.steps import Training, Variant, measure_step
from hot.bench.workloads import VitStep
from hot.estimate import estimate
from hot.memory import saved_bytes
from hot.train.models import Vit

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def _no_tf32():
    """The reference's float products are float32's."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def grads(plan: hot.LayerPlan, device: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w, b, g = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in [(3, 41, 48), (56, 48), (56,), (3, 41, 56)]
    )
    hot.linear(x, w, b, plan).backward(g)
    return [t.grad.cpu() for t in (x, w, b)]


@pytest.mark.parametrize("name", [name for name in PLANS if name not in ("stochastic", "random_rows")])
def test_gradients_are_those_of_the_cpu(name: str) -> None:
    """In float64 an ulp of the transform moves a code so rarely that the gradients agree; luq draws, so compare its size."""
    if "luq" in name:
        norms = [[g.norm() for g in grads(PLANS[name], device)] for device in ("cpu", "cuda")]
        torch.testing.assert_close(norms[0], norms[1], rtol=0.05, atol=0)
        return
    for on_cpu, on_gpu in zip(grads(PLANS[name], "cpu"), grads(PLANS[name], "cuda"), strict=True):
        assert (on_cpu - on_gpu).norm() <= 2e-3 * on_cpu.norm()


@pytest.mark.parametrize("policy", ["hot", "hot-paper", "int8", "hlq", "lbp-wht", "luq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_vit_trains(policy: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Vit(dim=64, depth=2, heads=2).build((3, 32, 32), 10).cuda()
    hot.convert(model, hot.load_policy(policy))
    x, y = torch.randn(32, 3, 32, 32, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    losses = []
    for _ in range(60):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses


def test_grad_scaler_skips_a_step_whose_gradient_overflows() -> None:
    layer = nn.Linear(64, 64).cuda()
    hot.convert(layer, hot.load_policy("hot"))
    optimizer, scaler = torch.optim.SGD(layer.parameters(), 1.0), torch.amp.GradScaler("cuda", init_scale=2.0**60)
    before = layer.weight.detach().clone()
    with torch.autocast("cuda", torch.float16):
        loss = layer(torch.randn(2, 32, 64, device="cuda")).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, layer.weight) and scaler.get_scale() < 2.0**60


def test_runs_on_a_side_stream_and_in_autograd_threads() -> None:
    layer = nn.Linear(256, 256).cuda()
    hot.convert(layer, hot.load_policy("int8"))
    x = torch.randn(4, 64, 256, device="cuda", requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = torch.autograd.grad(layer(x).square().sum(), x)[0]
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(expected, got)


def test_the_whole_step_captures_in_a_cuda_graph() -> None:
    """Nothing synchronizes and no constant is copied from the host in a step that is warm."""
    layer = nn.Linear(256, 512).cuda()
    hot.convert(layer, hot.load_policy("hot"))
    x = torch.randn(4, 64, 256, device="cuda", requires_grad=True)

    def step() -> list[torch.Tensor]:
        return list(torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def test_saved_bytes_and_peak_fall() -> None:
    """Eight linear layers with nothing between them: what hot saves is an eighth of float32, and the peak shows it."""

    def run(policy: str) -> tuple[int, int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
        hot.convert(model, hot.load_policy(policy))
        x = torch.randn(16, 1024, 1024, device="cuda")
        saved = saved_bytes(model, lambda: model(x)).in_layers
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        y = model(x)
        after = torch.cuda.memory_allocated() - held
        y.square().mean().backward()
        return saved, after

    (exact_saved, exact_held), (hot_saved, hot_held) = run("exact"), run("hot")
    assert exact_saved == 8 * 16 * 2**20 * 4
    assert hot_saved == 8 * (16 * 2**20 // 2 + 1024 * 4)
    assert hot_held < exact_held / 2


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("policy", ["int8", "hot"])
def test_compiles_without_graph_breaks(policy: str, low: bool) -> None:
    """In float32 and, as most train, in bfloat16 under autocast, whose kernels are others."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Vit(dim=64, depth=1, heads=2).build((3, 32, 32), 10).cuda()
    hot.convert(model, hot.load_policy(policy))
    x = torch.randn(8, 3, 32, 32, device="cuda")

    def grads(run: nn.Module) -> list[Tensor]:
        model.zero_grad()
        with crossover.off(), torch.autocast("cuda", torch.bfloat16, enabled=low):
            run(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    limit = {"int8": 0.02, "hot": 0.3}[policy] + 0.05 * low  # noise is drawn from bits, and the compiler's differ
    for eager, compiled in zip(grads(model), grads(torch.compile(model, fullgraph=True)), strict=True):
        assert (eager - compiled).norm() <= limit * eager.norm() + 1e-6


def test_golden_on_the_gpu() -> None:
    from safetensors.torch import load_file

    tensors = load_file(Path(__file__).parent / "golden/had_noquant.safetensors", device="cuda")
    layer = nn.Linear(tensors["w"].shape[1], tensors["w"].shape[0], bias=False, device="cuda")
    layer.weight.data.copy_(tensors["w"])
    full = {"kind": "hadamard", "block": 16}
    policy = hot.Policy(
        defaults={"grad_input": {"transform": full}, "grad_weight": {"transform": full}, "buffer": {"kind": "packed"}}
    )
    hot.convert(layer, policy)
    x = tensors["x"].requires_grad_()
    layer(x).backward(tensors["grad_output"])
    for got, wanted in ((x.grad, tensors["grad_input"]), (layer.weight.grad, tensors["grad_weight"])):
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()


def errors_of_a_vit_step(backend: str, seen: list[tuple[torch.Tensor, ...]]) -> list[tuple[float, float]]:
    """The relative errors of grad_input and grad_weight against float64, of every layer of a step, under `hot`."""
    plan = dataclasses.replace(PLANS["hot"], backend=backend)
    found = []
    for x, w, b, g in seen:
        inputs = [t.detach().clone().requires_grad_() for t in (x, w, b)]
        got = torch.autograd.grad(hot.linear(*inputs, plan), inputs[:2], g)
        wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
        want = torch.autograd.grad(nn.functional.linear(*wide), wide[:2], g.double())
        found.append(tuple(((a.double() - e).norm() / e.norm()).item() for a, e in zip(got, want, strict=True)))
    return found


def test_gradients_of_a_real_step_are_as_good_as_the_references() -> None:
    """Activations and gradients of a ViT that has trained a while: Triton's error is within 2× of the reference's, per layer."""
    torch.manual_seed(0)
    model = Vit(dim=192, depth=3, heads=3).build((3, 32, 32), 10).cuda()
    x, y = torch.randn(64, 3, 32, 32, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    layers = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and "head" not in name]
    seen: dict[nn.Module, list[torch.Tensor]] = {}

    def hook(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad:
            seen[module] = [args[0].detach()]
            output.register_hook(lambda g: seen[module].append(g.detach()))

    handles = [layer.register_forward_hook(hook) for layer in layers]
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    for handle in handles:
        handle.remove()
    step = [(a.bfloat16(), m.weight.bfloat16(), m.bias.bfloat16(), g.bfloat16()) for m, (a, g) in seen.items()]
    assert len(step) > 6
    for ours, theirs in zip(errors_of_a_vit_step("triton", step), errors_of_a_vit_step("reference", step), strict=True):
        assert all(a <= 2 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_ops_from_codes_and_bits(dtype: torch.dtype) -> None:
    """Forward is torch's to the bit, gradients are near, and less is saved."""
    torch.manual_seed(0)
    model = Vit(dim=128, depth=2, heads=4, dropout=0.1).build((3, 32, 32), 10).cuda()
    x = torch.randn(16, 3, 32, 32, device="cuda")

    def run() -> Tensor:
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return model(x).float().square().sum()

    def grads() -> list[Tensor]:
        return list(torch.autograd.grad(run(), list(model.parameters())))

    loss, exact, before = run(), grads(), saved_bytes(model, run).total
    rules = hot.load_policy("memory").to_dict()["activations"]
    hot.convert(model, hot.Policy(extends="exact", activations=rules))
    assert torch.equal(run(), loss) and saved_bytes(model, run).total < 0.75 * before
    for a, b in zip(exact, grads(), strict=True):
        assert (a - b).norm() < 0.1 * a.norm() + 1e-6


@pytest.mark.parametrize("policy", ["", "hot", "memory"])
def test_the_peak_is_as_estimated(policy: str) -> None:
    """Within 10 %, of ViT-B/16: large enough for what libraries take for themselves not to count."""
    workload = VitStep()
    variant = Variant(policy or "bf16", low=True, policy=hot.load_policy(policy) if policy else None)
    with crossover.off():
        row = measure_step(workload, "vit", variant, 128, CUDA, repeats=3)
    guess = estimate(workload, variant, 128)
    assert row.reason == "" and row.peak_allocated is not None and row.saved is not None
    assert abs(guess.peak / row.peak_allocated - 1) < 0.1 and abs(guess.saved / row.saved - 1) < 0.1


def test_a_layer_more_costs_what_it_saves() -> None:
    """The peak of a deeper stack grows by the bytes that its blocks save and their weights, gradients and moments need."""
    rows = {}
    for depth in (4, 12):
        workload = VitStep(dim=384, depth=depth, heads=6)
        with crossover.off():
            rows[depth] = measure_step(
                workload, "vit", Variant("memory", low=True, policy=hot.load_policy("memory")), 128, CUDA, repeats=3
            )
    saved = rows[12].saved - rows[4].saved
    weights = 8 * 12 * 384**2 * 4
    grown = rows[12].peak_allocated - rows[4].peak_allocated
    assert saved + 3 * weights - 2**24 <= grown <= 1.1 * (saved + 4 * weights) + 2**24


def test_memory_does_not_grow() -> None:
    """500 steps under `memory`: what is allocated after a step stays the same, to the byte."""
    workload = VitStep(size=32, classes=10, patch=8, dim=96, depth=2, heads=3)
    with crossover.off():
        training = Training(workload, Variant("memory", low=True, policy=hot.load_policy("memory")), 32, CUDA)
        found = []
        for _ in range(500):
            training.step()
            found.append(torch.cuda.memory_allocated())
    assert found[20] == found[-1]


def test_out_of_memory_leaves_a_usable_process() -> None:
    workload = VitStep(dim=384, depth=4, heads=6)
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(2**30 / total)
        full = measure_step(workload, "vit", Variant("bf16", low=True), 256, CUDA, repeats=3)
        left = torch.cuda.memory_allocated()
        small = measure_step(workload, "vit", Variant("bf16", low=True), 2, CUDA, repeats=3)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert full.reason.startswith("out of memory at batch 256") and left < 2**28 and small.reason == ""
