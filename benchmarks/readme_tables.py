"""README's result tables, and the packaged order of the kernels, out of the CSV files under benchmarks/results.

``python benchmarks/readme_tables.py`` writes them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

from hot.backends import REFERENCE, backends
from hot.backends.order import Time, arrange, by_op, write
from hot.files import slug

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EXPERIMENTS = {
    "quickstart": "5,000 MNIST digits, ViT",
    "fashion-vit": "Fashion-MNIST, ViT, one epoch",
    "fashion-resnet18": "Fashion-MNIST, ResNet-18, one epoch",
    "wordnet-minilm": "WordNet glosses, MiniLM fine-tuned, one epoch",
}


def read(name: str) -> list[dict[str, str]]:
    """The rows of a results file."""
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def accuracy_table() -> str:
    """Accuracy (mean over the seeds) and bytes saved for backward, exact beside each policy, of every experiment."""
    lines = [
        "| experiment | policy | device | seeds | accuracy, exact → policy | saved by linear and conv layers | "
        "saved by all ops | step |",
        "| --- " * 8 + "|",
    ]
    for name, title in EXPERIMENTS.items():
        if not exists(name):
            continue
        rows = read(name)
        exact = [row for row in rows if row["policy"] == "exact"]
        for policy in dict.fromkeys(row["policy"] for row in rows if row["policy"] != "exact"):
            runs = [row for row in rows if row["policy"] == policy]

            def figures(column: str, both: tuple[list[dict[str, str]], ...] = (exact, runs)) -> list[float]:
                return [mean(float(row[column]) for row in of) for of in both]

            accuracy = [100 * value for value in figures("accuracy")]
            layers, saved = ([value / 2**20 for value in figures(c)] for c in ("saved_bytes_in_layers", "saved_bytes"))
            alone = all(row["step_ms"] for row in (*exact, *runs))  # else they shared a device
            step = [median(float(row["step_ms"]) for row in of) for of in (exact, runs)] if alone else []
            threads = f"{runs[0]['threads']} thread{'s' if runs[0]['threads'] != '1' else ''}"
            device = f"CPU, {threads}" if runs[0]["device"] == "cpu" else runs[0]["device"]
            lines.append(
                f"| {title} | `{policy}` | {device} | {len(runs)} | {accuracy[0]:.1f} % → {accuracy[1]:.1f} % | "
                f"{layers[0]:.1f} → {layers[1]:.1f} MiB | {saved[0]:.1f} → {saved[1]:.1f} MiB | "
                f"{' → '.join(f'{ms:.0f}' for ms in step) + ' ms' if alone else '–'} |"
            )
    return "\n".join(lines)


def backward_table() -> str:
    """Backward of one linear layer on the CPU, against torch's in float32."""
    rows = [row for row in read("layers_cpu") if row["what"] == "backward"]
    first = rows[0]
    shape = f"({first['tokens']}, {first['outputs']}, {first['inputs']})"
    where = f"{first['device']}, {first['threads']} threads"
    lines = [
        f"| backward of a linear layer, (T, O, I) = {shape}, {where} | p50 | against float32 |",
        "| --- | --- | --- |",
    ]
    for row in rows:
        name = "dense" if row["candidate"] == "fp32" else row["candidate"]
        lines.append(f"| `{name}` | {float(row['p50_ms']):.1f} ms | {float(row['vs_fp32']):.2f}× |")
    return "\n".join(lines)


def machine(rows: list[dict[str, str]]) -> str:
    """Where some rows were measured."""
    first = rows[0]
    return f"{first['device']}, torch {first['torch'].split('+')[0]}"


def kernel_times() -> list[Time]:
    """What kernels_h200.csv has for the order in which ``auto`` asks the kernels."""
    rows = [row for row in read("kernels_h200") if row["p50_ms"]]
    return [Time(row["op"], row["case"], row["backend"], float(row["p50_ms"])) for row in rows]


def write_order(folder: Path = ROOT / "configs" / "order") -> Path:
    """Put these times into the file that is packaged for their device."""
    device = read("kernels_h200")[0]["device"]
    return write(kernel_times(), device, folder / f"{slug(device)}.csv")


def asked_first(times: list[Time]) -> str:
    """Which backend ``auto`` asks first for an op of these times; "" if they are the reference's alone."""
    names = {time.backend for time in times} - {REFERENCE}
    return next(iter(arrange(sorted(names, key=lambda name: -backends[name].priority), times)), "")


def kernels_table() -> str:
    """Every kernel's least traffic over the bandwidth of a copy, and the products' speed over torch's.

    The kernel that ``auto`` asks first for an op is marked, with the time of the fastest other one over its own in that case.
    """
    rows = {(row["op"], row["case"], row["backend"]): row for row in read("kernels_h200")}
    times = by_op(kernel_times())
    first = {op: asked_first(of) for op, of in times.items()}
    lines = [
        f"| op | case, {machine([*rows.values()])} | backend | p50 | `auto` | speed | against | reference backend |",
        "| --- " * 8 + "|",
    ]
    for (op, case, backend), row in rows.items():
        reference = rows.get((op, case, "reference"))
        if row["reason"] or row is reference:
            continue
        if op == "matmul":
            speed, against = f"{float(row['tflops']):.0f} TFLOP/s", f"{float(row['vs_torch']):.2f}× torch's bf16"
        else:
            speed, against = f"{float(row['gb_per_s']):.0f} GB/s", figure(row, "vs_copy", "{:.0f} % of a copy", 100)
        others = [time.p50_ms for time in times[op] if time.case == case and time.backend not in (backend, REFERENCE)]
        ratio = f" {min(others) / float(row['p50_ms']):.2f}×" if others else ""
        mark = f"first{ratio}" if backend == first[op] else ""
        p50, theirs = (figure(each, "p50_ms", "{:.3f} ms") for each in (row, reference))
        lines.append(f"| `{op}` | {case} | {backend} | {p50} | {mark} | {speed} | {against} | {theirs} |")
    return "\n".join(lines)


def by_layer(rows: list[dict[str, str]]) -> dict[str, dict[tuple[str, str, str], dict[str, str]]]:
    """The rows of every layer by (candidate, pass, mode); of rows that were measured again, the last."""
    found: dict[str, dict[tuple[str, str, str], dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row["layer"], {})[row["candidate"], row["what"], row["mode"]] = row
    return found


def figure(row: dict[str, str] | None, column: str, form: str = "{:.2f}", scale: float = 1.0) -> str:
    """A number of a row, or a dash where there is none."""
    return form.format(scale * float(row[column])) if row and row[column] else "–"


def layers_table() -> str:
    """Backward of the linear layers of an LLM and a ViT as CUDA graphs, against dense in three precisions and its peers."""
    rows = [row for name in ("layers_llm_h200", "layers_vit_h200") if exists(name) for row in read(name)]
    columns = (
        "`hot` | × bf16 | in eager calls | × TF32 | × FP32 | torchao float8 | torchao int8 | "
        "two int8 products | packing in forward"
    )
    lines = [f"| backward of (T, O, I), {machine(rows)} | bf16 | {columns} |", "| --- " * 11 + "|"]
    for name, of in by_layer(rows).items():
        hot, dense = of["hot", "backward", "graph"], of["bf16", "backward", "graph"]

        def peer(name: str, of: dict[tuple[str, str, str], dict[str, str]] = of) -> dict[str, str] | None:
            """Its backward, eager where it was not measured as a graph."""
            return of.get((name, "backward", "graph"), of.get((name, "backward", "eager")))

        cells = [
            f"{name} ({hot['tokens']}, {hot['outputs']}, {hot['inputs']})",
            figure(dense, "p50_ms", "{:.2f} ms"),
            figure(hot, "p50_ms", "{:.2f} ms"),
            figure(hot, "vs_bf16"),
            figure(of.get(("hot", "backward", "eager")), "vs_bf16"),
            *(figure(hot, f"vs_{base}") for base in ("tf32", "fp32")),
            *(figure(peer(name), "vs_bf16", "{:.2f}×") for name in ("torchao float8", "torchao int8")),
            figure(peer("torch._int_mm"), "p50_ms", "{:.2f} ms"),
            figure(of.get(("hot", "forward", "graph")), "packing_share", "{:.0f} %", 100),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def latency_table() -> str:
    """Backward of single layers at batch 1 in µs, eager and as a CUDA graph, beside what the paper has."""
    rows = read("layers_latency_h200")
    columns = "FP32 → `hot`, eager | × | FP32 → bf16 → `hot`, CUDA graph | × FP32 | published, RTX 3090 | × |"
    lines = [f"| (L, O, I), µs, {machine(rows)} | {columns}", "| --- " * 7 + "|"]
    for name, of in by_layer(rows).items():
        eager, graph = ([of.get((c, "backward", mode)) for c in ("fp32", "bf16", "hot")] for mode in ("eager", "graph"))
        micro = [[figure(row, "p50_ms", "{:.0f}", 1e3) for row in rows] for rows in (eager, graph)]
        fp, hot = (float(of["hot", "backward", "eager"][f"published_{which}_us"]) for which in ("fp", "hot"))
        cells = [
            name,
            f"{micro[0][0]} → {micro[0][2]}",
            figure(eager[2], "vs_fp32"),
            " → ".join(micro[1]),
            figure(graph[2], "vs_fp32"),
            f"{fp:.0f} → {hot:.0f}",
            f"{fp / hot:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def resnet_table() -> str:
    """Backward of the convolutions of ResNet-50 against cuDNN's: `hot` everywhere, and where the crossover table has it."""
    rows = read("layers_resnet50_h200")
    trained = by_layer(read("layers_resnet50_auto_h200")) if exists("layers_resnet50_auto_h200") else {}
    lines = [
        f"| convolution, channels, size / stride, {machine(rows)} | times | cuDNN, bf16 | `hot` | against bf16 | `auto` |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    key = "hot", "backward", "graph"
    for name, of in by_layer(rows).items():
        hot, dense = of[key], of["bf16", "backward", "graph"]
        times = [figure(row, "p50_ms", "{:.2f} ms") for row in (dense, hot)]
        ratios = [figure(row, "vs_bf16", "{:.2f}×") for row in (hot, trained.get(name, {}).get(key))]
        lines.append(f"| {' | '.join([name, hot['count'], *times, *ratios])} |")
    return "\n".join(lines)


def agreement_table() -> str:
    """Training losses under every backend, two seeds, and how far each is from the reference's of its seed."""
    rows = read("agreement_h200")
    losses = {(row["backend"], row["seed"], int(row["step"])): float(row["loss"]) for row in rows}
    runs, steps = dict.fromkeys((row["backend"], row["seed"]) for row in rows), dict.fromkeys(key[2] for key in losses)
    title = f"{rows[0]['device']}, torch {rows[0]['torch'].split('+')[0]}: mean training loss up to step"
    lines = [
        f"| {title} | {' | '.join(f'{backend}, seed {seed}' for backend, seed in runs)} |",
        "| --- " * (len(runs) + 1) + "|",
    ]
    for step in steps:
        lines.append(f"| {step} | {' | '.join(f'{losses[(*run, step)]:.3f}' for run in runs)} |")
    apart = [mean(abs(losses[(*run, step)] - losses["reference", run[1], step]) for step in steps) for run in runs]
    lines.append(f"| mean distance from the reference's | {' | '.join(f'{each:.3f}' for each in apart)} |")
    return "\n".join(lines)


def compiled_table() -> str:
    """A step's forward and backward, exact and under `hot`, eager and compiled."""
    rows = read("compiled_h200")
    times = {(row["model"], row["candidate"]): row["p50_ms"] for row in rows}
    candidates = dict.fromkeys(row["candidate"] for row in rows)
    lines = [
        f"| forward and backward, {machine(rows)} | {' | '.join(candidates)} |",
        "| --- " * (len(candidates) + 1) + "|",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = [f"{float(times[model, candidate]):.2f} ms" for candidate in candidates]
        lines.append(f"| {' | '.join([model, *cells])} |")
    return "\n".join(lines)


WORKLOADS = {
    "vit-b16": "ViT-B/16, 224²",
    "resnet50": "ResNet-50, 224², channels_last",
    "bert-base": "BERT-base, 512 tokens",
    "llama-1b": "Llama, 1.1 B, 2048 tokens",
    "llama-1b-lora": "the same, LoRA of rank 16",
}


def memory_table() -> str:
    """A whole training step of every workload and variant: bytes saved, peaks, time, and the estimate of the peak."""
    rows = read("memory_h200")
    lines = [
        f"| training step, {machine(rows)} | variant | saved | peak allocated | of bf16's | peak reserved | step | "
        "estimated peak |",
        "| --- " * 8 + "|",
    ]
    for name in dict.fromkeys(row["workload"] for row in rows):
        of = [row for row in rows if row["workload"] == name]
        bf16 = next(float(row["peak_allocated"]) for row in of if row["variant"] == "bf16")
        for row in of:
            peak, estimated = float(row["peak_allocated"] or 0), float(row["estimated_peak"])  # 0: out of memory
            variant = row["variant"]
            cells = [
                f"{WORKLOADS[name]}, batch {row['batch']}",
                variant if variant in ("fp32", "tf32") or variant.startswith("bf16") else f"`{variant}`",
                figure(row, "saved", "{:.2f} GiB", 2**-30),
                f"{peak / 2**30:.2f} GiB" if peak else row["reason"].partition(" at ")[0],
                f"{100 * peak / bf16:.0f} %" if peak else "",
                figure(row, "peak_reserved", "{:.2f} GiB", 2**-30),
                figure(row, "p50_ms", "{:.0f} ms"),
                f"{estimated / 2**30:.2f} GiB" + (f", {100 * estimated / peak - 100:+.0f} %" if peak else ""),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def errors_table() -> str:
    """Errors of every op's gradients on real activations: the median over its calls, and the largest, by experiment."""
    rows = read("op_errors")
    names = list(dict.fromkeys(row["experiment"] for row in rows))
    titles = (EXPERIMENTS[name].removesuffix(", one epoch") for name in names)
    lines = [f"| op under `{rows[0]['policy']}`, {machine(rows)} | gradient of | {' | '.join(titles)} |"]
    lines.append("| --- " * (2 + len(names)) + "|")
    found = {(row["op"], row["gradient"], row["experiment"]): row for row in rows}
    for op, gradient in dict.fromkeys((row["op"], row["gradient"]) for row in rows):
        cells = []
        for name in names:
            row = found.get((op, gradient, name))
            exact = row is not None and float(row["largest"]) < 1e-6
            both = row and f"{100 * float(row['median']):.1f} %, {100 * float(row['largest']):.1f} %"
            cells.append("exact" if exact else both or "")
        lines.append(f"| `{op}` | {gradient} | {' | '.join(cells)} |")
    return "\n".join(lines)


def exists(name: str) -> bool:
    """Whether there is a results file of that name."""
    return (RESULTS / f"{name}.csv").exists()


TABLES: dict[str, tuple[Callable[[], str], tuple[str, ...]]] = {
    "accuracy-table": (accuracy_table, tuple(EXPERIMENTS)),
    "agreement-table": (agreement_table, ("agreement_h200",)),
    "backward-table": (backward_table, ("layers_cpu",)),
    "compiled-table": (compiled_table, ("compiled_h200",)),
    "errors-table": (errors_table, ("op_errors",)),
    "kernels-table": (kernels_table, ("kernels_h200",)),
    "layers-table": (layers_table, ("layers_llm_h200", "layers_vit_h200")),
    "latency-table": (latency_table, ("layers_latency_h200",)),
    "memory-table": (memory_table, ("memory_h200",)),
    "resnet-table": (resnet_table, ("layers_resnet50_h200",)),
}
"""Marker → what writes the table, and the results it needs, any of which will do."""


def render(readme: str) -> str:
    """README with its tables written anew between their markers, where there are results for them."""
    for marker, (table, needs) in TABLES.items():
        if f"<!-- {marker} -->" in readme and any(map(exists, needs)):
            text = table() + "\n"
            between = rf"(?<=<!-- {marker} -->\n).*?(?=<!-- /{marker} -->)"
            readme = re.sub(between, lambda _, text=text: text, readme, flags=re.S)
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(render(path.read_text()))
    write_order()
