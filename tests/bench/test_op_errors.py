"""The errors of ops on recorded calls: none where the policy is exact, and near where it is not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hot
from hot.train.loading import load_experiment


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "op_errors.py"
    spec = importlib.util.spec_from_file_location("op_errors", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["op_errors"] = module  # where dataclasses look for the types of their fields
    spec.loader.exec_module(module)
    return module


def test_of_a_model_that_has_trained_a_while(script: ModuleType) -> None:
    small = ["data.kind=digits", "data.size=16", "model.depth=1", "batch_size=32", "model.dropout=0.1"]
    experiment = load_experiment("quickstart", small)
    calls = script.record(experiment, hot.load_policy("memory"), steps=5)
    found = script.errors(calls)
    assert {op for op, _ in found} == {
        "linear", "layer_norm", "gelu", "scaled_dot_product_attention", "dropout", "cross_entropy"
    }  # fmt: skip
    exact = ("linear", "bias"), ("layer_norm", "bias"), ("dropout", "input"), ("cross_entropy", "input")
    for key, each in found.items():
        for error, slope in each:
            if key in exact:  # the loss is smoothed here, which no rule knows
                assert error < 1e-6, key
            else:
                assert 0 < error < 1 and 0.5 < slope < 1.1, key
    assert max(error for error, _ in found["scaled_dot_product_attention", "value"]) < 0.03
    assert len(found["linear", "weight"]) == 4  # qkv, proj, fc1, fc2: stem and head are exact
