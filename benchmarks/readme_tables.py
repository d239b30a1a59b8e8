"""README's result tables, out of the CSV files under benchmarks/results: ``python benchmarks/readme_tables.py`` writes them."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EXPERIMENTS = {
    "quickstart": "5,000 MNIST digits, ViT",
    "fashion-vit": "Fashion-MNIST, ViT, one epoch",
    "fashion-resnet18": "Fashion-MNIST, ResNet-18, one epoch",
}


def read(name: str) -> list[dict[str, str]]:
    """The rows of a results file."""
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def accuracy_table() -> str:
    """Accuracy (mean over the seeds) and bytes saved for backward, exact beside hot, of every experiment."""
    lines = [
        "| experiment | device | seeds | accuracy, exact → hot | saved by linear and conv layers | saved by all ops | step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, title in EXPERIMENTS.items():
        runs = {policy: [row for row in read(name) if row["policy"] == policy] for policy in ("exact", "hot")}

        def figures(column: str, runs: dict[str, list[dict[str, str]]] = runs) -> list[float]:
            return [mean(float(row[column]) for row in of) for of in runs.values()]

        accuracy = [100 * value for value in figures("accuracy")]
        layers, saved = ([value / 2**20 for value in figures(c)] for c in ("saved_bytes_in_layers", "saved_bytes"))
        step = [median(float(row["step_ms"]) for row in of) for of in runs.values()]
        first = runs["hot"][0]
        device = f"CPU, {first['threads']} thread" if first["device"] == "cpu" else first["device"]
        lines.append(
            f"| {title} | {device} | {len(runs['hot'])} | {accuracy[0]:.1f} % → {accuracy[1]:.1f} % | "
            f"{layers[0]:.1f} → {layers[1]:.1f} MiB | {saved[0]:.1f} → {saved[1]:.1f} MiB | {step[0]:.0f} → {step[1]:.0f} ms |"
        )
    return "\n".join(lines)


def backward_table() -> str:
    """Backward of one linear layer on the CPU, against torch's in float32."""
    rows = read("linear_backward_cpu")
    first = rows[0]
    what = f"(T, O, I) = ({first['T']}, {first['O']}, {first['I']}), {first['device']}, {first['threads']} threads"
    lines = [
        f"| backward of a linear layer, {what} | p50 | against float32 |",
        "| --- | --- | --- |",
    ]
    for row in rows:
        if row["what"] == "backward":
            lines.append(f"| `{row['policy']}` | {float(row['p50_ms']):.1f} ms | {row['vs_dense']}× |")
    return "\n".join(lines)


def render(readme: str) -> str:
    """README with its tables written anew between their markers."""
    for marker, table in (("accuracy-table", accuracy_table()), ("backward-table", backward_table())):
        readme = re.sub(
            rf"(<!-- {marker} -->\n).*?(\n<!-- /{marker} -->)", lambda m, t=table: m[1] + t + m[2], readme, flags=re.S
        )
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(render(path.read_text()))
