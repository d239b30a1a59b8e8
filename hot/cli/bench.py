"""`hot bench`: what kernels and layers take, in one run with what they are compared to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from hot.bench.layers import Bench

bench = typer.Typer(
    help="Time kernels and layers against copies, torch's products and dense layers.", no_args_is_help=True
)
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; the GPU if there is one.")]
Repeats = Annotated[int, typer.Option(min=5, help="How often each is measured; fewer where that takes long.")]
Output = Annotated[Optional[Path], typer.Option("--output", "-o", help="A CSV file to append to.")]  # noqa: UP045
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@bench.command("kernels")
def kernels(
    backend: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A backend; all that run here if left out. Repeatable."),
    ] = None,
    op: Annotated[str | None, typer.Option(help="One op.")] = None,
    device: Device = None,
    size: Annotated[
        float | None, typer.Option(metavar="MB", help="Size of the input; 256 on CUDA, 4 on a CPU.")
    ] = None,
    repeats: Repeats = 25,
    output: Output = None,
    as_json: AsJson = False,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="First find the fastest settings of every Triton kernel and keep them (minutes)."),
    ] = False,
    write_order: Annotated[
        bool, typer.Option("--write-order", help="Keep the times: backend: auto asks the fastest kernel first.")
    ] = False,
) -> None:
    """Time every kernel: its least traffic over a copy's bandwidth, a product's speed over torch's."""
    from hot.bench.kernels import Row
    from hot.bench.kernels import bench as run
    from hot.bench.timing import place
    from hot.errors import HotError

    report = _Report(place(device), Row, output)
    if write_order and backend:
        raise HotError("--write-order compares all backends that run here: leave --backend out")
    before = _asked_first(report.device.type) if write_order else {}  # a broken file shows before minutes have gone by
    with Console(stderr=True).status("timing") as status, _tuning() if tune else nullcontext([]) as tuned:
        report.add(
            run(
                backend or [],
                op,
                report.device,
                size,
                progress=lambda row: status.update(f"{row.backend} {row.op}: {escape(row.case)}"),
                repeats=repeats,
            )
        )
    columns = {
        "op": "op", "case": "case", "backend": "backend", "MB": "megabytes", "p50 ms": "p50_ms", "GB/s": "gb_per_s",
        "of copy": "vs_copy", "TFLOP/s": "tflops", "× torch": "vs_torch",
    }  # fmt: skip
    report.show(columns, ("op",), as_json)
    for found in tuned:
        times = f"{found.default_milliseconds:.4f} → {found.milliseconds:.4f} ms"
        text = f"tuned: {found.family} {found.key}: {times}, {found.config}"
        Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)
    if write_order:
        _write_order(report, before)


def _asked_first(device: str) -> dict[str, str]:
    """The backend whose kernel ``auto`` asks first for every op on a device type."""
    from hot.backends import AUTO, OPS, ops_for

    ops = ops_for(AUTO, device)
    return {op: ops.serving(op) for op in OPS}


def _write_order(report: _Report, before: dict[str, str]) -> None:
    from hot.backends.order import Time, write
    from hot.measured import name_of

    found = [
        Time(row["op"], row["case"], row["backend"], row["p50_ms"]) for row in report.rows if row["p50_ms"] is not None
    ]
    written = write(found, name_of(report.device))
    after = _asked_first(report.device.type)
    changes = [f"{op}: {after[op]} instead of {before[op]}" for op in after if after[op] != before[op]]
    Console(stderr=True, soft_wrap=True).print(
        f"written: {written}, {len(found)} times; auto asks first: {', '.join(changes) or 'as before'}",
        markup=False,
        highlight=False,
    )


def _tuning() -> AbstractContextManager[list[Any]]:
    """What tunes every Triton kernel that is launched inside it. Raises BackendError where Triton is missing."""
    from hot.backends import require

    require("triton")
    from hot.backends.triton.tuning import tuning

    return tuning()


@bench.command("layers")
def layers(
    sets: Annotated[Optional[list[str]], typer.Argument(help="llm, vit, latency, resnet50.")] = None,  # noqa: UP045
    shape: Annotated[
        Optional[tuple[int, int, int]],  # noqa: UP045
        typer.Option(metavar="T O I", help="A linear layer: tokens, outputs, inputs."),
    ] = None,
    policy: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A preset or a YAML file; hot if left out. Repeatable."),
    ] = None,
    device: Device = None,
    dtype: Annotated[
        str | None, typer.Option(help="What policies run in: bfloat16 or float32; bfloat16 on CUDA if left out.")
    ] = None,
    mode: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="eager, or graph: replays of a CUDA graph. Repeatable; latency has both on CUDA."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images in vit and resnet50, instead of 256.")] = None,
    peers: Annotated[bool, typer.Option(help="Time other libraries too, where they are installed.")] = True,
    as_in_training: Annotated[
        bool, typer.Option("--as-in-training", help="Leave layers to torch where the crossover table says so.")
    ] = False,
    repeats: Repeats = 25,
    output: Output = None,
    as_json: AsJson = False,
    write_crossover: Annotated[
        bool, typer.Option("--write-crossover", help="Measure where HOT overtakes torch, for backend: auto (minutes).")
    ] = False,
    crossover_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where --write-crossover writes; this user's cache if left out."),
    ] = None,
    allow_plugins: Annotated[bool, typer.Option("--allow-plugins", help="Let a policy run code of yours.")] = False,
) -> None:
    """Time forward and backward of single layers under policies, beside torch's own in several precisions and its peers."""
    from hot.bench.layers import Bench, Row
    from hot.bench.shapes import CUSTOM, layer_set, linear
    from hot.bench.timing import place
    from hot.errors import HotError
    from hot.policies.schema import load_policy

    report = _Report(place(device), Row, output)
    on_gpu = report.device.type == "cuda"
    chosen = {name: layer_set(name, batch) for name in sets or []}
    if shape is not None:
        if min(shape) < 1:
            raise HotError(f"--shape {' '.join(map(str, shape))}: T, O and I must be above 0")
        chosen["shape"] = CUSTOM, [linear(*shape)]
    if not chosen and not write_crossover:
        raise HotError("nothing to measure: name a set (llm, vit, latency, resnet50), or give --shape T O I")
    for each in mode or []:
        if each not in ("eager", "graph"):
            raise HotError(f"--mode {each!r}: use eager or graph")
    if "graph" in (mode or []) and not on_gpu:
        raise HotError("--mode graph needs a CUDA device: leave it out on cpu")
    policies = {name: load_policy(name, allow_plugins=allow_plugins) for name in policy or ["hot"]}
    with Console(stderr=True).status("timing") as status:
        for name, (found, members) in chosen.items():
            baselines = found.baselines if on_gpu else ()
            setup = Bench(
                policies,
                report.device,
                dtype or ("bfloat16" if on_gpu else "float32"),
                baselines,
                peers and found.peers,
                repeats,
                as_in_training=as_in_training,
            )
            rows: list[Row] = []
            for each in mode or (found.modes if on_gpu else ("eager",)):
                for layer in members:
                    status.update(f"{name} {layer.name}, {each}")
                    rows += report.add(setup.rows(layer, name, graph=each == "graph"))
            if found.summary:
                report.add(setup.summary(rows, found.summary))
        if write_crossover:
            setup = Bench(policies, report.device, dtype or ("bfloat16" if on_gpu else "float32"))
            _write_crossover(setup, crossover_file, status)
    columns = {
        "layer": "layer", "candidate": "candidate", "pass": "what", "mode": "mode", "p50 ms": "p50_ms", "p20": "p20_ms",
        "p80": "p80_ms", "× bf16": "vs_bf16", "× tf32": "vs_tf32", "× fp32": "vs_fp32", "packing": "packing_share",
        "published µs": "published_fp_us", "→ HOT": "published_hot_us",
    }  # fmt: skip
    if chosen:
        report.show(columns, ("set", "layer", "mode"), as_json)


def _write_crossover(setup: Bench, path: Path | None, status: Any) -> None:
    from hot.bench.grid import points
    from hot.crossover import write
    from hot.errors import HotError
    from hot.measured import name_of

    found, finished = points(
        setup, progress=lambda point: status.update(f"{point.kind} {point.sizes}: {point.ratio:.2f}")
    )
    if not found:
        raise HotError(
            f"--write-crossover: policy {', '.join(setup.policies)} leaves every layer to torch, or runs none"
        )
    written = write(found, name_of(setup.device), path)
    won = sum(point.ratio >= 1 for point in found)
    rest = "" if finished else "; the time was up before the grid was done: other layers do as the nearest of those"
    Console(stderr=True, soft_wrap=True).print(
        f"written: {written}, {len(found)} layers, {won} of them faster than dense{rest}", markup=False, highlight=False
    )


class _Report:
    """Rows as they come in: to the CSV file at once, so that an interrupted run keeps them; to the screen in the end."""

    def __init__(self, device: Any, row: Any, output: Path | None) -> None:
        from hot.bench.records import check_csv, environment

        self.device, self.output, self.environment = device, output, environment(device)
        self.rows: list[dict[str, Any]] = []
        if output is not None:
            check_csv(output, [*self.environment, *(field.name for field in fields(row))])

    def add(self, rows: Sequence[Any]) -> Sequence[Any]:
        from hot.bench.records import write_csv

        new = [{**self.environment, **asdict(row)} for row in rows]
        if self.output is not None:
            write_csv(self.output, new)
        self.rows += new
        return rows

    def show(self, columns: dict[str, str], together: tuple[str, ...], as_json: bool) -> None:
        """JSON, or a table of some columns, those that hold anything; a line between rows that differ in `together`."""
        if as_json:
            Console(soft_wrap=True).print_json(json.dumps(self.rows))
            return
        used = {title: name for title, name in columns.items() if any(row[name] is not None for row in self.rows)}
        table = Table(title=", ".join(str(value) for value in self.environment.values() if value), title_justify="left")
        for title, name in used.items():
            table.add_column(title, justify="left" if isinstance(self.rows[0][name], str) else "right")
        table.add_column("")
        for at, row in enumerate(self.rows):
            if at and any(row[name] != self.rows[at - 1][name] for name in together):
                table.add_section()
            table.add_row(*(escape(_shown(name, row[name])) for name in used.values()), escape(row["reason"]))
        console = Console()
        Console(width=None if console.is_terminal else 200).print(table)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if name in ("vs_copy", "packing_share"):
        return f"{100 * value:.0f} %"
    return f"{value:.2f}" if name.startswith("vs_") else f"{value:.4g}"
