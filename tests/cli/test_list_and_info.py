"""`hot list` and `hot info`: what is registered, and what this machine has."""

from __future__ import annotations

import json
import platform

import pytest
import torch
from typer.testing import CliRunner

from hot import registry
from hot.backends.table import Backend, backends, register_backend
from hot.cli import app, main
from hot.policies.quantizers import quantizers
from hot.registry import Registry


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_everything_that_has_a_name() -> None:
    lines = run("list").splitlines()
    kinds = {line.split("  ", 1)[0] for line in lines}
    assert {"transform", "quantizer", "buffer", "backend", "kernel", "op", "preset", "model", "data set"} <= kinds
    assert any(line.startswith("preset") and " hot-lora " in line and "LoRA" in line for line in lines)
    assert any("reference.pack4" in line and "Two 4-bit codes a byte" in line for line in lines)


@pytest.mark.parametrize("kind", ["quantizer", "quantizers", "Quantizer"])
def test_one_kind_by_a_pattern(kind: str) -> None:
    assert [line.split()[1] for line in run("list", kind, "[il]*").splitlines()] == ["int", "luq"]
    names = [line.split()[1] for line in run("list", kind).splitlines()]
    assert names == quantizers.names()


def test_a_registry_anywhere_joins() -> None:
    mine: Registry[type] = Registry("test kind")
    try:

        @mine.register("thing")
        class Thing:
            """What it is [with brackets].

            And more.
            """

        assert run("list", "testkind").split() == ["test", "kind", "thing", "What", "it", "is", "[with", "brackets]."]
    finally:
        registry.registries.remove(mine)


def test_an_unknown_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["list", "quantiser"])
    assert (
        "unknown kind 'quantiser', did you mean 'quantizer'? Known: activation buffer, backend"
        in capsys.readouterr().err
    )


def test_broken_plugins_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "failed_plugins", {"theirs": "ImportError: no [module]"})
    result = CliRunner().invoke(app, ["list", "buffer"])
    assert "raw" in result.stdout and "plug-in theirs failed to import: ImportError: no [module]" in result.stderr


def test_info_as_json() -> None:
    facts = json.loads(run("info", "--json"))
    assert facts["versions"]["torch"] == torch.__version__ and facts["python"] == platform.python_version()
    assert facts["backends"]["reference"].startswith("available (cpu, cuda")
    assert "hot" in facts["presets"] and len(facts["gpus"]) == torch.cuda.device_count()


def test_info_says_why_a_backend_is_missing() -> None:
    register_backend(Backend("absent", devices=("cuda",), probe=lambda: (False, "needs [a] driver")))
    try:
        assert "absent: missing (cuda): needs [a] driver" in run("info")
    finally:
        backends.remove("absent")
