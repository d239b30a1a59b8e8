"""`hot check`: the table, JSON, exit codes, and the first failing case."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from hot.backends import ops_for, table
from hot.backends.table import Backend, backends, kernels, register_backend, register_kernel
from hot.checking import find_case
from hot.cli import app, main


@pytest.fixture
def broken() -> Iterator[None]:
    """A throw-away backend whose pack4 drops the odd column of a ragged row."""
    register_backend(Backend("broken", devices=("cpu",), probe=lambda: (True, "a test")))

    @register_kernel("pack4", backend="broken")
    def pack4(codes: Tensor) -> Tensor:
        packed = ops_for("reference", "cpu").pack4(codes).clone()
        if codes.shape[1] % 2:
            packed[:, -1] = 0
        return packed

    yield
    kernels.remove("broken.pack4")
    backends.remove("broken")
    table._ready.clear()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *arguments])
    return result.exit_code, result.stdout


def test_a_table_of_what_was_checked() -> None:
    code, shown = run("--op", "unpack4", "--backend", "reference", "--device", "cpu")
    assert code == 0
    line = next(line for line in shown.splitlines() if "unpack4" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "unpack4", "reference", "cpu", "1", "4", "28", "0", "0", "0", "ok",
    ]  # fmt: skip


def test_every_row_as_json() -> None:
    code, shown = run("--op", "hadamard", "--backend", "reference", "--device", "cpu", "--json")
    rows = json.loads(shown)
    assert code == 0 and len(rows) == 16
    assert all(row["ok"] and 0 < row["error"] <= row["limit"] for row in rows if row["dtype"] == "float32")


@pytest.mark.usefixtures("broken")
def test_a_failure_is_shown_with_its_case() -> None:
    code, shown = run("--op", "pack4", "--device", "cpu")
    assert code == 1
    assert (
        "4 of 4 failed" in shown and "broken on cpu: pack4/float32/contiguous/2 (normal): codes=<(3, 41) int8>" in shown
    )
    assert "find_case('pack4/float32/contiguous/2', 'cpu').args" in shown
    assert find_case("pack4/float32/contiguous/2").args["codes"].shape == torch.Size([3, 41])
    code, shown = run("--backend", "broken", "--json")
    assert code == 1 and {row["error"] for row in json.loads(shown)} != {0}


PLUGIN = """
import hot
from hot.backends import ops_for

hot.register_backend(hot.Backend("mine", devices=("cpu",), probe=lambda: (True, "a test")))
hot.register_kernel("pack4", backend="mine")(lambda codes: ops_for("reference", "cpu").pack4(codes))
hot.register_kernel("unpack4", backend="mine", supports=lambda packed, length: False)(lambda packed, length: 1 / 0)
"""


@pytest.fixture
def _forget_mine() -> Iterator[None]:
    yield
    for name in kernels.names("mine.*"):
        kernels.remove(name)
    backends.remove("mine")
    table._ready.clear()


@pytest.mark.usefixtures("_forget_mine")
def test_kernels_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    code, shown = run("--plugin", str(tmp_path / "mine.py"), "--backend", "mine")
    verdicts = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if "mine" in line]
    assert code == 0
    assert verdicts == [  # one that refuses everything was not found right
        ["pack4", "mine", "cpu", "1", "4", "56", "0", "0", "0", "ok"],
        ["unpack4", "mine", "cpu", "1", "4", "0", "28", "0", "0", "serves no case"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "pack5"], "unknown op 'pack5', did you mean 'pack4'?"),
        (["--backend", "abacus"], "unknown backend 'abacus'"),
        (["--backend", "reference", "--device", "xpu"], "runs on"),
        (["--plugin", "nowhere.py"], "nowhere.py failed to import: FileNotFoundError"),
    ],
)
def test_a_wrong_name_is_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["check", *arguments])
    shown = capsys.readouterr().err
    assert exit_.value.code == 2 and message in shown and "Traceback" not in shown
