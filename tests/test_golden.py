"""Gradients of the published research implementation, reproduced through a policy file, conversion and the reference backend.

Each file holds x, w, grad_output, both gradients and the transform matrices that made them; manifest.json says the plan in
the words of a policy file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import relative
from safetensors.torch import load_file
from torch import Tensor, nn

import hot
from hot.backends import get_ops
from hot.hadamard import hadamard_matrix
from hot.policies.encode import encode
from hot.policies.transforms import HadamardLowRank

GOLDEN = Path(__file__).parent / "golden"
CASES = {case["file"].removesuffix(".safetensors"): case for case in json.loads((GOLDEN / "manifest.json").read_text())}
SAWB = {"hot_sawb": [12.1, 12.2]}  # the published code uses its 4-bit coefficients at 8 bits too
FLIPS = 3  # codes that may fall on the other side of a tie


def policy_text(name: str) -> str:
    """The policy file: YAML is a superset of JSON, so the manifest's blocks go in as they are."""
    case = CASES[name]
    for path in ("grad_input", "grad_weight"):
        for block in case[path].values():
            if block["kind"] == "sawb":
                block["coefficients"] = SAWB[name]
    lines = ["version: 1", "backend: reference", "defaults:"]
    lines += [f"  {path}: {json.dumps(case[path])}" for path in ("grad_input", "grad_weight")]
    return "\n".join([*lines, "  buffer: {kind: packed}", ""])


def golden(name: str, tmp_path: Path) -> tuple[dict[str, Tensor], nn.Linear, Tensor]:
    """The stored tensors, a layer that was converted and ran them, and its grad_input."""
    (tmp_path / "policy.yaml").write_text(policy_text(name))
    stored = load_file(GOLDEN / f"{name}.safetensors")
    layer = nn.Linear(stored["w"].shape[1], stored["w"].shape[0], bias=False)
    layer.weight = nn.Parameter(stored["w"].clone())
    assert list(hot.convert(layer, hot.load_policy(tmp_path / "policy.yaml")).converted) == [""]
    x = stored["x"].clone().requires_grad_()
    layer(x).backward(stored["grad_output"])
    return stored, layer, x.grad


def quantizes(name: str, path: str) -> bool:
    return any(block["kind"] not in ("none", "hadamard", "hadamard_low_rank") for block in CASES[name][path].values())


@pytest.mark.parametrize("path", ["grad_input", "grad_weight"])
@pytest.mark.parametrize("name", CASES)
def test_reproduced(name: str, path: str, tmp_path: Path) -> None:
    """To 1e-5 relative; where a quantizer rounds, but for what a few codes on the other side of a tie change."""
    stored, layer, grad_input = golden(name, tmp_path)
    got, expected = (grad_input if path == "grad_input" else layer.weight.grad), stored[path]
    assert got.shape == expected.shape
    if not quantizes(name, path):
        assert relative(got, expected) < 1e-5
        return
    # one code more or less of an operand changes one row, or one column, of the product: all others are the same
    wrong = (got.double() - expected.double()).abs() > 1e-5 * expected.double().norm() / expected.numel() ** 0.5
    assert relative(got, expected) < 1e-5 or rank_at_most(wrong, FLIPS)


def rank_at_most(wrong: Tensor, lines: int) -> bool:
    """Whether so many rows and columns cover everything that is wrong."""
    for _ in range(lines):
        rows, columns = wrong.sum(1), wrong.sum(0)
        wrong = wrong.clone()
        if rows.max() >= columns.max():
            wrong[rows.argmax()] = False
        else:
            wrong[:, columns.argmax()] = False
    return not wrong.any()


@pytest.mark.parametrize("name", CASES)
def test_error_against_exact(name: str, tmp_path: Path) -> None:
    """The errors that the manifest states."""
    stored, layer, grad_input = golden(name, tmp_path)
    exact = {"grad_input": stored["grad_output"] @ stored["w"], "grad_weight": stored["grad_output"].T @ stored["x"]}
    for path, got in (("grad_input", grad_input), ("grad_weight", layer.weight.grad)):
        assert relative(got, exact[path]) == pytest.approx(CASES[name]["relative_error_against_exact"][path], abs=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_same_matrices(name: str, tmp_path: Path) -> None:
    """The kept rows are those of the stored transform matrices, in their order."""
    stored, layer, _ = golden(name, tmp_path)
    for key, path in (("hadamard_out", layer.hot_plan.grad_input), ("hadamard_tokens", layer.hot_plan.grad_weight)):
        if path.transform.axis == "tokens":  # nothing is transformed along the outputs then
            assert stored[key].shape == (1, 1)
            continue
        ours: Any = hadamard_matrix(path.transform.block)[list(path.transform.rows())].to(stored[key].dtype)
        assert ours.shape == stored[key].shape and torch.equal(ours, stored[key])


def test_the_manifest_is_all_of_it() -> None:
    assert {path.stem for path in GOLDEN.glob("*.safetensors")} == set(CASES) and len(CASES) == 5


def test_a_wrong_row_is_seen(tmp_path: Path) -> None:
    """The counterpart: another set of rows misses the stored gradient by far."""
    stored, layer, _ = golden("hot_noquant_L64", tmp_path)
    path = layer.hot_plan.grad_weight
    other = HadamardLowRank(block=64, rank=36, order="sequency")
    a, b = (
        encode(t.T[:, None], other, path.grad_output, get_ops("reference", "cpu")).codes
        for t in (stored["grad_output"], stored["x"])
    )
    assert relative(a @ b.T, stored["grad_weight"]) > 0.1
