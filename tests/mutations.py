"""Breaks HOT on purpose, one place at a time, and names the test that notices: ``python tests/mutations.py``.

Each mutation is made in a copy of the working tree, where the tests of the mutated part run until their first failure. A
mutation that survives is a hole in the tests and makes the exit code 1. Words on the command line choose among them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """What is broken: `old` becomes `new` in a file, where it stands exactly once."""

    what: str
    file: str
    old: str
    new: str


MUTATIONS = [
    Mutation("transform: sign of H", "hot/hadamard.py", "torch.cat([h, -h], 1)", "torch.cat([h, h.flip(1)], 1)"),
    Mutation("transform: order of rows", "hot/hadamard.py", "gray = s ^ (s >> 1)", "gray = s"),
    Mutation("transform: gain", "hot/backends/reference/transforms.py", "_along(body, h, dim).mul_(gain)", "_along(body, h, dim)"),
    Mutation("transform: tail cut off", "hot/backends/reference/transforms.py", 'if ragged and tail == "pad":', "if False:"),
    Mutation("scale: largest value, not magnitude", "hot/backends/reference/quantization.py",
             "torch.maximum(x.amax(dims, keepdim), x.amin(dims, keepdim).neg())", "x.amax(dims, keepdim)"),
    Mutation("scale: of the whole tensor for rows", "hot/backends/reference/quantization.py", '"row": (1,)', '"row": (0, 1)'),
    Mutation("scale: forgotten in the product", "hot/backends/reference/products.py", "own.mul_(y_scale.T)", "own"),
    Mutation("scale: of the first run for all", "hot/backends/reference/products.py", "i * run // group if group", "0 if group"),
    Mutation("rounding: towards zero", "hot/backends/reference/quantization.py", "v.round_() if u is None", "v.trunc_() if u is None"),
    Mutation("rounding: biased noise", "hot/backends/reference/quantization.py", "noise[:, 0::2] = _shift(h, 17)", "noise[:, 0::2] = _shift(h, 18)"),
    Mutation("rounding: noise without the index", "hot/backends/reference/quantization.py", "h, second = place, bits", "h, second = place.mul_(0), bits"),
    Mutation("rounding: one noise for two neighbours", "hot/backends/reference/quantization.py",
             "h *= _i32(0xC2B2AE3D)", "h *= 1"),
    Mutation("float8: holds eight bits", "hot/backends/ops.py", "bits_of(format) <= 5", "bits_of(format) <= 8"),
    Mutation("triton: noise without the neighbour", "hot/backends/triton/rounding.py",
             " + second_bits.to(tl.uint32, bitcast=True) * 0x85EBCA77", ""),
    Mutation("triton: a tile's second sample starts late", "hot/backends/triton/operands.py",
             "start = (block - over * per) * N", "start = block * N"),
    Mutation("order: the slowest first", "hot/backends/order.py", "math.log(time.p50_ms)", "-math.log(time.p50_ms)"),
    Mutation("order: what was not timed goes last", "hot/backends/order.py",
             "[next(fastest) if name in logs else name for name in backends]", "[*fastest, *(name for name in backends if name not in logs)]"),
    Mutation("order: the guess before this user's times", "hot/backends/order.py", "paths.insert(0, ", "paths.append("),
    Mutation("crossover: as fast is too slow", "hot/crossover.py", "for span in spans if span[2].ratio < 1", "for span in spans if span[2].ratio <= 1"),
    Mutation("crossover: named backends ask too", "hot/executor.py", "plan.backend == AUTO and ", ""),
    Mutation("merge: earlier wins", "hot/policies/merge.py", "for key, child in over.value.items():\n        merged[key] = merge(base.value[key], child) if key in base.value else child",
             "for key, child in over.value.items():\n        merged[key] = merge(child, base.value[key]) if key in base.value else child"),
    Mutation("merge: another kind keeps the old fields", "hot/policies/merge.py", 'if "kind" in over.value and', "if False and"),
    Mutation("executor: no draw for the gradient", "hot/executor.py", "draw, kept = (kept[0], kept[1:])", "draw, kept = (kept[0] * 0, kept[1:])"),
    Mutation("executor: frozen weights save their input", "hot/executor.py", "if needs_weight and x.numel() else ()", "if x.numel() else ()"),
    Mutation("executor: autocast reaches the transforms", "hot/executor.py",
             "with as_written(x):  # autocast", "with torch.no_grad():  # autocast"),
    Mutation("activations: the outermost plan speaks", "hot/activations/calls.py",
             "innermost = _is_same(_active.plan, self.plan)", "innermost = True"),
    Mutation("activations: autocast is forgotten", "hot/activations/recomputed.py", "low, enabled=enabled", "low, enabled=False"),
    Mutation("activations: relu lets no NaN pass", "hot/backends/activation_ops.py", "(x <= 0).logical_not_()", "(x > 0)"),
    Mutation("activations: dropout without its factor", "hot/activations/bits.py", "_passed(ctx, g, ctx.factor)", "_passed(ctx, g, 1.0)"),
    Mutation("activations: a leaky ReLU leaks nothing", "hot/activations/bits.py", "if ctx.rest:", "if False:"),
    Mutation("activations: bounds are not the dtype's", "hot/activations/bits.py", "found = torch.nextafter(", "torch.nextafter("),
    Mutation("activations: products keep what nobody needs", "hot/activations/attention.py",
             "if other.requires_grad else None", "if True else None"),
    Mutation("activations: attention draws anew", "hot/activations/calls.py", "draws=bool(probability)", "draws=False"),
    Mutation("activations: a batch counts twice", "hot/activations/calls.py", "again = torch.is_grad_enabled()", "again = False"),
    Mutation("activations: ignored targets count", "hot/activations/losses.py", "g / valid.sum()", "g / len(valid)"),
    Mutation("activations: one factor for the other", "hot/activations/fused.py",
             "grad_a = g * of_b(saved[ctx.split :])", "grad_a = g * of_a(saved[: ctx.split])"),
    Mutation("activations: the catch-all takes scales", "hot/activations/hook.py", " or is_made(t)", ""),
    Mutation("recipes: found whatever happened since", "hot/recipes.py", " and entry[1] == y._version", ""),
    Mutation("norm_backward: not centered", "hot/backends/activation_ops.py",
             "grad = grad - inner.mean(1, keepdim=True)", "grad = grad - 0 * inner"),
    Mutation("sharing: without the version", "hot/sharing.py", "and entry[1] == x._version", ""),
    Mutation("sharing: without the identity", "hot/sharing.py", "entry[0]() is x and ", ""),
    Mutation("views: blocks straddle samples", "hot/views.py", "samples = t.shape[0] if t.dim() > 2 else 1", "samples = 1"),
    Mutation("views: same padding on the other side", "hot/views.py",
             "return total_w // 2, total_w - total_w // 2, total_h // 2, total_h - total_h // 2",
             "return total_w - total_w // 2, total_w // 2, total_h - total_h // 2, total_h // 2"),
    Mutation("match: a glob is not anchored", "hot/policies/match.py", "re.fullmatch(pattern", "re.match(pattern"),
    Mutation("calibration: measures before the projection", "hot/calibrate.py",
             "transform.project(tokens.permute(2, 0, 1), ops, transform.draw(tokens.device))", "tokens.permute(2, 0, 1)"),
    Mutation("checkpoint: the random state is not restored", "hot/train/loop.py", 'torch.set_rng_state(state["rng"]["cpu"])', "pass"),
]  # fmt: skip


TESTS = {
    "hot/hadamard.py": ["test_hadamard.py", "backends"],
    "hot/backends/triton": ["backends/triton"],
    "hot/crossover.py": ["test_crossover.py"],
    "hot/activations": ["test_activations.py"],
    "hot/recipes.py": ["test_activations.py"],
    "hot/backends/activation_ops.py": ["test_checking.py"],
    "hot/executor.py": ["executor", "test_crossover.py", "test_compile.py"],
    "hot/backends": ["backends", "test_checking.py", "executor"],
    "hot/policies": ["policies"],
    "hot/calibrate.py": ["test_calibrate.py"],
    "hot/train": ["train"],
    "hot": ["executor", "test_sharing.py", "test_views.py", "test_convert.py", "test_golden.py", "test_compile.py"],
}
"""The tests of a part, by the start of its path; the first that fits."""


def first_failure(mutation: Mutation) -> str | None:
    """The first test that fails under a mutation, or None if it survives."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "hot"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        target = copy / mutation.file
        text = target.read_text()
        assert mutation.old in text, f"{mutation.file} no longer holds {mutation.old!r}"
        target.write_text(text.replace(mutation.old, mutation.new))
        tests = next(tests for start, tests in TESTS.items() if mutation.file.startswith(start))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu and not slow", "-p", "no:cacheprovider", *(f"tests/{name}" for name in tests)],
            cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True,
        )  # fmt: skip
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return found[1] if found else (None if done.returncode == 0 else done.stdout[-300:])


def main() -> None:
    wanted = sys.argv[1:]
    survivors = 0
    for mutation in MUTATIONS:
        if wanted and not any(word in mutation.what for word in wanted):
            continue
        caught = first_failure(mutation)
        survivors += caught is None
        print(f"{mutation.what:48} {caught or 'SURVIVED'}", flush=True)
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
