"""The command line: `hot COMMAND`. Each command is one function in one module, registered here."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.markup import escape

from hot.cli.bench import bench
from hot.cli.calibrate import calibrate
from hot.cli.check import check
from hot.cli.info import info
from hot.cli.listing import listing
from hot.cli.memory import memory
from hot.cli.plan import plan
from hot.cli.train import train
from hot.errors import HotError

app = typer.Typer(
    name="hot",
    help="HOT: Hadamard-based optimized training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """HOT: a cheap backward pass for PyTorch models, an exact forward."""


app.command("train")(train)
app.command("plan")(plan)
app.command("memory")(memory)
app.command("calibrate")(calibrate)
app.command("check")(check)
app.add_typer(bench, name="bench")
app.command("list")(listing)
app.command("info")(info)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. What HOT raises on purpose becomes one message on stderr and exit code 2, without a traceback."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="hot")
    except HotError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)
